"""Libraries as templates of the chunked forward: how they are called, refused and given over."""

from __future__ import annotations

from dataclasses import replace

import fake_libraries
import pytest
import torch
from tilescout.errors import UsageError
from tilescout.kernels import external
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_chunk_fwd.external_bounds import bounds_of, on_device
from tilescout.kernels.gdn_chunk_fwd.inputs import make_inputs, make_outputs, make_validation_inputs
from tilescout.kernels.gdn_chunk_fwd.reference import compare
from tilescout.kernels.registry import operation, template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu

NAMES = ("fla", "flash_qla", "flashinfer")
PROBLEM = GdnChunkProblem(2, 150, 100, 1, 2, 128, 128, "bfloat16")


@pytest.fixture
def h200():
    return gpu("h200")


def launched(name, problem, inputs):
    outputs = make_outputs(problem, inputs)
    launcher = template(problem.op, name).build(problem, Config.of(name, {}), inputs)
    launcher.launch(inputs, outputs)
    return outputs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state_layout", ["KV", "VK"])
def test_ragged_sequences_with_empty_ones_and_rows_of_none(monkeypatch, name, state_layout) -> None:
    calls = fake_libraries.install(monkeypatch)
    problem = replace(PROBLEM, state_layout=state_layout)
    for seed in (0, 1):
        inputs = make_validation_inputs(problem, device="cpu", seed=seed)
        comparison = compare(problem, inputs, launched(name, problem, inputs))
        assert comparison.is_ok, comparison.reason
    assert len(calls) == 2


@pytest.mark.parametrize("name", NAMES)
def test_whole_rows_are_given_over_and_states_may_be_left_out(monkeypatch, name) -> None:
    fake_libraries.install(monkeypatch)
    problem = replace(PROBLEM, has_initial_state=False, has_final_state=False)
    inputs = make_inputs(problem, device="cpu", seed=3)
    outputs = launched(name, problem, inputs)
    assert compare(problem, inputs, outputs).is_ok
    assert outputs.final_state is None
    wrong = make_outputs(problem, inputs)
    wrong.out.copy_(outputs.out * 1.1)
    assert not compare(problem, inputs, wrong).is_ok


def test_fla_computes_gate_norm_and_sigmoid_itself(monkeypatch) -> None:
    fake_libraries.install(monkeypatch)
    fields = {"gate": "fused", "gate_dtype": "bfloat16", "beta_dtype": "bfloat16"}
    problem = replace(PROBLEM, use_qk_l2norm=True, **fields)
    inputs = make_validation_inputs(problem, device="cpu", seed=4)
    comparison = compare(problem, inputs, launched("fla", problem, inputs))
    assert comparison.is_ok, comparison.reason


def test_a_dense_batch_is_packed(monkeypatch) -> None:
    fake_libraries.install(monkeypatch)
    problem = replace(PROBLEM, num_tokens=128, max_seqlen=64)
    packed = make_inputs(problem, device="cpu", seed=5)
    dense = replace(
        packed,
        **{n: getattr(packed, n).unflatten(1, (2, 64))[0] for n in ("q", "k", "v", "gate", "beta")},
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    )
    comparison = compare(problem, dense, launched("fla", problem, dense))
    assert comparison.is_ok, comparison.reason


def test_equal_bounds_are_the_same_tensor_and_changed_ones_are_read_again() -> None:
    inputs = fake_libraries.with_device_bounds_alone(make_inputs(PROBLEM, device="cpu", seed=6))
    first = bounds_of(inputs)
    assert first.values == (0, 100, 150)
    device = torch.device("cpu")
    again = bounds_of(make_inputs(PROBLEM, device="cpu", seed=7))
    mine = on_device(first.values, torch.int32, device)
    assert mine is on_device(again.values, torch.int32, device)
    inputs.cu_seqlens[1] = 0
    assert bounds_of(inputs).values == (0, 150)
    assert bounds_of(inputs).with_tokens == (1,)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("flash_qla", {"head_dim_v": 64}, "head dims 128 and 64"),
        ("flash_qla", {"dtype": "float32"}, "dtype='float32'"),
        ("flash_qla", {"gate": "fused"}, "gate='fused'"),
        ("flash_qla", {"gate_dtype": "bfloat16"}, "gate_dtype='bfloat16'"),
        ("flash_qla", {"use_qk_l2norm": True}, "compiled by torch"),
        ("flashinfer", {"use_qk_l2norm": True}, "does nothing with it"),
        ("flashinfer", {"beta_dtype": "bfloat16"}, "beta_dtype='bfloat16'"),
        ("fla", {"head_dim_k": 512}, "head_dim_k=512"),
    ],
)
def test_what_a_library_cannot_do_is_refused(monkeypatch, h200, name, fields, reason) -> None:
    fake_libraries.install(monkeypatch)
    assert template("gdn_chunk_fwd", name).supports(PROBLEM, h200) is None
    found = template("gdn_chunk_fwd", name).supports(replace(PROBLEM, **fields), h200)
    assert found is not None
    assert reason in found


def test_architectures_that_a_library_lacks_are_refused(monkeypatch, h200) -> None:
    fake_libraries.install(monkeypatch)
    old = replace(h200, compute_capability=(7, 5))
    for name in NAMES:
        reason = template("gdn_chunk_fwd", name).supports(PROBLEM, old)
        assert reason is not None
        assert "7.5" in reason


def test_bounds_that_only_the_device_has_are_refused(monkeypatch) -> None:
    fake_libraries.install(monkeypatch)
    inputs = make_inputs(PROBLEM, device="cpu", seed=8)
    for name in NAMES:
        found = template("gdn_chunk_fwd", name)
        assert found.supports_tensors(PROBLEM, inputs) is None
        reason = found.supports_tensors(PROBLEM, fake_libraries.with_device_bounds_alone(inputs))
        assert reason is not None
        assert "cu_seqlens_cpu" in reason


def test_missing_and_old_libraries_take_no_part_and_say_why(monkeypatch, h200) -> None:
    fake_libraries.uninstall(monkeypatch)
    found = template("gdn_chunk_fwd", "fla")
    assert "fla-core>=0.6.0" in str(found.supports(PROBLEM, h200))
    with pytest.raises(ImportError, match="fla-core is not installed"):
        found.source_hash()
    assert [s.template for s in joint_space(PROBLEM, h200).spaces][-1] not in NAMES
    monkeypatch.setattr(external, "_version", lambda name: "0.5.9")
    assert "0.5.9 is too old" in str(found.supports(PROBLEM, h200))
    monkeypatch.setattr(external, "_version", lambda name: "0.6.0.post2")
    monkeypatch.setattr(external, "_has_module", lambda name: name != "einops")
    assert "einops" in str(found.supports(PROBLEM, h200))


def test_installed_libraries_come_after_our_templates(monkeypatch, h200) -> None:
    fake_libraries.install(monkeypatch)
    names = [s.template for s in joint_space(PROBLEM, h200).spaces]
    assert names[-3:] == ["flash_qla", "fla", "flashinfer"]
    assert joint_space(PROBLEM, h200).default.template == "triton"


def test_source_hash_holds_name_and_version(monkeypatch) -> None:
    fake_libraries.install(monkeypatch)
    hashes = {name: template("gdn_chunk_fwd", name).source_hash() for name in NAMES}
    assert len(set(hashes.values())) == 3
    monkeypatch.setattr(external, "_version", lambda name: "0.6.19")
    assert template("gdn_chunk_fwd", "flashinfer").source_hash() != hashes["flashinfer"]


def test_policy_excludes_them(monkeypatch, h200) -> None:
    fake_libraries.install(monkeypatch)
    monkeypatch.setenv(external.EXTERNAL_VARIABLE, "never")
    assert template("gdn_chunk_fwd", "fla").supports(PROBLEM, h200) == (
        "external templates are excluded"
    )
    external.set_external_policy("always")
    assert template("gdn_chunk_fwd", "fla").supports(PROBLEM, h200) is None
    with pytest.raises(UsageError, match=r"'sometimes'.*never, forward, always"):
        external.set_external_policy("sometimes")  # type: ignore[arg-type]


def test_what_a_library_raises_is_a_failed_config(monkeypatch) -> None:
    fake_libraries.install(monkeypatch)
    import flash_qla

    def refuse(*args, **kwargs):
        raise AssertionError("K == V == 128")

    monkeypatch.setattr(flash_qla, "chunk_gated_delta_rule_fwd", refuse)
    inputs = make_inputs(PROBLEM, device="cpu", seed=9)
    with pytest.raises(RuntimeError, match="flash-qla: AssertionError: K == V == 128"):
        launched("flash_qla", PROBLEM, inputs)


def test_compiling_is_importing_the_library(monkeypatch) -> None:
    fake_libraries.install(monkeypatch)
    for name in operation("gdn_chunk_fwd").template_names:
        found = template("gdn_chunk_fwd", name)
        if found.is_external:
            (spec,) = found.kernel_specs(PROBLEM, Config.of(name, {}))
            assert spec.compile(90).cubin == b""
            assert not found.estimate(PROBLEM, Config.of(name, {}), gpu("h200"))
