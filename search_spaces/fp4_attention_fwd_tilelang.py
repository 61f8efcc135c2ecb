"""The search space of FP4 attention's TileLang template."""

from __future__ import annotations

from ..kernels.base import Config
from ..kernels.device import DeviceSpec
from ..kernels.fp4_attention import Fp4AttentionFwdProblem
from .constraints import Constraint, fits_shared_memory
from .parameters import categorical, ordered
from .space import SearchSpace

__all__ = ["tilelang_emulated_space"]

_BF16_BYTES = 2
_ROWS_PER_WARP_GROUP = 64
_THREADS_PER_WARP_GROUP = 128
_OTHER_REGISTERS = 24
"""Of a thread, for addresses, row sums and block scales, at the least."""


def tilelang_emulated_space(problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the dequantising template for Hopper."""
    return SearchSpace(
        template="tilelang_emulated",
        parameters=(
            ordered("block_m", 64, 128, 192),
            ordered("block_n", 64, 128),
            ordered("num_stages", 2, 3, 4),
            categorical("load", "tma_ws", "tma"),
        ),
        constraints=(
            Constraint("shared memory", lambda c: _tiles_fit(problem, device, c)),
            Constraint("tile within registers", lambda c: _accumulators_fit(problem, c)),
            Constraint("work for the loading warps", _has_two_warp_groups),
        ),
        # Two warp groups with 64 rows each, as FlashAttention-3's forward has.
        default=_config(128, 128, 2, "tma_ws"),
        seeds=(
            _config(128, 64, 2, "tma_ws"),
            _config(128, 64, 3, "tma_ws"),
            _config(192, 64, 2, "tma_ws"),
            # Several blocks a multiprocessor: one multiplies while another takes exponentials.
            _config(64, 64, 2, "tma"),
            _config(64, 128, 2, "tma"),
            _config(128, 64, 2, "tma"),
        ),
    )


def _config(block_m: int, block_n: int, num_stages: int, load: str) -> Config:
    tile = {"block_m": block_m, "block_n": block_n}
    return Config.of("tilelang_emulated", {**tile, "num_stages": num_stages, "load": load})


def _tiles_fit(problem: Fp4AttentionFwdProblem, device: DeviceSpec, config: Config) -> str | None:
    """Q, and K and V of every stage."""
    v_bytes = 1 if problem.mode == "fp8_p" else _BF16_BYTES
    keys = int(config["num_stages"]) * int(config["block_n"])
    values = _BF16_BYTES * int(config["block_m"]) + keys * (_BF16_BYTES + v_bytes)
    return fits_shared_memory(values * problem.head_dim, device)


def _accumulators_fit(problem: Fp4AttentionFwdProblem, config: Config) -> str | None:
    """Output, scores and P of a warp group's 64 rows over its threads."""
    head_dim, block_n = problem.head_dim, int(config["block_n"])
    if problem.mode == "fp8_p":
        columns = 2.0 * head_dim + 1.25 * block_n  # each tile has a sum of its own
    elif problem.mode == "direct" and problem.p_map != "exact":
        columns = head_dim + 2.0 * block_n  # exponentials for the logarithm, beside the line
    else:
        columns = head_dim + 1.5 * block_n
    per_thread = _ROWS_PER_WARP_GROUP / _THREADS_PER_WARP_GROUP
    needed = int(columns * per_thread) + _OTHER_REGISTERS
    allowed = _registers_of(config)
    if needed > allowed:
        return f"about {needed} registers a thread, of which the block leaves {allowed}"
    return None


def _registers_of(config: Config) -> int:
    """What a computing thread may have: a loading warp group keeps 24 for each of its own."""
    if config["load"] == "tma":
        return 160 if config["block_m"] == 192 else 255
    return 160 if config["block_m"] == 192 else 240


def _has_two_warp_groups(config: Config) -> str | None:
    if config["load"] == "tma_ws" and config["block_m"] == _ROWS_PER_WARP_GROUP:
        return "one warp group that computes has nothing to alternate with: load='tma' serves it"
    return None
