"""The search space of paged decode's template for latent caches (MLA).

Sources of the seeds: what serving frameworks hard-code (docs/paged_decode.md lists them).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from ..kernels.base import Config, ParameterValue
from ..kernels.device import DeviceSpec
from ..kernels.paged_decode import PagedDecodeProblem
from ..kernels.paged_decode.problem import DTYPE_BYTES, KV_DTYPE_BYTES
from .constraints import TILE_REGISTERS, Constraint, fits_shared_memory
from .parameters import ActiveWhen, categorical, ordered, powers_of_two
from .space import SearchSpace

__all__ = ["mla_space"]

_IS_SPLIT = ActiveWhen("split_rule", ("count", "size", "stream"))
_NUM_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_BLOCK_N = 128
MAX_BLOCK_M = 64
"""Rows of one warp group's tile; more, and 512 columns of accumulators fit in no registers."""
MIN_ROWS, MIN_SWAPPED_ROWS = 16, 8
"""Rows of q that the smallest tensor-core tile holds."""
_WARP_GROUP_ROWS = 64
"""From here on Hopper and data-centre Blackwell read both operands from shared memory."""


def mla_space(problem: PagedDecodeProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the template ``triton_mla``.

    Batch, the mix of lengths and the options of the logits do not shape it, and of the page size
    only which tiles lie within a page, so the problems of a workload share few spaces.
    """
    tokens = problem.kv_len
    if problem.window_left >= 0:
        tokens = min(tokens, problem.window_left + problem.query_len)
    shape = replace(
        problem,
        batch=1,
        kv_len=tokens,
        num_qo_heads=problem.rows_per_kv_head,
        page_size=1 if problem.window_left >= 0 else math.gcd(problem.page_size, MAX_BLOCK_N),
        query_len=1,
        kv_layout="NHD",
        lengths="equal",
        window_left=-1,
        is_causal=True,
        has_soft_cap=False,
        has_sinks=False,
    )
    return _mla_space(shape, device)


@lru_cache(maxsize=16)
def _mla_space(problem: PagedDecodeProblem, device: DeviceSpec) -> SearchSpace:
    max_rows = _max_block_m(problem)
    return SearchSpace(
        template="triton_mla",
        parameters=(
            powers_of_two("block_n", 16, MAX_BLOCK_N),
            powers_of_two("block_m", _min_block_m(problem), max_rows),
            ordered("num_warps", 2, 4, 8),
            ordered("num_stages", 2, 3, 4, 5),
            categorical("page_tiles", True, False),
            categorical("prefetch_pages", True, False),
            categorical("swap_ab", True, False),
            categorical("loop_body", "flat", "branch", "two_branches"),
            categorical("kv_eviction", "evict_normal", "evict_first"),
            categorical("launch_pdl", True, False),
            categorical("split_rule", "none", "count", "size", "stream"),
            ordered("num_splits", *_NUM_SPLITS, active_when=ActiveWhen("split_rule", ("count",))),
            powers_of_two(
                "split_tokens", 128, 8192, active_when=ActiveWhen("split_rule", ("size",))
            ),
            ordered("ctas_per_sm", 1, 2, 3, 4, active_when=ActiveWhen("split_rule", ("stream",))),
            categorical("merge", "kernel", "last_block", active_when=_IS_SPLIT),
        ),
        constraints=(
            Constraint("rows of a matrix tile", _rows_fill_a_tile),
            Constraint("loop body", lambda c: _loop_body_has_a_use(device, c)),
            Constraint("tile within a page", lambda c: _tile_lies_within_a_page(problem, c)),
            Constraint("shared memory", lambda c: _tiles_fit(problem, device, c)),
            Constraint("tile within registers", lambda c: _accumulators_fit(problem, c)),
            Constraint("splits worth a tile", lambda c: _splits_have_work(problem, c)),
        ),
        default=_default(problem, device),
        seeds=_seeds(problem),
    )


def _rows_fill_a_tile(config: Config) -> str | None:
    least = MIN_SWAPPED_ROWS if config["swap_ab"] else MIN_ROWS
    if int(config["block_m"]) < least:
        return f"block_m={config['block_m']} is below {least}"
    return None


def _uses_warp_groups(device: DeviceSpec, config: Config) -> bool:
    """Whether the matrix tiles have the rows that read both operands from shared memory."""
    rows = int(config["block_n"] if config["swap_ab"] else config["block_m"])
    is_able = device.arch < 120 and int(config["num_warps"]) >= 4
    return is_able and rows >= _WARP_GROUP_ROWS


def _loop_body_has_a_use(device: DeviceSpec, config: Config) -> str | None:
    """Branches are written for what Triton makes of Hopper's warp-group products."""
    if config["loop_body"] == "flat":
        return None
    if device.arch // 10 != 9 or not _uses_warp_groups(device, config):
        return f"loop_body={config['loop_body']} is for products of warp groups on sm_90"
    if config["loop_body"] == "two_branches" and config["num_warps"] != 8:
        return "loop_body=two_branches is for two warp groups: num_warps=8"
    return None


def _tile_lies_within_a_page(problem: PagedDecodeProblem, config: Config) -> str | None:
    """``problem.page_size`` is what tiles may divide; 1 where a window shifts them."""
    block_n = int(config["block_n"])
    if config["page_tiles"] and problem.page_size % block_n:
        return f"tiles of block_n={block_n} tokens cross the borders of pages"
    return None


def _tiles_fit(problem: PagedDecodeProblem, device: DeviceSpec, config: Config) -> str | None:
    """Rows of q and the tiles of every stage in flight, as Triton 3.9 was seen to allocate them."""
    block_n, block_m = int(config["block_n"]), int(config["block_m"])
    stages = int(config["num_stages"])
    if config["loop_body"] == "flat" and not config["prefetch_pages"] and stages > 2:
        stages -= 1  # one stage is on the way to page ids
    if not _uses_warp_groups(device, config):
        stages -= 1  # the tile that is computed is in registers
    element, kv_element = DTYPE_BYTES[problem.dtype], KV_DTYPE_BYTES[problem.kv_dtype]
    needed = block_n * problem.head_dim * kv_element * max(1, stages)
    needed += block_m * problem.head_dim * element
    if config["loop_body"] == "two_branches":
        needed += block_m * block_n * element  # each warp group has half of the scores
    return fits_shared_memory(needed, device)


def _accumulators_fit(problem: PagedDecodeProblem, config: Config) -> str | None:
    """Pointers, scores and accumulators of a thread: more than 255 registers spill."""
    num_warps, block_n = int(config["num_warps"]), int(config["block_n"])
    block_m = int(config["block_m"])
    threads = 32 * num_warps
    # A warp loads a row at once; its pointer takes two registers.
    pointers = 2 * block_n // num_warps
    accumulator = block_m * problem.head_dim_v // threads
    # Two warp groups share the scores of 64 rows, or compute all twice, each for its half of V.
    sharing = threads if config["loop_body"] == "two_branches" else min(threads, 128)
    scores = block_m * block_n // sharing
    needed = pointers + accumulator + 2 * scores
    if needed > TILE_REGISTERS:
        what = "pointers, scores and accumulators"
        return f"about {needed} registers a thread for {what}, above {TILE_REGISTERS}"
    return None


def _splits_have_work(problem: PagedDecodeProblem, config: Config) -> str | None:
    """Every run of a request should hold at least one tile."""
    block_n = int(config["block_n"])
    if config["split_rule"] == "count":
        if int(config["num_splits"]) * block_n > problem.kv_len:
            return f"{config['num_splits']} splits of {block_n} exceed kv_len={problem.kv_len}"
    elif config["split_rule"] == "size":
        split_tokens = int(config["split_tokens"])
        if split_tokens % block_n:
            return f"split_tokens={split_tokens} is not a multiple of block_n={block_n}"
        if split_tokens >= 2 * problem.kv_len:
            return f"split_tokens={split_tokens} never splits kv_len={problem.kv_len}"
    return None


def _max_block_m(problem: PagedDecodeProblem) -> int:
    """The smallest power of two that holds the rows of a request, within a tile's limits."""
    rows = 1 << (problem.num_qo_heads - 1).bit_length()
    return min(MAX_BLOCK_M, max(MIN_ROWS, rows))


def _min_block_m(problem: PagedDecodeProblem) -> int:
    return MIN_SWAPPED_ROWS if problem.num_qo_heads <= MIN_SWAPPED_ROWS else MIN_ROWS


def _config(problem: PagedDecodeProblem, **values: ParameterValue) -> Config:
    """A config of these values, else of tiles of all rows, without a split."""
    plain: dict[str, ParameterValue] = {
        "block_m": _max_block_m(problem),
        "num_warps": 4,
        "num_stages": 2,
        "page_tiles": problem.page_size % int(values["block_n"]) == 0,
        "prefetch_pages": False,
        "swap_ab": False,
        "loop_body": "flat",
        "kv_eviction": "evict_normal",
        "launch_pdl": False,
        "split_rule": "none",
    }
    return Config.of("triton_mla", {**plain, **values})


def _counted(problem: PagedDecodeProblem, splits: int, **values: ParameterValue) -> Config:
    """As ``_config``, with at most so many runs a request."""
    fitting = [
        n for n in _NUM_SPLITS if n <= splits and n * int(values["block_n"]) <= problem.kv_len
    ]
    if fitting:
        split: dict[str, ParameterValue] = {"split_rule": "count", "num_splits": fitting[-1]}
        split["merge"] = "kernel"
        values = {**split, **values}
    return _config(problem, **values)


def _default(problem: PagedDecodeProblem, device: DeviceSpec) -> Config:
    """What a hand-written kernel would ship untuned.

    With 64 rows or more, FlashMLA's shape where the device can hold it: tiles of 64 rows and 64
    tokens, an equal share of all tiles for each multiprocessor; on Hopper the loop is written for
    its two warp groups (398 against 614 us for 128 heads, batch 64, 8192 tokens on an H200). Else
    SGLang's: 16 rows, tiles of 32 tokens, 4 warps, 2 stages, 8 splits.
    """
    wide = _config(
        problem,
        block_n=64,
        num_warps=8,
        loop_body="two_branches" if device.arch // 10 == 9 else "flat",
        split_rule="stream",
        ctas_per_sm=1,
        merge="kernel",
    )
    is_wide = _max_block_m(problem) == MAX_BLOCK_M and device.arch < 120
    if is_wide and _tiles_fit(problem, device, wide) is None:
        return wide
    return _counted(problem, 8, block_n=32, block_m=MIN_ROWS)


def _seeds(problem: PagedDecodeProblem) -> tuple[Config, ...]:
    """Shapes of tile and split that others ship, then what sm_90 binaries without spills have."""
    return (
        # SGLang's grouped decode: 16 heads, tiles of 32, 8 splits, 2 stages.
        _counted(problem, 8, block_n=32, block_m=MIN_ROWS),
        # The best of 101 on an H200 (2026-11-30) for 128 and for 16 heads, batch 64, 8192 tokens.
        _config(problem, block_n=64, num_warps=8, loop_body="two_branches"),
        _counted(
            problem,
            2,
            block_n=64,
            num_stages=3,
            prefetch_pages=True,
            kv_eviction="evict_first",
            launch_pdl=True,
        ),
        # FlashMLA's tile, one program a tile of rows, and two.
        _config(problem, block_n=64, num_warps=8),
        _config(problem, block_n=64, num_warps=8, prefetch_pages=True),
        _counted(problem, 2, block_n=64, num_warps=8, merge="kernel", launch_pdl=True),
        # The same with loads ahead of the products and no product computed twice (sm_90).
        _config(problem, block_n=64, num_warps=8, loop_body="two_branches", page_tiles=False),
        _config(
            problem,
            block_n=64,
            num_warps=8,
            loop_body="two_branches",
            prefetch_pages=True,
            split_rule="stream",
            ctas_per_sm=1,
            merge="kernel",
            launch_pdl=True,
        ),
        _config(
            problem,
            block_n=32,
            num_warps=8,
            num_stages=4,
            loop_body="two_branches",
            prefetch_pages=True,
        ),
        _counted(problem, 2, block_n=64, num_warps=8, loop_body="two_branches", swap_ab=True),
        # Narrow tiles, many in flight.
        _config(problem, block_n=32, num_warps=8, num_stages=4, prefetch_pages=True),
        _counted(
            problem,
            4,
            block_n=32,
            num_stages=3,
            prefetch_pages=True,
            kv_eviction="evict_first",
            merge="last_block",
        ),
        _counted(problem, 2, block_n=64, num_stages=3, prefetch_pages=True),
        _counted(problem, 4, block_n=16, block_m=MIN_ROWS, num_stages=4, prefetch_pages=True),
        _counted(problem, 4, block_n=32, block_m=2 * MIN_ROWS, num_warps=8, prefetch_pages=True),
        # Tokens as rows of the matrix tile: a warp group's tile holds 64, whatever the heads.
        _counted(problem, 2, block_n=64, num_warps=8, swap_ab=True, prefetch_pages=True),
        # Equal shares, for batches of unequal lengths.
        _config(
            problem,
            block_n=32,
            num_warps=8,
            num_stages=3,
            prefetch_pages=True,
            split_rule="stream",
            ctas_per_sm=2,
            merge="kernel",
            launch_pdl=True,
        ),
        _config(
            problem,
            block_n=64,
            num_warps=8,
            prefetch_pages=True,
            split_rule="size",
            split_tokens=1024,
            merge="kernel",
            launch_pdl=True,
        ),
    )
