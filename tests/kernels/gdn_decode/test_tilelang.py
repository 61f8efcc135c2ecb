"""The TileLang template without a GPU: values of its CUDA run on the CPU, binaries, refusals."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
from tilelang_host_calls import LauncherOnHost
from tilelang_on_host import HostKernel
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_decode import GdnDecodeOutputs, GdnDecodeProblem
from tilescout.kernels.gdn_decode import reference as ref
from tilescout.kernels.gdn_decode import tilelang_template as host
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.gdn_decode import SPACES
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.records import TrialStatus

QWEN = GdnDecodeProblem(64, 1, 16, 32, 128, 128, "bfloat16", state_layout="VK")
SMALL = GdnDecodeProblem(3, 1, 2, 4, 128, 64, "bfloat16", state_layout="VK")
TILE = {"block_v": 16, "threads": 64, "lanes": 16}
STREAM = {"block_tiles": 32, "num_stages": 3}
FORMS = {
    "direct": {"load": "direct"},
    "cp_async": {"load": "cp_async", "store": "direct", **STREAM},
    "cp_async, stored by tma": {"load": "cp_async", "store": "tma", **STREAM},
    "tma": {"load": "tma", "store": "direct", "state_eviction": "evict_first", **STREAM},
    "tma both ways": {"load": "tma", "store": "tma", "state_eviction": "evict_normal", **STREAM},
}


def config_of(form: str, **tile: int) -> Config:
    return Config.of("tilelang", {**TILE, **FORMS[form], **tile})


@pytest.fixture
def _needs_a_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")


def values_of(problem, config, inputs, outputs, is_aligned):
    """Arguments of the device function by its names."""
    unit = 4 if is_aligned else 1
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": outputs.out}
    pool = outputs.state if inputs.state is None else inputs.state
    return {
        **{"Q": inputs.q, "K": inputs.k, "V": inputs.v, "Out": outputs.out},
        **{"Gate": inputs.gate, "Beta": inputs.beta},
        **{"ALog": inputs.a_log, "DtBias": inputs.dt_bias},
        **{"StateIn": inputs.state, "StateOut": outputs.state},
        **{"Slots": inputs.slots, "Bounds": inputs.cu_seqlens, "scale": inputs.scale},
        **{f"{name}_stride_t": x.stride(1) // unit for name, x in named.items()},
        **{f"{name}_stride_h": x.stride(2) // unit for name, x in named.items()},
        "batch": problem.batch,
        "num_steps": problem.num_steps,
        "num_tokens": inputs.q.shape[0] * inputs.q.shape[1],
        "num_slots": 1 if pool is None else pool.shape[0],
        "block_tiles": config.block_tiles,
        "num_blocks": -(-config.num_tiles(problem) // config.block_tiles),
    }


def run(problem, config, inputs, outputs, folder, *, is_reversed=False, change=None) -> None:
    """The kernel that the launcher takes, on the CPU, with what the launcher passes."""
    typed = host.GdnDecodeTileLangConfig.of(config)
    variant = host._variant(inputs, out=outputs.out, state_out=outputs.state)
    values = values_of(problem, typed, inputs, outputs, variant.is_aligned)
    with pytest.MonkeyPatch.context() as patch:
        on_host = LauncherOnHost(patch, folder)
        patch.setattr(host, "_unsupported_device", lambda q: None)
        launcher = host.GdnDecodeTileLangLauncher(problem, typed, inputs)
        launcher.launch(inputs, outputs)
        on_host.check("gdn_decode_tilelang", values)
    kernel = HostKernel.of(host._spec(problem, typed, variant), folder, change=change)
    kernel((values["num_blocks"],), values, is_reversed=is_reversed)


VALUES = {
    "direct, three steps, KV": ("direct", replace(SMALL, state_layout="KV", num_steps=3)),
    "cp_async, K 96, bf16 state": (
        "cp_async",
        replace(SMALL, head_dim_k=96, state_dtype="bfloat16", dtype="float16"),
    ),
    "cp_async, stored by tma": ("cp_async, stored by tma", SMALL),
    "tma, given gate, fp32": (
        "tma",
        replace(SMALL, gate="given", use_qk_l2norm=False, dtype="float32"),
    ),
    "tma both ways": ("tma both ways", SMALL),
    "tma both ways, KV, two steps": (
        "tma both ways",
        replace(SMALL, state_layout="KV", num_steps=2),
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("_needs_a_compiler")
@pytest.mark.parametrize("case", VALUES)
def test_the_generated_code_matches_the_reference(case, tmp_path) -> None:
    form, problem = VALUES[case]
    config = config_of(form, lanes=8 if problem.head_dim_k == 96 else 16)
    assert SPACES["tilelang"](problem, replace(gpu("h200"), num_sms=1)).check(config) is None
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=1)
    outputs = ref.make_outputs(problem, inputs)
    run(problem, config, inputs, outputs, tmp_path)
    assert ref.compare(problem, inputs, outputs).reason is None


@pytest.mark.slow
@pytest.mark.usefixtures("_needs_a_compiler")
def test_packed_sequences_without_slots_update_states_in_place(tmp_path) -> None:
    problem = replace(SMALL, batch=4, num_steps=3)
    inputs = ref.make_inputs(problem, device="cpu", seed=3)
    wide = torch.randn(1, 12, 2, 131).bfloat16()
    packed = replace(
        inputs,
        q=wide[..., 1:129],  # rows that are not aligned
        k=inputs.k.reshape(1, 12, 2, 128),
        v=inputs.v.reshape(1, 12, 4, 64),
        gate=inputs.gate.reshape(1, 12, 4),
        beta=inputs.beta.reshape(1, 12, 4),
        slots=None,
        cu_seqlens=torch.tensor([0, 5, 5, 6, 12]),
    )
    before = inputs.state.clone()
    outputs = GdnDecodeOutputs(torch.full_like(packed.v, math.nan), packed.state)
    run(problem, config_of("tma both ways"), packed, outputs, tmp_path, is_reversed=True)
    given = replace(packed, state=before)
    assert ref.compare(problem, given, outputs).reason is None
    assert torch.equal(packed.state[1], before[1])


@pytest.mark.slow
@pytest.mark.usefixtures("_needs_a_compiler")
def test_states_may_be_missing(tmp_path) -> None:
    inputs = ref.make_inputs(SMALL, device="cpu", seed=4)
    fresh = replace(inputs, state=None, slots=None)
    outputs = GdnDecodeOutputs(torch.full_like(inputs.v, math.nan), None)
    run(SMALL, config_of("tma both ways"), fresh, outputs, tmp_path)
    assert ref.compare(SMALL, fresh, outputs).reason is None


@pytest.mark.slow
@pytest.mark.usefixtures("_needs_a_compiler")
def test_axes_that_the_program_does_not_declare_are_found(tmp_path, monkeypatch) -> None:
    inputs = ref.make_validation_inputs(SMALL, device="cpu", seed=1)
    monkeypatch.setattr(host, "_merged", lambda x: x)
    with pytest.raises(RuntimeError, match="input Q ndim mismatch, expected 3"):
        run(SMALL, config_of("direct"), inputs, ref.make_outputs(SMALL, inputs), tmp_path)


BROKEN = {
    "a store that is not waited for": ("tma both ways", r"tl::tma_store_wait<1, true>\(\);", ""),
    "a load that is not waited for": ("tma both ways", r"ready\[\(t % 3\)\]\.wait\([^;]*;", ""),
    "a group that is not waited for": ("cp_async", r"tl::cp_async_wait<1>", "tl::cp_async_wait<2>"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("_needs_a_compiler")
@pytest.mark.parametrize("case", BROKEN)
def test_a_missing_wait_is_found(case, tmp_path) -> None:
    form, pattern, other = BROKEN[case]

    def change(cuda: str) -> str:
        broken, count = re.subn(pattern, other, cuda)
        assert count
        return broken

    inputs = ref.make_validation_inputs(SMALL, device="cpu", seed=1)
    outputs = ref.make_outputs(SMALL, inputs)
    try:
        run(SMALL, config_of(form), inputs, outputs, tmp_path, change=change)
        found = ref.compare(SMALL, inputs, outputs).reason
    except RuntimeError as error:
        found = str(error)
    assert found is not None


ARCHITECTURES = {90: "h200", 100: "b200", 120: "rtx5090"}
COMPILED = {
    "sm_90 direct": (90, "direct"),
    "sm_90 tma": (90, "tma both ways"),
    "sm_100": (100, "tma both ways"),
    "sm_120": (120, "cp_async, stored by tma"),
}


@pytest.fixture(scope="module")
def results():
    """What the compile pool made of every case."""
    module = module_of("gdn_decode")
    with CompilePool(2) as pool:
        jobs = {
            case: pool.submit("gdn_decode", module, "tilelang", QWEN, config_of(form), arch)
            for case, (arch, form) in COMPILED.items()
        }
        return {case: job.result() for case, job in jobs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_compiles_without_spills(case, results) -> None:
    arch, form = COMPILED[case]
    result, config, device = results[case], config_of(form), gpu(ARCHITECTURES[arch])
    assert result.status is TrialStatus.OK, result.reason
    (facts,) = result.facts
    assert facts.kernel == "gdn_decode_tilelang_kernel"
    assert facts.threads_per_block == 64
    assert facts.spill_bytes == 0
    assert facts.registers < 255
    assert facts.smem_bytes == (0 if form == "direct" else 3 * 16 * 128 * 4)
    assert (facts.instruction_mix.get("async_copy", 0) > 0) is (form != "direct")
    space = SPACES["tilelang"](QWEN, device)
    assert space.check(config) is None
    if facts.smem_bytes:
        small = replace(device, smem_per_block_bytes=facts.smem_bytes - 1)
        assert "bytes a block" in SPACES["tilelang"](QWEN, small).check(config)


@pytest.mark.parametrize("sku", ARCHITECTURES.values())
@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize(("k", "v"), [(64, 64), (96, 192), (128, 128), (192, 96), (256, 256)])
def test_default_and_seeds_are_valid(k, v, layout, sku) -> None:
    problem = replace(QWEN, head_dim_k=k, head_dim_v=v, state_layout=layout)
    device = gpu(sku)
    assert template("gdn_decode", "tilelang").supports(problem, device) is None
    space = SPACES["tilelang"](problem, device)
    assert space.check(space.default) is None
    loads = {seed["load"] for seed in space.valid_seeds()}
    assert loads == {"direct", "cp_async", "tma"}


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("direct", {"block_v": 128, "threads": 32}, "registers a thread"),
        ("direct", {"block_v": 4, "threads": 256}, "is below 16, the columns"),
        ("tma both ways", {"num_stages": 2}, "no tile to load ahead"),
        ("tma", {"num_stages": 6, "block_tiles": 4}, "5 tiles ahead in runs of block_tiles=4"),
        ("tma", {"block_tiles": 64, "block_v": 32}, "128 blocks for 132 multiprocessors"),
    ],
)
def test_refusals_of_the_space_name_the_reason(form, changes, reason, h200) -> None:
    space = SPACES["tilelang"](QWEN, h200)
    config = config_of(form, block_tiles=8) if form != "direct" else config_of(form)
    assert space.check(config) is None
    assert reason in space.check(config.replace(**changes))


def test_what_the_template_refuses_has_a_reason(h200) -> None:
    chosen = template("gdn_decode", "tilelang")
    assert "head_dim_v=80" in chosen.supports(replace(QWEN, head_dim_v=80), h200)
    ampere = replace(h200, compute_capability=(8, 0))
    assert "8.0 is not one of" in chosen.supports(QWEN, ampere)
    assert "batch=2000000" in chosen.supports(replace(QWEN, batch=2000000), h200)
    inputs = ref.make_inputs(SMALL, device="cpu", seed=5)
    assert "no interpreter" in chosen.supports_tensors(SMALL, inputs)
    odd = inputs.state.new_zeros(inputs.state.numel() + 1)[1:].view(inputs.state.shape)
    reason = chosen.supports_tensors(SMALL, replace(inputs, state=odd))
    assert reason == "state starts 4 bytes after a multiple of 16"
    apart = replace(inputs, v=torch.cat([inputs.v, inputs.v], dim=1)[:, :1])
    assert "v has strides (512, 256, 64, 1)" in chosen.supports_tensors(SMALL, apart)


def test_an_estimate_names_the_kernel_and_sizes_are_no_part_of_it(h200) -> None:
    chosen = template("gdn_decode", "tilelang")
    config = config_of("tma both ways")
    (estimate,) = chosen.estimate(QWEN, config, h200)
    (spec,) = chosen.kernel_specs(QWEN, config)
    assert estimate.kernel == spec.name
    assert estimate.num_programs == 64 * 32 * 8 // 32
    assert chosen.kernel_specs(replace(QWEN, batch=3, num_steps=2), config) == (spec,)
