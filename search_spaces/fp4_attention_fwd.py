"""The search space of FP4 attention forward: one function a template.

Accuracy belongs to the problem's mode, so no parameter changes it: tiles, warps, stages, and how
codes are made or read.
"""

from __future__ import annotations

from functools import partial

from ..kernels.base import Config
from ..kernels.device import DeviceSpec
from ..kernels.fp4_attention import Fp4AttentionFwdProblem
from .constraints import TILE_REGISTERS, Constraint, fits_shared_memory
from .fp4_attention_fwd_tilelang import tilelang_emulated_space
from .fp4_attention_fwd_tilelang_native import tilelang_native_space
from .parameters import Parameter, categorical, ordered
from .space import SearchSpace

__all__ = ["SPACES", "emulated_space", "native_space"]

_TMEM_COLUMNS = 512
_BF16_BYTES, _CODE_BYTES = 2, 0.5


def emulated_space(problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the dequantising template."""
    config = partial(_config, "triton_emulated", "dequantize")
    is_small = problem.mode == "fp8_p" and problem.head_dim == 64  # else it spills
    return SearchSpace(
        template="triton_emulated",
        parameters=(*_tiles((64, 128), (32, 64, 128)), categorical("dequantize", "ahead", "tile")),
        constraints=(
            Constraint("shared memory", lambda c: _bf16_tiles_fit(problem, device, c)),
            Constraint("tile within registers", lambda c: _accumulators_fit(problem, c)),
        ),
        default=config(128, 64, 8, 2, "ahead"),
        seeds=(
            # Two warp groups, each with 64 rows, as FlashAttention-3's forward has.
            config(128, 128, 8, 2, "ahead"),
            config(128, 64, 8, 3, "ahead"),
            config(64, 64, 4, 2, "ahead"),
            # Two blocks a multiprocessor: one multiplies while the other takes exponentials.
            *([config(64, 128, 4, 2, "ahead")] if is_small else []),
            # Nothing written to memory: for few queries.
            config(128, 64, 8, 2, "tile"),
            config(64, 64, 4, 2, "tile"),
        ),
    )


def native_space(problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the template for FP4 tensor cores."""
    config = partial(_config, "triton_native", "conversion")
    has_tensor_memory = device.compute_capability[0] == 10
    # With 64 rows, Triton takes 16-bit products on sm_100.
    rows = (128,) if has_tensor_memory else (64, 128)
    if has_tensor_memory:
        # 128 columns for scores, 128 for the output, and Triton's second copies of both.
        default = config(128, 128, 8, 2, "hardware")
        seeds = [config(128, 128, 8, 3, "hardware")]
        if problem.mode != "nvfp4" or problem.head_dim > 64:  # else it spills on sm_103
            seeds.append(config(128, 64, 8, 2, "hardware"))
    else:
        default = config(64, 64, 8, 2, "hardware")
        seeds = [config(64, 64, 8, 3, "hardware")]
        if problem.mode != "direct" or problem.head_dim < 128:  # else it spills
            seeds.append(config(128, 64, 8, 2, "hardware"))
    return SearchSpace(
        template="triton_native",
        parameters=(
            *_tiles(rows, (64, 128)),
            categorical("conversion", "hardware", "arithmetic"),
        ),
        constraints=(
            Constraint("shared memory", lambda c: _code_tiles_fit(problem, device, c)),
            Constraint("tile within registers", lambda c: _accumulators_fit(problem, c)),
            Constraint("tensor memory", lambda c: _columns_fit(problem, c, has_tensor_memory)),
        ),
        default=default,
        seeds=tuple(seeds),
    )


def _tiles(rows: tuple[int, ...], keys: tuple[int, ...]) -> tuple[Parameter, ...]:
    return (
        ordered("block_m", *rows),
        ordered("block_n", *keys),
        ordered("num_warps", 4, 8),
        ordered("num_stages", 1, 2, 3, 4),
    )


def _config(  # noqa: PLR0917  (a config in the order of its parameters)
    template: str,
    choice: str,
    block_m: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
    value: str,
) -> Config:
    tile = {"block_m": block_m, "block_n": block_n}
    return Config.of(
        template, {**tile, "num_warps": num_warps, "num_stages": num_stages, choice: value}
    )


def _bf16_tiles_fit(
    problem: Fp4AttentionFwdProblem, device: DeviceSpec, config: Config
) -> str | None:
    """Q, and K and V of every stage; with ``tile``, codes of every stage and one tile of values."""
    block_n, stages = int(config["block_n"]), int(config["num_stages"])
    keys = block_n * problem.head_dim
    needed = _BF16_BYTES * int(config["block_m"]) * problem.head_dim
    v_bytes = 1 if problem.mode == "fp8_p" else _BF16_BYTES
    if config["dequantize"] == "ahead":
        needed += stages * keys * (_BF16_BYTES + v_bytes)
    else:
        needed += keys * _BF16_BYTES + int((stages - 1) * 2 * keys * _CODE_BYTES)
    return fits_shared_memory(needed, device)


def _code_tiles_fit(
    problem: Fp4AttentionFwdProblem, device: DeviceSpec, config: Config
) -> str | None:
    """Codes of Q and P, and those of K and V of every stage."""
    rows, keys = int(config["block_m"]), int(config["block_n"])
    v_bytes = 1.0 if problem.mode == "fp8_p" else _CODE_BYTES
    once = rows * (problem.head_dim * _CODE_BYTES + keys * v_bytes)
    staged = keys * problem.head_dim * (_CODE_BYTES + v_bytes)
    return fits_shared_memory(int(once + max(1, int(config["num_stages"]) - 1) * staged), device)


def _accumulators_fit(problem: Fp4AttentionFwdProblem, config: Config) -> str | None:
    """The output and the scores of a tile over the threads of a block."""
    threads = 32 * int(config["num_warps"])
    columns = problem.head_dim + int(config["block_n"])
    needed = int(config["block_m"]) * columns // threads
    if needed > TILE_REGISTERS:
        return f"{needed} registers a thread for output and scores, above {TILE_REGISTERS}"
    return None


def _columns_fit(
    problem: Fp4AttentionFwdProblem, config: Config, has_tensor_memory: bool
) -> str | None:
    """Scores and output as fp32, one column for each of 128 rows."""
    needed = int(config["block_n"]) + problem.head_dim
    if has_tensor_memory and needed > _TMEM_COLUMNS:
        return f"{needed} columns of tensor memory, above {_TMEM_COLUMNS}"
    return None


SPACES = {
    "triton_native": native_space,
    "triton_emulated": emulated_space,
    "tilelang_native": tilelang_native_space,
    "tilelang_emulated": tilelang_emulated_space,
}
