"""The search space of FP4 attention's TileLang template for FP4 tensor cores."""

from __future__ import annotations

from ..kernels.base import Config
from ..kernels.device import DeviceSpec
from ..kernels.fp4_attention import Fp4AttentionFwdProblem
from .constraints import TILE_REGISTERS, Constraint, fits_shared_memory
from .parameters import ordered
from .space import SearchSpace

__all__ = ["tilelang_native_space"]

_WARP = 32
_ROWS_OF_PRODUCT = 16
_RING_ALIGNMENT = 1024
"""Bytes that may be left out before the ring: TMA's targets start at a multiple of as many."""


def tilelang_native_space(problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the template for sm_120."""
    return SearchSpace(
        template="tilelang_native",
        parameters=(
            ordered("block_m", 64, 128),
            ordered("block_n", 64, 128),
            ordered("threads", 64, 128, 256),
            ordered("num_stages", 2, 3, 4),
        ),
        constraints=(
            Constraint("rows of a warp", _warps_have_rows),
            Constraint("shared memory", lambda c: _tiles_fit(problem, device, c)),
            Constraint("tile within registers", lambda c: _accumulators_fit(problem, c)),
        ),
        # Sixteen rows a warp leave registers for two blocks and more a multiprocessor.
        default=_config(64, 64, 128, 2),
        seeds=(
            _config(64, 64, 128, 3),
            _config(64, 128, 128, 2),
            # Twice the rows for the same K and V.
            _config(128, 64, 256, 2),
            _config(128, 128, 256, 3),
        ),
    )


def _config(block_m: int, block_n: int, threads: int, num_stages: int) -> Config:
    tile = {"block_m": block_m, "block_n": block_n}
    return Config.of("tilelang_native", {**tile, "threads": threads, "num_stages": num_stages})


def _warps_have_rows(config: Config) -> str | None:
    """Whether every warp has the rows of one product at least: its rows are its own."""
    warps, block_m = int(config["threads"]) // _WARP, int(config["block_m"])
    if warps * _ROWS_OF_PRODUCT > block_m:
        return f"{warps} warps with {_ROWS_OF_PRODUCT} rows each, of {block_m}"
    return None


def _tiles_fit(problem: Fp4AttentionFwdProblem, device: DeviceSpec, config: Config) -> str | None:
    """Codes and scales of Q, of P, and of K and V of every stage."""
    rows, keys, head_dim = int(config["block_m"]), int(config["block_n"]), problem.head_dim
    values = rows * head_dim + rows * keys + 2 * int(config["num_stages"]) * keys * head_dim
    return fits_shared_memory(values // 2 + values // 16 + _RING_ALIGNMENT, device)


def _accumulators_fit(problem: Fp4AttentionFwdProblem, config: Config) -> str | None:
    """The output and the scores of a tile over the threads of a block."""
    columns = problem.head_dim + int(config["block_n"])
    needed = int(config["block_m"]) * columns // int(config["threads"])
    if needed > TILE_REGISTERS:
        return f"{needed} registers a thread for output and scores, above {TILE_REGISTERS}"
    return None
