"""The space of MLA decode: what its default and seeds are, and what it refuses."""

from __future__ import annotations

import random

import pytest
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.search_spaces.paged_decode_mla import mla_space
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu


def problem_of(heads: int = 128, kv_len: int = 8192, **changes: object) -> PagedDecodeProblem:
    fields = {"batch": 64, "page_size": 64, **changes}
    return PagedDecodeProblem(
        kv_len=kv_len,
        num_qo_heads=heads,
        num_kv_heads=1,
        head_dim=576,
        head_dim_v=512,
        dtype="bfloat16",
        **fields,
    )


@pytest.mark.parametrize("sku", ["h200", "b200", "rtx5090"])
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 128])
@pytest.mark.parametrize("kv_len", [1, 100, 8192])
def test_default_and_seeds_are_valid(sku: str, heads: int, kv_len: int) -> None:
    space = mla_space(problem_of(heads, kv_len), gpu(sku))
    assert len(space.valid_seeds()) >= 2
    assert all(space.check(seed) is None for seed in space.valid_seeds())


def test_latent_problems_are_served_by_this_template_alone(h200) -> None:
    latent = joint_space(problem_of(), h200)
    assert [space.template for space in latent.spaces] == ["triton_mla"]
    plain = joint_space(PagedDecodeProblem(1, 100, 8, 2, 64, 16, "bfloat16"), h200)
    assert "triton_mla" not in [space.template for space in plain.spaces]


def test_refusals_name_the_reason(h200) -> None:
    space = mla_space(problem_of(), h200)
    assert space.is_enumerated
    wide = space.default.replace(prefetch_pages=True, num_stages=3)
    assert "h200 allows 232448" in space.check(wide)
    flat = space.default.replace(loop_body="flat")
    assert "registers a thread" in space.check(flat.replace(num_warps=4))
    branch = space.default.replace(loop_body="branch")
    assert space.check(branch) is None
    assert "for products of warp groups on sm_90" in space.check(branch.replace(block_m=32))
    on_b200 = mla_space(problem_of(), gpu("b200"))
    assert "for products of warp groups on sm_90" in on_b200.check(branch)
    swapped = branch.replace(loop_body="two_branches", swap_ab=True, block_m=16, num_warps=4)
    assert "for two warp groups: num_warps=8" in space.check(swapped)
    crossing = mla_space(problem_of(page_size=48), h200)
    assert crossing.default["page_tiles"] is False
    tile = "tiles of block_n=64 tokens cross the borders of pages"
    assert tile in crossing.check(crossing.default.replace(page_tiles=True))
    windowed = mla_space(problem_of(window_left=1000), h200)
    assert tile in windowed.check(windowed.default.replace(page_tiles=True))
    few = mla_space(problem_of(8), h200)
    assert "block_m=8 is below 16" in few.check(few.default.replace(block_m=8))
    assert few.check(few.default.replace(block_m=8, swap_ab=True)) is None


def test_sampled_configs_respect_the_registers_of_a_thread(h200) -> None:
    rng = random.Random(0)
    space = mla_space(problem_of(), h200)
    for config in (space.sample(rng) for _ in range(300)):
        accumulators = config["block_m"] * 512 // (32 * config["num_warps"])
        assert accumulators <= 128
        if config["split_rule"] == "size":
            assert config["split_tokens"] % config["block_n"] == 0


def test_problems_of_one_shape_share_a_space(h200) -> None:
    first = mla_space(problem_of(16), h200)
    assert mla_space(problem_of(16, batch=1, lengths="skewed"), h200) is first
    assert mla_space(problem_of(8, query_len=2, page_size=256), h200) is not None
    assert mla_space(problem_of(16, page_size=1), h200) is not first
