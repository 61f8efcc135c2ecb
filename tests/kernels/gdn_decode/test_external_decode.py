"""Libraries as templates of decode: FLA between gather and scatter, FlashInfer in the pool."""

from __future__ import annotations

import os
from dataclasses import replace

import fake_libraries
import pytest
import torch
from tilescout.kernels import external
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_decode import GdnDecodeOutputs, GdnDecodeProblem
from tilescout.kernels.gdn_decode import reference as ref
from tilescout.kernels.registry import template
from tilescout.tuner.catalog import gpu

NAMES = ("fla", "flashinfer")
PROBLEM = GdnDecodeProblem(3, 1, 1, 2, 128, 128, "bfloat16", state_layout="VK")

needs_interpreter = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]
MOVES_ROWS = pytest.param("fla", marks=needs_interpreter)
"""FLA's states are gathered and scattered by a kernel."""


@pytest.fixture(autouse=True)
def _shim() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter_shim

        interpreter_shim.install()


def launched(name, problem, inputs, outputs=None) -> GdnDecodeOutputs:
    outputs = outputs or ref.make_outputs(problem, inputs)
    launcher = template(problem.op, name).build(problem, Config.of(name, {}), inputs)
    launcher.launch(inputs, outputs)
    return outputs


@pytest.mark.parametrize("name", [MOVES_ROWS, "flashinfer"])
def test_slots_and_a_skipped_sequence(monkeypatch, name) -> None:
    fake_libraries.install(monkeypatch)
    inputs = ref.make_validation_inputs(PROBLEM, device="cpu", seed=0)
    given = inputs.state.clone()
    comparison = ref.compare(PROBLEM, inputs, launched(name, PROBLEM, inputs))
    assert comparison.is_ok, comparison.reason
    assert torch.equal(inputs.state, given), "states to read stay where others are written"


@pytest.mark.parametrize("name", [MOVES_ROWS, "flashinfer"])
def test_a_pool_is_updated_in_place_and_other_rows_stay(monkeypatch, name) -> None:
    fake_libraries.install(monkeypatch)
    inputs = ref.make_validation_inputs(PROBLEM, device="cpu", seed=1)
    pool = inputs.state.clone()
    outputs = launched(
        name, PROBLEM, replace(inputs, state=pool), GdnDecodeOutputs(inputs.v.clone(), pool)
    )
    comparison = ref.compare(PROBLEM, inputs, outputs)
    assert comparison.is_ok, comparison.reason
    untouched = [s for s in range(pool.shape[0]) if s not in inputs.slots.tolist()]
    assert untouched
    assert torch.equal(pool[untouched], inputs.state[untouched])


@pytest.mark.parametrize("name", NAMES)
def test_states_in_batch_order_need_no_slots(monkeypatch, name) -> None:
    fake_libraries.install(monkeypatch)
    inputs = replace(ref.make_inputs(PROBLEM, device="cpu", seed=2), slots=None)
    comparison = ref.compare(PROBLEM, inputs, launched(name, PROBLEM, inputs))
    assert comparison.is_ok, comparison.reason


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"gate": "given", "num_steps": 3, "use_qk_l2norm": False}, id="given gate"),
        pytest.param({"state_layout": "KV", "state_dtype": "bfloat16"}, id="bf16 state KV"),
    ],
)
def test_fla_serves_steps_layouts_and_state_dtypes(monkeypatch, changes) -> None:
    fake_libraries.install(monkeypatch)
    problem = replace(PROBLEM, **changes)
    inputs = replace(ref.make_inputs(problem, device="cpu", seed=3), slots=None)
    outputs = launched("fla", problem, inputs)
    comparison = ref.compare(problem, inputs, outputs)
    assert comparison.is_ok, comparison.reason


@pytest.mark.interpreter
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_fla_itself_in_the_interpreter(layout) -> None:
    if external.FLA.missing is not None:
        pytest.skip(external.FLA.missing)
    problem = GdnDecodeProblem(3, 1, 1, 2, 64, 64, "float32", state_layout=layout)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=6)
    comparison = ref.compare(problem, inputs, launched("fla", problem, inputs))
    assert comparison.is_ok, comparison.reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_dim_v": 64}, "head dims 128 and 64"),
        ({"num_steps": 2}, "num_steps=2"),
        ({"state_layout": "KV"}, "state_layout='KV'"),
        ({"state_dtype": "bfloat16"}, "state_dtype='bfloat16'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"gate": "given"}, "gate='given'"),
    ],
)
def test_what_flashinfer_cannot_do_is_refused(monkeypatch, fields, reason) -> None:
    fake_libraries.install(monkeypatch)
    found = template("gdn_decode", "flashinfer")
    assert found.supports(PROBLEM, gpu("h200")) is None
    assert reason in str(found.supports(replace(PROBLEM, **fields), gpu("h200")))


def test_tensors_that_a_library_cannot_take_are_refused() -> None:
    inputs = ref.make_inputs(PROBLEM, device="cpu", seed=4)
    packed = replace(inputs, cu_seqlens=torch.arange(4, dtype=torch.int32))
    fla, flashinfer = (template("gdn_decode", name) for name in NAMES)
    assert fla.supports_tensors(PROBLEM, inputs) is None
    assert flashinfer.supports_tensors(PROBLEM, inputs) is None
    assert "slots" in str(fla.supports_tensors(PROBLEM, packed))
    cases = {
        "packed": packed,
        "needs a state": replace(inputs, state=None),
        "2.0": replace(inputs, beta_scale=2.0),
        "gates": replace(inputs, gate=inputs.gate.float()),
        "contiguous": replace(inputs, q=inputs.q.expand(3, 1, 1, 128)[..., ::2]),
    }
    for word, changed in cases.items():
        assert word in str(flashinfer.supports_tensors(PROBLEM, changed))
    without = GdnDecodeOutputs(inputs.v, None)
    assert "needs a state" in str(flashinfer.supports_tensors(PROBLEM, inputs, without))


def test_copies_in_place_share_their_state_with_no_one_else() -> None:
    inputs = ref.make_inputs(PROBLEM, device="cpu", seed=5)
    mine, outputs = ref.make_in_place(PROBLEM, inputs)
    assert outputs.state is mine.state
    assert torch.equal(mine.state, inputs.state)
    assert mine.state.data_ptr() != inputs.state.data_ptr()
