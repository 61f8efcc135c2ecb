"""The search space of paged decode's template for NVFP4 caches.

Its speed is a matter of instructions: docs/paged_decode.md counts them for every value of
``dequant`` and ``v_operand``.
"""

from __future__ import annotations

from functools import lru_cache, partial

from ..kernels.base import Config, ParameterValue
from ..kernels.device import DeviceSpec
from ..kernels.paged_decode import PagedDecodeProblem
from .constraints import TILE_REGISTERS, Constraint, fits_shared_memory
from .paged_decode_splits import split_parameters, split_values, splits_have_work
from .parameters import categorical, ordered, powers_of_two
from .space import SearchSpace

__all__ = ["nvfp4_space"]

MAX_BLOCK_M = 64
"""Rows of q of the largest tile; more take more tiles."""
MIN_ROWS = 8
"""Rows of q that the smallest matrix tile holds."""
_WARP_WORDS = 16
"""Words of a row of V, four codes each, that one warp multiplies: rows of a matrix tile."""
_POOL_REGISTERS = 64
"""Registers of a thread for addresses in four pools and codes on their way, as Triton 3.9 was seen
to take them."""
_REGISTERS = (112, 128, 168, 255)
"""Bounds of registers a thread: 18, 16 and 12 warps a multiprocessor, or none. Without one ptxas
takes about 160 for tiles of 8 rows; 128 cost neither a spill nor more instructions."""
_FIRST_ARCH_WITH_CONVERSION = 100
"""sm_100a, sm_103a and sm_120a convert e2m1 to fp16 in one instruction."""


def nvfp4_space(problem: PagedDecodeProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the template ``triton_nvfp4``.

    Batch, page size, the number of KV heads, the mix of lengths and options of the logits do not
    shape it, so the problems of a workload share the few spaces there are.
    """
    span = problem.kv_len
    if problem.window_left >= 0:
        span = min(span, problem.window_left + problem.query_len)
    shape = PagedDecodeProblem(
        batch=1,
        kv_len=span,
        num_qo_heads=problem.rows_per_kv_head,
        num_kv_heads=1,
        head_dim=problem.head_dim,
        page_size=1,
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
    )
    return _nvfp4_space(shape, device)


@lru_cache(maxsize=16)
def _nvfp4_space(problem: PagedDecodeProblem, device: DeviceSpec) -> SearchSpace:
    max_rows = _max_block_m(problem)
    return SearchSpace(
        template="triton_nvfp4",
        parameters=(
            powers_of_two("block_n", 16, 256),
            powers_of_two("block_m", max(1, max_rows // 4), max_rows),
            ordered("num_warps", 1, 2, 4, 8),
            ordered("num_stages", 2, 3, 4, 5, 6),
            ordered("maxnreg", *_REGISTERS),
            categorical("dequant", *_dequant_values(device)),
            categorical("v_operand", "shared", "registers"),
            categorical("prefetch_pages", True, False),
            categorical("kv_eviction", "evict_normal", "evict_first"),
            categorical("launch_pdl", True, False),
            *split_parameters(),
        ),
        constraints=(
            Constraint("V in registers", lambda c: _warps_share_v(problem, c)),
            Constraint("shared memory", lambda c: _tiles_fit(problem, device, c)),
            Constraint("tile within registers", lambda c: _tiles_fit_registers(problem, c)),
            Constraint("splits worth a tile", lambda c: splits_have_work(c, problem.kv_len)),
        ),
        default=_default(problem, device),
        seeds=_seeds(problem, device),
    )


def _dequant_values(device: DeviceSpec) -> tuple[str, ...]:
    if device.arch >= _FIRST_ARCH_WITH_CONVERSION:
        return ("shift", "carry", "hardware")
    return ("shift", "carry")


def _warps_share_v(problem: PagedDecodeProblem, config: Config) -> str | None:
    """Every warp should have words of V of its own; else warps dequantise the same."""
    words = _padded_dim(problem) // 4
    num_warps = int(config["num_warps"])
    if config["v_operand"] == "registers" and num_warps * _WARP_WORDS > max(words, _WARP_WORDS):
        return f"{num_warps} warps for {words} words of a row: one has {_WARP_WORDS}"
    return None


def _tiles_fit(problem: PagedDecodeProblem, device: DeviceSpec, config: Config) -> str | None:
    """Codes and scales of the stages in flight, and V as fp16 where it is stored again."""
    block_n, stages = int(config["block_n"]), int(config["num_stages"])
    if not config["prefetch_pages"] and stages > 2:
        stages -= 1  # one stage is on the way to page ids
    needed = 2 * block_n * problem.kv_row_bytes * (stages - 1)
    if config["v_operand"] == "shared":
        needed += 2 * block_n * _padded_dim(problem)
    return fits_shared_memory(needed, device)


def _tiles_fit_registers(problem: PagedDecodeProblem, config: Config) -> str | None:
    """K's tile as fp16, scores and accumulators over the threads of a block."""
    threads = 32 * int(config["num_warps"])
    block_n, head_dim = int(config["block_n"]), _padded_dim(problem)
    rows = max(int(config["block_m"]), MIN_ROWS)
    dequantised = block_n * head_dim // 2 // threads
    accumulator = rows * head_dim // threads
    scores = rows * block_n // threads
    needed = _POOL_REGISTERS + dequantised // 2 + accumulator + 2 * scores
    if needed > TILE_REGISTERS:
        what = "dequantised values, scores and accumulators"
        return f"about {needed} registers a thread for {what}, above {TILE_REGISTERS}"
    return None


def _padded_dim(problem: PagedDecodeProblem) -> int:
    return _next_power_of_two(problem.head_dim)


def _max_block_m(problem: PagedDecodeProblem) -> int:
    """The smallest power of two that holds the rows of one KV head, within the largest tile."""
    return min(MAX_BLOCK_M, _next_power_of_two(problem.rows_per_kv_head))


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _config(
    problem: PagedDecodeProblem,
    *,
    block_n: int,
    num_warps: int,
    num_stages: int = 3,
    maxnreg: int = 255,
    dequant: str = "shift",
    v_operand: str = "shared",
    launch_pdl: bool = True,
    splits: int = 1,
    split_tokens: int = 0,
    ctas_per_sm: int = 0,
    merge: str = "kernel",
) -> Config:
    """A config whose tile holds all query heads of a KV head; splits are cut to what fits."""
    values: dict[str, ParameterValue] = {
        "block_n": block_n,
        "block_m": _max_block_m(problem),
        "num_warps": num_warps,
        "num_stages": num_stages,
        "maxnreg": maxnreg,
        "dequant": dequant,
        "v_operand": v_operand,
        "prefetch_pages": True,
        "kv_eviction": "evict_first",
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
    return Config.of("triton_nvfp4", values)


def _default(problem: PagedDecodeProblem, device: DeviceSpec) -> Config:
    """The widest of a few tiles that fits, in 16 splits, or fewer where a request is short."""
    configs = [
        _config(problem, block_n=block_n, num_warps=num_warps, splits=16, launch_pdl=False)
        for block_n, num_warps in ((128, 4), (64, 4), (64, 8), (32, 8))
    ]
    return next(
        config
        for config in configs
        if _tiles_fit(problem, device, config) is None
        and _tiles_fit_registers(problem, config) is None
    )


def _seeds(problem: PagedDecodeProblem, device: DeviceSpec) -> tuple[Config, ...]:
    """The fewest instructions a value, for every number of warps; then splits as elsewhere.

    Three splits make as many programs as many multiprocessors hold where one makes half of them.
    """
    config = partial(_config, problem)
    # Products through tensor memory take more registers: 128 would spill.
    few = 128 if device.arch < _FIRST_ARCH_WITH_CONVERSION else 168
    wide = partial(config, block_n=128, num_warps=4, maxnreg=few)
    pair = partial(config, block_n=64, num_warps=2, v_operand="registers", maxnreg=128)
    small = partial(config, block_n=32, num_warps=1, v_operand="registers", maxnreg=168)
    seeds = [
        wide(),
        wide(dequant="carry"),
        wide(dequant="carry", num_stages=2, splits=3),
        wide(num_stages=4, maxnreg=255),
        pair(),
        pair(dequant="carry"),
        pair(dequant="carry", num_stages=4),
        pair(dequant="carry", splits=3),
        pair(dequant="carry", maxnreg=112, splits=3),
        small(dequant="carry", num_stages=4, splits=3),
        small(num_stages=4, splits=6),
        config(block_n=64, num_warps=1, v_operand="registers", splits=3),
        config(block_n=128, num_warps=2, v_operand="registers", dequant="carry", splits=3),
        config(block_n=64, num_warps=2, maxnreg=168),
        config(block_n=256, num_warps=8),
        *(wide(splits=splits) for splits in (8, 16, 32)),
        *(small(splits=splits) for splits in (16, 32)),
        wide(split_tokens=1024, merge="last_block"),
        wide(ctas_per_sm=3, merge="last_block"),
        pair(dequant="carry", ctas_per_sm=8, merge="last_block"),
    ]
    if "hardware" in _dequant_values(device):
        seeds += [wide(dequant="hardware"), pair(dequant="hardware"), small(dequant="hardware")]
    return tuple(seeds)
