"""The TileLang spaces over problems and devices: defaults, seeds, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import template
from tilescout.search_spaces.paged_decode import SPACES
from tilescout.tuner.catalog import gpu

NAMES = ["tilelang_gather", "tilelang_page"]
PROBLEM = PagedDecodeProblem(4, 8192, 32, 8, 128, 16, "bfloat16")


@pytest.mark.parametrize("sku", ["h200", "b200", "rtx5090"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 7, 16, 64])
@pytest.mark.parametrize("page_size", [16, 128, 528])
@pytest.mark.parametrize("name", NAMES)
def test_default_and_seeds_are_valid(name, page_size, group, head_dim, sku) -> None:
    problem = replace(
        PROBLEM,
        page_size=page_size,
        num_qo_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        head_dim_v=head_dim,
    )
    device = gpu(sku)
    assert template("paged_decode", name).supports(problem, device) is None
    space = SPACES[name](problem, device)
    assert space.check(space.default) is None
    assert space.valid_seeds()
    # A tile has all heads of a KV head, unless registers or shared memory cannot hold them.
    if group <= 16:
        assert space.default["block_h"] >= group


@pytest.mark.parametrize("kv_len", [1, 15, 100, 32768])
@pytest.mark.parametrize("window_left", [-1, 0, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_no_run_is_shorter_than_a_tile(name, window_left, kv_len, h200) -> None:
    space = SPACES[name](replace(PROBLEM, kv_len=kv_len, window_left=window_left), h200)
    tokens = kv_len if window_left < 0 else min(kv_len, window_left + 1)
    configs = list(space)
    assert configs
    for config in configs:
        assert config.get("num_splits", 1) * config["block_n"] <= tokens or (
            config["split_rule"] == "none"
        )


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("tilelang_gather", {"block_n": 256, "num_stages": 4}, "h200 allows"),
        ("tilelang_gather", {"block_n": 32}, "less than 16 tokens to each of 4 warps"),
        ("tilelang_gather", {"block_n": 128, "swap_ab": True}, "more than 16 rows"),
        ("tilelang_gather", {"matmul": "wgmma", "threads": 64}, "of a warp group"),
        ("tilelang_gather", {"matmul": "wgmma", "swap_ab": True, "block_n": 128}, "is not 64"),
        ("tilelang_page", {"block_n": 64, "threads": 128}, "to be a multiple of block_n=64"),
        (
            "tilelang_page",
            {"load": "tma_ws", "block_n": 32, "kv_eviction": "evict_first"},
            "to be a multiple of block_n=32",
        ),
    ],
)
def test_refusals_name_the_reason(name, changes, reason, h200) -> None:
    space = SPACES[name](PROBLEM, h200)
    assert reason in space.check(space.default.replace(**changes))


MISPLACED = replace(PROBLEM, head_dim=64, head_dim_v=64, page_size=256, kv_layout="HND")
"""With WARP_GROUP, what wrote probabilities behind the ring on an H200, faults included."""
WARP_GROUP = {
    **{"block_n": 32, "block_h": 4, "threads": 128, "num_stages": 5, "swap_ab": False},
    **{"matmul": "wgmma", "load": "tma", "kv_eviction": "evict_first", "split_rule": "none"},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_stages": 3}, {"num_stages": 6, "block_n": 64}, {"kv_eviction": "evict_normal"}],
)
def test_a_ring_that_ptxas_gets_wrong_is_refused(changes, head_dim, h200) -> None:
    problem = replace(MISPLACED, head_dim=head_dim, head_dim_v=head_dim)
    values = {**WARP_GROUP, **changes}
    reason = SPACES["tilelang_page"](problem, h200).check(Config.of("tilelang_page", values))
    stages, block_n = values["num_stages"], values["block_n"]
    assert f"num_stages={stages} of wgmma tiles of block_n={block_n} by tma" in reason
    assert "2 and 4 stages are right" in reason


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_stages": 2}, id="two-stages"),
        pytest.param({"num_stages": 4, "block_n": 64}, id="four-stages"),
        pytest.param({"block_n": 16}, id="one-store"),
        pytest.param({"swap_ab": True, "block_n": 64}, id="swapped"),
        pytest.param({"load": "page"}, id="cp-async"),
        pytest.param({"load": "tma_ws"}, id="warp-specialised"),
        pytest.param({"matmul": "mma", "threads": 64}, id="two-warps"),
    ],
)
def test_rings_that_ptxas_gets_right_are_kept(changes, h200) -> None:
    values = {**WARP_GROUP, **changes}
    if values["load"] == "page":
        del values["kv_eviction"]
    config = Config.of("tilelang_page", values)
    assert SPACES["tilelang_page"](MISPLACED, h200).check(config) is None


def test_whole_pages_make_a_tile_by_tma(h200) -> None:
    space = SPACES["tilelang_page"](PROBLEM, h200)
    wide = space.default.replace(load="tma", block_n=64, threads=128, kv_eviction="evict_first")
    assert space.check(wide) is None
    thin = SPACES["tilelang_page"](replace(PROBLEM, page_size=48), h200)
    assert "neither a part nor a multiple" in thin.check(wide)
    assert thin.check(wide.replace(block_n=16, threads=32)) is None


def test_rows_before_a_window_have_no_warp_specialised_form(h200) -> None:
    loads = {
        window: next(
            p.values
            for p in SPACES["tilelang_page"](replace(PROBLEM, window_left=window), h200).parameters
            if p.name == "load"
        )
        for window in (-1, 128)
    }
    assert set(loads[-1]) - set(loads[128]) == {"tma_ws"}


def test_only_hopper_has_warp_group_tiles(h200) -> None:
    blackwell = replace(h200, compute_capability=(10, 0))
    for device, expected in ((h200, ("mma", "wgmma")), (blackwell, ("mma",))):
        space = SPACES["tilelang_gather"](PROBLEM, device)
        assert next(p.values for p in space.parameters if p.name == "matmul") == expected
