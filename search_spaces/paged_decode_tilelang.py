"""The search spaces of paged decode's TileLang templates.

Sources of the seeds: what TileLang's own examples, TileOPs and FlashMLA hard-code
(docs/paged_decode.md lists them).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

from ..kernels.base import Config, ParameterValue
from ..kernels.device import DeviceSpec
from ..kernels.paged_decode import PagedDecodeProblem
from ..kernels.paged_decode.problem import DTYPE_BYTES
from .constraints import TILE_REGISTERS, Constraint, fits_shared_memory
from .parameters import ActiveWhen, Parameter, categorical, ordered, powers_of_two
from .space import SearchSpace

__all__ = ["tilelang_gather_space", "tilelang_page_space"]

_NUM_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_IS_SPLIT = ActiveWhen("split_rule", ("count",))
_WARP = 32
_WARP_GROUP = 128
MIN_ROWS = 16
"""Rows and columns of the smallest matrix tile of one warp that TileLang makes."""
WGMMA_ROWS = 64
MAX_BOXES = 16
"""TMA boxes of one tile; one thread issues them."""


def tilelang_gather_space(problem: PagedDecodeProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the template that gathers row by row.

    Batch, page size and the number of KV heads do not shape it, so that the problems of a workload
    share the few spaces there are, and their enumeration.
    """
    return _space("tilelang_gather", _shape(replace(problem, page_size=1)), device)


def tilelang_page_space(problem: PagedDecodeProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the template whose tiles lie within a page or are whole pages."""
    return _space("tilelang_page", _shape(problem), device)


def _shape(problem: PagedDecodeProblem) -> PagedDecodeProblem:
    return replace(problem, batch=1, num_qo_heads=problem.group_size, num_kv_heads=1)


@lru_cache(maxsize=32)
def _space(template: str, problem: PagedDecodeProblem, device: DeviceSpec) -> SearchSpace:
    max_heads = _max_block_h(problem)
    loads: tuple[Parameter, ...] = ()
    if template == "tilelang_page":
        loads = (
            categorical("load", *_loads(problem)),
            categorical(
                "kv_eviction",
                "evict_normal",
                "evict_first",
                active_when=ActiveWhen("load", ("tma", "tma_ws")),
            ),
        )
    return SearchSpace(
        template=template,
        parameters=(
            powers_of_two("block_n", 16, 256),
            powers_of_two("block_h", max(1, max_heads // 4), max_heads),
            powers_of_two("threads", _WARP, _WARP_GROUP),
            ordered("num_stages", 2, 3, 4, 5, 6),
            categorical("swap_ab", True, False),
            categorical("matmul", *_matmuls(device)),
            *loads,
            categorical("split_rule", "none", "count"),
            ordered("num_splits", *_NUM_SPLITS, active_when=_IS_SPLIT),
        ),
        constraints=(
            Constraint("tile and page", lambda c: _tiles_meet_pages(problem, c)),
            Constraint("tile of the matrix units", lambda c: _has_matrix_tiles(problem, c)),
            Constraint("ring that ptxas gets right", _ring_is_compiled_right),
            Constraint("shared memory", lambda c: _ring_fits(problem, device, c)),
            Constraint("tile within registers", lambda c: _accumulators_fit(problem, c)),
            Constraint("splits worth a tile", lambda c: _splits_have_work(problem, c)),
        ),
        default=_default(template, problem, device),
        seeds=_seeds(template, problem),
    )


def _matmuls(device: DeviceSpec) -> tuple[str, ...]:
    # Only Hopper has wgmma; what later architectures have in its place, the templates do not use.
    return ("mma", "wgmma") if device.compute_capability == (9, 0) else ("mma",)


def _loads(problem: PagedDecodeProblem) -> tuple[str, ...]:
    # Warp-specialised loading has no place where the rows before a window could be cleared.
    return ("page", "tma") if problem.window_left >= 0 else ("page", "tma", "tma_ws")


def _tiles_meet_pages(problem: PagedDecodeProblem, config: Config) -> str | None:
    """A tile lies within a page, or consists of whole pages that are TMA boxes each."""
    load, block_n, page_size = config.get("load"), int(config["block_n"]), problem.page_size
    if load is None or page_size % block_n == 0:
        return None
    if load != "tma":
        return f"load={load} needs page_size={page_size} to be a multiple of block_n={block_n}"
    if block_n % page_size:
        return f"block_n={block_n} is neither a part nor a multiple of page_size={page_size}"
    if block_n // page_size > MAX_BOXES:
        return f"{block_n // page_size} boxes a tile, at most {MAX_BOXES}"
    return None


def _has_matrix_tiles(problem: PagedDecodeProblem, config: Config) -> str | None:
    """Each warp or warp group gets whole tiles of its own of both products."""
    if config["matmul"] == "wgmma":
        return _has_wgmma_tiles(problem, config)
    block_n, warps = int(config["block_n"]), int(config["threads"]) // _WARP
    if block_n < MIN_ROWS * warps:
        return f"block_n={block_n} leaves less than {MIN_ROWS} tokens to each of {warps} warps"
    if config["swap_ab"] and warps > 1 and block_n > MIN_ROWS * warps:
        # 0.1.15 cannot reduce over rows that are spread over warps and over tiles of one warp.
        return f"block_n={block_n} gives each of {warps} warps more than {MIN_ROWS} rows"
    return None


def _ring_is_compiled_right(config: Config) -> str | None:
    """In some kernels, ptxas puts a fixed buffer where the moving ring pointer is.

    Seen in SASS for sm_90a by CUDA 13.0.88, in wrong results and in faults on an H200 (2026-11-30):
    docs/paged_decode.md. A warp group writes probabilities there: not in every kernel of a ring of
    TMA boxes, but in none where one store, of 16 tokens, holds all of them. A power of two of
    stages needs no such pointer.
    """
    num_stages, block_n, load = config["num_stages"], int(config["block_n"]), config.get("load")
    if int(num_stages) & (int(num_stages) - 1) == 0:
        return None
    if config["threads"] == _WARP and load in ("page", "tma"):
        return f"num_stages={num_stages} in one warp: ptxas misplaces a buffer; 2 and 4 are right"
    unswapped = config["matmul"] == "wgmma" and not config["swap_ab"]
    if unswapped and load == "tma" and block_n > MIN_ROWS:
        return (
            f"num_stages={num_stages} of wgmma tiles of block_n={block_n} by tma: ptxas misplaces "
            f"the probabilities; 2 and 4 stages are right, and block_n={MIN_ROWS}"
        )
    return None


def _has_wgmma_tiles(problem: PagedDecodeProblem, config: Config) -> str | None:
    block_n, threads = int(config["block_n"]), int(config["threads"])
    if threads != _WARP_GROUP:
        return f"threads={threads} are not the {_WARP_GROUP} of a warp group"
    if config["swap_ab"] and block_n != WGMMA_ROWS:
        return f"block_n={block_n} is not {WGMMA_ROWS}, the rows of a warp group's tile"
    if not config["swap_ab"] and int(config["block_h"]) < _max_block_h(problem):
        return "a tile of 64 rows has room for all heads of a KV head"
    return None


def _rows(config: Config) -> int:
    if config["matmul"] == "wgmma" and not config["swap_ab"]:
        return WGMMA_ROWS
    return max(MIN_ROWS, int(config["block_h"]))


def _ring_fits(problem: PagedDecodeProblem, device: DeviceSpec, config: Config) -> str | None:
    """K and V tiles of every stage, q, the probabilities, and the tile at the end of a run."""
    block_n, element = int(config["block_n"]), DTYPE_BYTES[problem.dtype]
    edges = 1 if config.get("load") == "tma_ws" else 0
    tiles, rows = 2 * int(config["num_stages"]) + edges, _rows(config)
    values = tiles * block_n * problem.head_dim + rows * (problem.head_dim + block_n)
    # Maxima and sums go from warp to warp: a float for each row that a thread has a part of.
    rows_a_thread = rows // 4 if config["swap_ab"] else rows // 8
    scratch = 4 * int(config["threads"]) * rows_a_thread * (2 + edges)
    return fits_shared_memory(values * element + scratch, device)


def _accumulators_fit(problem: PagedDecodeProblem, config: Config) -> str | None:
    """Output, scores and denominators of a tile over the threads: more than 255 registers spill."""
    threads, rows = int(config["threads"]), _rows(config)
    needed = rows * (problem.head_dim + 2 * int(config["block_n"])) // threads
    if needed > TILE_REGISTERS:
        return f"about {needed} registers a thread for accumulators, above {TILE_REGISTERS}"
    return None


def _splits_have_work(problem: PagedDecodeProblem, config: Config) -> str | None:
    """Every run of a request should hold at least one tile."""
    if config["split_rule"] != "count":
        return None
    tokens = problem.kv_len
    if problem.window_left >= 0:
        tokens = min(tokens, problem.window_left + 1)
    block_n = int(config["block_n"])
    if int(config["num_splits"]) * block_n > tokens:
        return f"{config['num_splits']} splits of {block_n} exceed {tokens} tokens"
    return None


def _max_block_h(problem: PagedDecodeProblem) -> int:
    """The smallest power of two that holds the query heads of one KV head."""
    return 1 << (problem.group_size - 1).bit_length()


def _default(template: str, problem: PagedDecodeProblem, device: DeviceSpec) -> Config:
    """What a hand-written kernel would ship.

    TileLang's flash decoding has tiles of 64, 128 threads, 2 stages and 8 splits. Of these as many
    splits are kept as a request has tiles for, and of the tile what registers and shared memory
    hold.
    """
    heads = _max_block_h(problem)
    for block_h, block_n in itertools.product((heads, heads // 2, heads // 4), (64, 32, 16)):
        config = _config(template, problem, block_n=block_n, num_stages=2, splits=8)
        config = config.replace(block_h=max(1, block_h))
        if not (_ring_fits(problem, device, config) or _accumulators_fit(problem, config)):
            return config
    raise AssertionError(f"no tile of {template} fits {problem} on {device.sku}")


def _config(
    template: str,
    problem: PagedDecodeProblem,
    *,
    block_n: int,
    num_stages: int,
    splits: int,
    threads: int = 128,
    swap_ab: bool = False,
    matmul: str = "mma",
    load: str = "page",
) -> Config:
    """A config whose tile holds all query heads of a KV head, cut to the page and to the length."""
    if template == "tilelang_page" and load != "tma":
        while problem.page_size % block_n and block_n > MIN_ROWS:
            block_n //= 2
    if matmul == "mma":
        threads = min(threads, block_n // MIN_ROWS * _WARP)
    tokens = problem.kv_len
    if problem.window_left >= 0:
        tokens = min(tokens, problem.window_left + 1)
    values: dict[str, ParameterValue] = {
        "block_n": block_n,
        "block_h": _max_block_h(problem),
        "threads": threads,
        "num_stages": num_stages,
        "swap_ab": swap_ab,
        "matmul": matmul,
    }
    if template == "tilelang_page":
        values["load"] = load
        if load != "page":
            values["kv_eviction"] = "evict_normal"
    fitting = [n for n in _NUM_SPLITS if n <= splits and n * block_n <= tokens]
    if fitting:
        values |= {"split_rule": "count", "num_splits": fitting[-1]}
    else:
        values |= {"split_rule": "none"}
    return Config.of(template, values)


def _seeds(template: str, problem: PagedDecodeProblem) -> tuple[Config, ...]:
    """Shapes of tile and split that others ship, then the same with what is special here."""
    shapes = (
        # TileLang's flash decoding: tiles of 64 or 128, 64 query rows (wgmma), 2 and 3 stages.
        {"block_n": 128, "num_stages": 2, "splits": 8, "matmul": "wgmma"},
        {"block_n": 64, "num_stages": 3, "splits": 4, "matmul": "wgmma"},
        # TileOPs' paged decode: tiles of 128 or 64, 16 or 32 splits.
        {"block_n": 128, "num_stages": 2, "splits": 16},
        {"block_n": 64, "num_stages": 3, "splits": 32},
        # XQA's swapped operands.
        {"block_n": 64, "num_stages": 4, "splits": 16, "swap_ab": True, "matmul": "wgmma"},
        # As many requests as fill the device: several small blocks a multiprocessor, no split.
        {"block_n": 64, "num_stages": 3, "splits": 1},
        {"block_n": 32, "num_stages": 4, "splits": 2, "threads": 64},
    )
    configs = [_config(template, problem, **shape) for shape in shapes]
    if template == "tilelang_page":
        configs += [
            _config(template, problem, block_n=64, num_stages=4, splits=splits, load=load)
            for load in _loads(problem)[1:]
            for splits in (1, 16)
        ]
    return tuple(configs)
