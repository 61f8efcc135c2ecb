"""Every seed compiles for its architectures into the products it declares, without spills."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fp4_bwd_calls import problem_of
from tilescout.errors import UsageError
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.fp4_attention_bwd import triton_space
from tilescout.search_spaces.parts import algorithms
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import compile_config
from tilescout.tuner.records import TrialStatus

SKUS = ("h200", "b200", "b300", "rtx5090")
MARK = {"h200": ("HGMMA", "QGMMA"), "b200": ("UTC",), "b300": ("UTC",), "rtx5090": ("QMMA", "HMMA")}


def large(products: str = "emulated", **changes):
    sizes = {"num_qo_heads": 16, "num_kv_heads": 16, "query_len": 8192, "kv_len": 8192}
    fields = {**sizes, "head_dim": 128, "dtype": "bfloat16", "products": products, **changes}
    return problem_of(**fields)


def triton():
    return template("fp4_attention_bwd", "triton")


def compiled(problem, config, device):
    return compile_config(problem.op, module_of(problem.op), "triton", problem, config, device.arch)


def check(result, device, sku: str) -> None:
    assert result.status is TrialStatus.OK, result.reason
    for facts in result.facts:
        assert facts.spill_bytes == 0, facts
        assert facts.smem_bytes <= device.smem_per_block_bytes
        assert facts.tmem_columns <= 512
    assert result.facts[-1].mma_kind.startswith((*MARK[sku], "OMMA"))


@pytest.mark.parametrize("sku", SKUS)
@pytest.mark.parametrize("products", ["emulated", "native"])
@pytest.mark.parametrize("changes", [{}, {"is_causal": False}, {"head_dim": 64}], ids=str)
@pytest.mark.slow
def test_seeds(sku: str, products: str, changes: dict) -> None:
    device, problem = gpu(sku), large(products, **changes)
    if triton().supports(problem, device) is not None:
        pytest.skip("no FP4 tensor cores")
    space = triton_space(problem, device)
    for config in dict.fromkeys((space.default, *space.valid_seeds())):
        check(compiled(problem, config, device), device, sku)


@pytest.mark.parametrize("sku", ["h200", "b200", "rtx5090"])
def test_the_default_compiles(sku: str) -> None:
    device, problem = gpu(sku), large(num_kv_heads=4)
    check(compiled(problem, triton_space(problem, device).default, device), device, sku)


def test_products_of_another_kind_are_refused_with_both_named() -> None:
    # 64 rows on sm_100: Triton multiplies codes in 16 bits instead.
    device, problem = gpu("b200"), large("native")
    space = triton_space(problem, device)
    config = space.default.replace(dq_block_m=64)
    result = compiled(problem, config, device)
    assert result.status is TrialStatus.COMPILE_ERROR
    assert "multiplies in 16-bit, fp8, its mode declares fp8, nvfp4" in result.reason
    assert space.check(config) is not None


@pytest.mark.parametrize("sku", SKUS)
@pytest.mark.parametrize("products", ["emulated", "native"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_spaces(sku: str, products: str, head_dim: int) -> None:
    device, problem = gpu(sku), large(products, head_dim=head_dim)
    if triton().supports(problem, device) is not None:
        pytest.skip("no FP4 tensor cores")
    space, rng = triton_space(problem, device), random.Random(0)
    assert space.check(space.default) is None
    assert len(space.valid_seeds()) == 1 + len(space.seeds) >= 3
    found = algorithms(space)
    assert {a.shared["algorithm"] for a in found} == {"together", "apart"}
    for algorithm in found:
        config = algorithm.space.sample(rng)
        parts = triton().parts(problem, config)
        assert [part.name for part in parts] == list(algorithm.part_names)
        specs = [spec.name for spec in triton().kernel_specs(problem, config)]
        assert specs == [kernel for part in parts for kernel in part.kernels]
        estimates = triton().estimate(problem, config, device)
        assert {estimate.kernel for estimate in estimates} == set(specs)
        assert sum(e.flops for e in estimates) >= problem.flops


def test_what_cannot_work_is_refused(h200) -> None:
    space = triton_space(large(), h200)
    assert "dkdv: " in space.check(space.default.replace(dkdv_num_stages=4, dkdv_block_m=128))
    few = space.default.replace(dq_num_warps=4, dq_block_n=128)
    assert "registers a thread for the tiles of dq" in space.check(few)
    native = triton_space(large("native"), gpu("b200"))
    wide = native.default.replace(dkdv_block_m=128)
    reasons = [constraint.check(wide) for constraint in native.constraints]
    assert "512 columns of tensor memory for dkdv, above 384" in reasons


def test_what_is_not_supported_has_a_reason(h200) -> None:
    assert triton().supports(large(), h200) is None
    reason = triton().supports(large("native"), h200)
    assert reason.startswith("compute capability 9.0 is not one of 10.0, 10.3, 12.0")
    assert triton().supports(large("native"), gpu("b200")) is None
    assert triton().supports(large(head_dim=96), h200) == "head_dim=96 is not one of 64, 128"
    older = replace(h200, compute_capability=(8, 9))
    assert triton().supports(large(), older) == "compute capability 8.9 is below 9.0"
    with pytest.raises(UsageError, match=r"num_qo_heads=3 .* multiple of num_kv_heads=2"):
        problem_of(num_qo_heads=3, num_kv_heads=2)


def test_work_of_a_problem() -> None:
    problem = problem_of(query_len=3, kv_len=5, head_dim=64)
    assert problem.num_pairs == 3 + 4 + 5
    assert problem.flops == 5 * 2 * 2 * 64 * 12
    assert replace(problem, is_causal=False).num_pairs == 15
    assert problem.padded_rows == problem.padded_keys == 128
