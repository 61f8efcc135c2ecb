"""The search space of paged decode: one function a template.

Sources of the seeds: what serving frameworks hard-code (docs/paged_decode.md lists them).
"""

from __future__ import annotations

from functools import lru_cache, partial

from ..kernels.base import Config, ParameterValue
from ..kernels.device import DeviceSpec
from ..kernels.paged_decode import PagedDecodeProblem
from ..kernels.paged_decode.problem import KV_DTYPE_BYTES
from .constraints import TILE_REGISTERS, Constraint, fits_shared_memory
from .paged_decode_mla import mla_space
from .paged_decode_nvfp4 import nvfp4_space
from .paged_decode_splits import split_parameters, split_values, splits_have_work
from .paged_decode_tilelang import tilelang_gather_space, tilelang_page_space
from .parameters import categorical, ordered, powers_of_two
from .space import SearchSpace

__all__ = ["SPACES", "triton_space"]

MIN_DOT_ROWS = 16
"""Rows of the smallest tensor-core tile; swapped tiles have 8 columns."""
MAX_BLOCK_M = 64
"""Rows of the largest tile: a warp group's; more query rows take more tiles."""


def triton_space(problem: PagedDecodeProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the Triton template.

    Batch, page size, the number of KV heads, the mix of lengths and options of the logits do not
    shape it, so the problems of a workload share the few spaces there are, and their enumeration.
    """
    span = problem.kv_len
    if problem.window_left >= 0:
        span = min(span, problem.window_left + problem.query_len)
    shape = PagedDecodeProblem(
        batch=1,
        kv_len=span,
        num_qo_heads=problem.group_size,
        num_kv_heads=1,
        head_dim=problem.head_dim,
        page_size=1,
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
        query_len=problem.query_len,
    )
    return _triton_space(shape, device)


@lru_cache(maxsize=16)
def _triton_space(problem: PagedDecodeProblem, device: DeviceSpec) -> SearchSpace:
    max_heads = _max_block_m(problem)
    return SearchSpace(
        template="triton",
        parameters=(
            powers_of_two("block_n", 16, 256),
            powers_of_two("block_m", max(1, max_heads // 4), max_heads),
            ordered("num_warps", 1, 2, 4, 8),
            ordered("num_stages", 2, 3, 4, 5, 6),
            categorical("prefetch_pages", True, False),
            categorical("swap_ab", True, False),
            categorical("kv_eviction", "evict_normal", "evict_first"),
            categorical("launch_pdl", True, False),
            *split_parameters(),
        ),
        constraints=(
            Constraint("shared memory", lambda c: _tiles_fit(problem, device, c)),
            Constraint("tile within registers", lambda c: _accumulators_fit(problem, c)),
            Constraint("splits worth a tile", lambda c: splits_have_work(c, problem.kv_len)),
        ),
        default=_default(problem),
        seeds=_seeds(problem),
    )


def _tiles_fit(problem: PagedDecodeProblem, device: DeviceSpec, config: Config) -> str | None:
    """K and V tiles of every stage in flight, less the one being computed."""
    block_n, stages = int(config["block_n"]), int(config["num_stages"])
    tile_bytes = 2 * block_n * problem.head_dim * KV_DTYPE_BYTES[problem.kv_dtype]
    return fits_shared_memory(tile_bytes * max(1, stages - 1), device)


def _accumulators_fit(problem: PagedDecodeProblem, config: Config) -> str | None:
    """Pointers and scores of a tile over the threads of a block: more than 255 registers spill."""
    threads = 32 * int(config["num_warps"])
    block_n = int(config["block_n"])
    # A 16-byte load needs a 64-bit pointer (2 registers), for K and V.
    element = KV_DTYPE_BYTES[problem.kv_dtype]
    head_dim = _next_power_of_two(problem.head_dim)
    pointers = 2 * 2 * block_n * head_dim * element // 16 // threads
    rows = max(int(config["block_m"]), 8 if config["swap_ab"] else MIN_DOT_ROWS)
    accumulator = rows * head_dim // threads
    scores = rows * block_n // threads
    needed = pointers + accumulator + 2 * scores
    if needed > TILE_REGISTERS:
        what = "pointers and accumulators"
        return f"about {needed} registers a thread for {what}, above {TILE_REGISTERS}"
    return None


def _default(problem: PagedDecodeProblem) -> Config:
    """What a hand-written kernel would ship untuned.

    Tiles of 32 tokens, 16 splits, and Triton's own 4 warps and 3 stages; vLLM's unified attention
    has 16 splits too, with tiles of 16 tokens, or of 32 where it does not split. Fewer splits where
    a request is too short for 16.
    """
    return _config(problem, block_n=32, num_warps=4, num_stages=3, splits=16, launch_pdl=False)


def _config(
    problem: PagedDecodeProblem,
    *,
    block_n: int,
    num_warps: int,
    num_stages: int,
    splits: int = 1,
    split_tokens: int = 0,
    ctas_per_sm: int = 0,
    merge: str = "kernel",
    prefetch_pages: bool = False,
    swap_ab: bool = False,
    kv_eviction: str = "evict_normal",
    launch_pdl: bool = True,
) -> Config:
    """A config whose tile holds all query heads of a KV head; splits are cut to what fits."""
    values: dict[str, ParameterValue] = {
        "block_n": block_n,
        "block_m": _max_block_m(problem),
        "num_warps": num_warps,
        "num_stages": num_stages,
        "prefetch_pages": prefetch_pages,
        "swap_ab": swap_ab,
        "kv_eviction": kv_eviction,
        "launch_pdl": launch_pdl,
    }
    values |= split_values(
        problem.kv_len,
        block_n,
        splits=splits,
        split_tokens=split_tokens,
        ctas_per_sm=ctas_per_sm,
        merge=merge,
    )
    return Config.of("triton", values)


def _max_block_m(problem: PagedDecodeProblem) -> int:
    """The smallest power of two that holds the rows of one KV head, within a warp group's tile."""
    return min(MAX_BLOCK_M, _next_power_of_two(problem.rows_per_kv_head))


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _seeds(problem: PagedDecodeProblem) -> tuple[Config, ...]:
    """Shapes of tile and split that others ship, then those that won on an H200 (2026-11-30)."""
    streamed = partial(
        _config, problem, num_stages=3, prefetch_pages=True, kv_eviction="evict_first"
    )
    wide = partial(streamed, block_n=128, num_warps=4)
    return (
        # SGLang's grouped decode: tiles of 32, 8 splits, 2 stages.
        _config(problem, block_n=32, num_warps=4, num_stages=2, splits=8, launch_pdl=False),
        # IBM's vllm-triton-backend, H100 winner: tiles of 32, 4 warps, 4 stages, one pass.
        _config(problem, block_n=32, num_warps=4, num_stages=4, launch_pdl=False),
        # Few requests: as many runs as there are multiprocessors.
        *(wide(splits=splits) for splits in (8, 16, 32)),
        wide(splits=8, num_stages=2, swap_ab=True),
        wide(split_tokens=512),
        streamed(block_n=32, num_warps=4, splits=32, swap_ab=True),
        # As many requests as fill the device: no split, or a few.
        wide(),
        streamed(block_n=64, num_warps=2, num_stages=4),
        streamed(block_n=16, num_warps=1, num_stages=4),
        streamed(block_n=32, num_warps=1, num_stages=5, splits=3),
        streamed(block_n=64, num_warps=2, splits=2),
        # Unequal lengths: runs of equal size, or a persistent grid of equal shares.
        wide(split_tokens=1024, merge="last_block"),
        wide(split_tokens=2048, merge="last_block"),
        wide(ctas_per_sm=1, merge="last_block"),
        streamed(block_n=64, num_warps=4, ctas_per_sm=2, merge="last_block"),
    )


SPACES = {
    "triton": triton_space,
    "triton_nvfp4": nvfp4_space,
    "triton_mla": mla_space,
    "tilelang_gather": tilelang_gather_space,
    "tilelang_page": tilelang_page_space,
}
