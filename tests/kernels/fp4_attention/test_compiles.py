"""Every seed compiles for its architectures into the products its mode declares, without spills."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fp4_calls import MODES, config_of, problem_of
from tilescout.kernels.fp4_attention.mma_kinds import declared_kinds, kinds_in_ptx
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.fp4_attention_fwd import SPACES
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import compile_config
from tilescout.tuner.records import TrialStatus

NATIVE_SKUS = ("b200", "b300", "rtx5090")
MARK = {"b200": "UTC", "b300": "UTC", "rtx5090": r"OMMA\.SF|QMMA", "h200": "HGMMA|QGMMA"}


def large(mode: str, products: str, **changes):
    sizes = {"num_qo_heads": 24, "num_kv_heads": 24, "query_len": 4096, "kv_len": 4096}
    fields = {**sizes, "head_dim": 128, "out_dtype": "bfloat16", **changes}
    return problem_of(**fields, **MODES[mode], products=products)


def compiled(problem, config, device):
    name = config.template
    return compile_config(problem.op, module_of(problem.op), name, problem, config, device.arch)


@pytest.mark.parametrize("sku", NATIVE_SKUS)
@pytest.mark.parametrize("mode", ["nvfp4", "direct ceil", "fp8_p"])
@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, {"head_dim": 64}], ids=str)
@pytest.mark.slow
def test_native_seeds(sku: str, mode: str, changes: dict) -> None:
    device, problem = gpu(sku), large(mode, "native", **changes)
    assert template(problem.op, "triton_native").supports(problem, device) is None
    space = SPACES["triton_native"](problem, device)
    for config in dict.fromkeys((space.default, *space.valid_seeds())):
        result = compiled(problem, config, device)
        assert result.status is TrialStatus.OK, (config, result.reason)
        (facts,) = result.facts
        assert re.match(MARK[sku], facts.mma_kind)
        assert facts.spill_bytes == 0, config
        assert facts.tmem_columns <= 512
        assert facts.smem_bytes <= device.smem_per_block_bytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{}, {"is_causal": True, "q_mean": "block"}], ids=str)
@pytest.mark.slow
def test_emulated_seeds_on_hopper(mode: str, changes: dict) -> None:
    device, problem = gpu("h200"), large(mode, "emulated", **changes)
    space = SPACES["triton_emulated"](problem, device)
    result = compiled(problem, space.default, device)
    assert result.status is TrialStatus.OK, result.reason
    *ahead, attention = result.facts
    assert len(ahead) == len({"nvfp4", problem.v_format.name} if problem.v_format else {"nvfp4"})
    assert all(facts.spill_bytes == 0 for facts in result.facts)
    assert attention.mma_kind.startswith(("HGMMA", "QGMMA"))
    assert attention.smem_bytes <= device.smem_per_block_bytes


@pytest.mark.parametrize("sku", ["b200", "rtx5090"])
def test_emulated_default_elsewhere(sku: str) -> None:
    device, problem = gpu(sku), large("direct ceil", "emulated")
    result = compiled(problem, SPACES["triton_emulated"](problem, device).default, device)
    assert result.status is TrialStatus.OK, result.reason


def test_a_silent_downgrade_is_refused_with_both_kinds_named() -> None:
    # 64 rows on sm_100: Triton multiplies in 16 bits instead.
    problem = large("direct ceil", "native")
    config = config_of(problem, 64, 64, choice="hardware")
    result = compiled(problem, config, gpu("b200"))
    assert result.status is TrialStatus.COMPILE_ERROR
    assert "multiplies in 16-bit, its mode declares mxfp4, nvfp4" in result.reason
    assert SPACES["triton_native"](problem, gpu("b200")).check(config) is not None


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [
        ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16", "nvfp4"),
        ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32", "mxfp4"),
        ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X", "nvfp4"),
        ("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::2X.m16n8k64.row.col", "mxfp4"),
        ("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32", "fp8"),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4", "fp8"),
        ("tcgen05.mma.cta_group::1.kind::f16", "16-bit"),
        ("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", "fp8"),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "16-bit"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "16-bit"),
    ],
)
def test_kinds_are_read_from_instructions(instruction: str, kind: str) -> None:
    assert kinds_in_ptx(f"  {instruction} [%r1], %rd2;\n") == {kind}


def test_declared_kinds() -> None:
    assert declared_kinds(large("nvfp4", "native")) == {"nvfp4"}
    assert declared_kinds(large("fp8_p", "native")) == {"nvfp4", "fp8"}
    assert declared_kinds(large("fp8_p", "emulated")) == {"16-bit", "fp8"}
    assert declared_kinds(large("direct ceil", "emulated")) == {"16-bit"}


def test_what_is_not_supported_has_a_reason(h200) -> None:
    native, emulated = (
        template("fp4_attention_fwd", f"triton_{n}") for n in ("native", "emulated")
    )
    problem = large("nvfp4", "native")
    reason = native.supports(problem, h200)
    assert reason.startswith("compute capability 9.0 is not one of 10.0, 10.3, 12.0")
    assert "products='emulated'" in reason
    assert "triton_native serves such" in emulated.supports(problem, h200)
    assert "triton_emulated serves such" in native.supports(large("nvfp4", "emulated"), gpu("b200"))
    assert emulated.supports(large("nvfp4", "emulated", head_dim=96), h200) == (
        "head_dim=96 is not one of 64, 128"
    )
    older = replace(h200, compute_capability=(8, 9))
    assert emulated.supports(large("nvfp4", "emulated"), older) == (
        "compute capability 8.9 is below 9.0"
    )


@pytest.mark.parametrize("sku", ["h200", "b200", "rtx5090"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_spaces(sku: str, mode: str, head_dim: int) -> None:
    device = gpu(sku)
    for products in ("native", "emulated"):
        problem = large(mode, products, head_dim=head_dim)
        if template(problem.op, f"triton_{products}").supports(problem, device) is not None:
            continue
        space = SPACES[f"triton_{products}"](problem, device)
        configs = list(space)
        assert space.default in configs
        assert len(configs) == len(set(configs)) >= 8
        assert len(space.valid_seeds()) >= 2
        for config in configs:
            assert config["block_m"] * (head_dim + config["block_n"]) <= (
                224 * 32 * config["num_warps"]
            )
        estimates = template(problem.op, f"triton_{products}").estimate(
            problem, space.default, device
        )
        assert estimates[-1].flops == problem.flops
        assert estimates[-1].num_programs == 24 * 4096 // space.default["block_m"]
