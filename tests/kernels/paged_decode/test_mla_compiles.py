"""The MLA template compiles for every architecture that it claims, into what its space assumes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.paged_decode_mla import mla_space
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import compile_config
from tilescout.tuner.records import TrialStatus

SKUS = ("h200", "b200", "b300", "rtx5090")


def problem_of(heads: int, **changes: object) -> PagedDecodeProblem:
    fields = {"head_dim": 576, "head_dim_v": 512, "page_size": 64, "dtype": "bfloat16", **changes}
    return PagedDecodeProblem(batch=64, kv_len=8192, num_qo_heads=heads, num_kv_heads=1, **fields)


def compiled(problem, config, device):
    result = compile_config(
        "paged_decode", module_of("paged_decode"), "triton_mla", problem, config, device.arch
    )
    assert result.status is TrialStatus.OK, result.reason
    return result.facts


@pytest.mark.parametrize("sku", SKUS)
@pytest.mark.parametrize("heads", [16, 128])
def test_default_compiles_and_fits(sku: str, heads: int) -> None:
    device, problem = gpu(sku), problem_of(heads)
    assert template("paged_decode", "triton_mla").supports(problem, device) is None
    attention, merge = compiled(problem, mla_space(problem, device).default, device)
    assert attention.smem_bytes <= device.smem_per_block_bytes
    assert attention.mma_kind != "none"
    assert merge.spill_bytes == 0


@pytest.mark.parametrize("swap_ab", [False, True])
def test_hopper_reads_the_tile_once_into_warp_group_products(swap_ab: bool) -> None:
    # One tile for two products: with two copies of it, neither would fit in shared memory.
    device, problem = gpu("h200"), problem_of(16 if swap_ab else 128)
    space = mla_space(problem, device)
    config = space.default.replace(
        block_n=64, num_warps=8, num_stages=2, swap_ab=swap_ab, loop_body="flat"
    )
    assert space.check(config) is None
    (facts, *_) = compiled(problem, config, device)
    assert facts.mma_kind.startswith("HGMMA")
    tile_bytes = 64 * 576 * 2
    q_bytes = int(config["block_m"]) * 576 * 2
    assert 2 * tile_bytes < facts.smem_bytes <= 2 * tile_bytes + q_bytes + 4096
    # Every thread asks for its share of one tile in each pass of the loop.
    assert facts.loop_load_bytes * 256 in range(tile_bytes, tile_bytes + 4096)


def test_two_branches_compute_no_product_twice() -> None:
    device, problem = gpu("h200"), problem_of(128)
    space = mla_space(problem, device)
    flat = space.default.replace(page_tiles=False, prefetch_pages=True, loop_body="flat")
    branches = flat.replace(loop_body="two_branches")
    assert space.check(branches) is None
    products = {c: compiled(problem, c, device)[0].instruction_mix["mma"] for c in (flat, branches)}
    # A warp group's 64 x 32 x 16 steps of q k^T, in halves of 64 tokens: both, or its own.
    steps = 576 // 16
    assert products[flat] - products[branches] == steps


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kv_dtype": "float8_e4m3fn"}, id="8 bit"),
        pytest.param({"window_left": 1023, "query_len": 4, "dtype": "float16"}, id="window"),
        pytest.param({"has_soft_cap": True, "has_sinks": True, "page_size": 1}, id="options"),
    ],
)
def test_options_compile(changes: dict) -> None:
    device, problem = gpu("h200"), problem_of(16, **changes)
    compiled(problem, mla_space(problem, device).default, device)


def test_older_architectures_are_refused(h200) -> None:
    older = replace(h200, compute_capability=(8, 9))
    reason = template("paged_decode", "triton_mla").supports(problem_of(16), older)
    assert reason == "compute capability 8.9 is below 9.0"
