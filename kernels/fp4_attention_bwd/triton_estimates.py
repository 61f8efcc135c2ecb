"""How each launch of the backward loads the device: the cost model's view of a config."""

from __future__ import annotations

from ..base import LaunchEstimate
from ..device import DeviceSpec
from ..fp4_attention.problem import OUT_DTYPE_BYTES
from .triton_config import DK, DKDV, DQ, DV, PREPARE, Fp4AttentionBwdTritonConfig
from .triton_specs import (
    AMAX_KERNEL,
    GRADIENT_KERNELS,
    OPERAND_KERNEL,
    ROWS_KERNEL,
    TURN_KERNEL,
)

__all__ = ["launch_estimates"]

_PRODUCTS = {DKDV: 4, DK: 3, DV: 2, DQ: 3}
"""Products of a tile, that of Q with K included."""
_FP8_TILES = {DKDV: 3, DK: 2, DV: 1, DQ: 2}
"""FP8 operands that a step loads, beside Q or K."""
_CODE_BYTES, _VALUE_BYTES = 0.5625, 2
_AXIS = {DKDV: "m", DK: "m", DV: "m", DQ: "n"}
"""The block that a step of the loop takes in."""


def launch_estimates(
    config: Fp4AttentionBwdTritonConfig, device: DeviceSpec
) -> tuple[LaunchEstimate, ...]:
    """One estimate a launch, in launch order."""
    found: list[LaunchEstimate] = []
    for part in config.parts:
        found += _prepare(config) if part == PREPARE else [_gradient(config, part, device)]
    return tuple(found)


def _prepare(config: Fp4AttentionBwdTritonConfig) -> list[LaunchEstimate]:
    problem, block = config.problem, config.number("prepare_block_m")
    size = OUT_DTYPE_BYTES[problem.dtype]
    heads, kv_heads = (
        problem.batch * problem.num_qo_heads,
        problem.batch * problem.num_kv_heads,
    )
    values = 0 if config.is_native else _VALUE_BYTES
    operand = _CODE_BYTES + values + 1
    # Name, heads, tokens, bytes read and written an element, operations an element.
    launches = (
        (AMAX_KERNEL, heads, problem.query_len, float(size), 1, size),
        (ROWS_KERNEL, heads, problem.padded_rows, 2.0 * size + 2, 4, 2 * size),
        (OPERAND_KERNEL, heads, problem.padded_rows, operand, 2, 1),
        (OPERAND_KERNEL, kv_heads, problem.padded_keys, operand, 2, 1),
        (TURN_KERNEL, kv_heads, problem.padded_keys, 2.0, 1, 1),
    )
    return [
        LaunchEstimate(
            kernel=kernel,
            num_programs=count * -(-tokens // block),
            bytes_moved=int(count * tokens * problem.head_dim * moved),
            flops=count * tokens * problem.head_dim * operations,
            bytes_in_flight=block * problem.head_dim * read,
            serial_loads=2 if kernel == ROWS_KERNEL else 1,
        )
        for kernel, count, tokens, moved, operations, read in launches
    ]


def _gradient(config: Fp4AttentionBwdTritonConfig, part: str, device: DeviceSpec) -> LaunchEstimate:
    """One pass: what a step loads comes from L2 where the heads in flight fit into it."""
    problem = config.problem
    block_m, block_n = config.number(f"{part}_block_m"), config.number(f"{part}_block_n")
    row_tiles, key_tiles = -(-problem.query_len // block_m), -(-problem.kv_len // block_n)
    heads = problem.batch * problem.num_qo_heads
    token_bytes = (_CODE_BYTES if config.is_native else _VALUE_BYTES) + _FP8_TILES[part]
    looped = problem.kv_len if part == DQ else problem.query_len
    outer_tiles = row_tiles if part == DQ else key_tiles
    head_bytes = int(looped * problem.head_dim * token_bytes)
    heads_in_flight = max(1, device.num_sms // outer_tiles)
    reads = 1 if heads_in_flight * head_bytes <= device.l2_bytes else outer_tiles
    written = problem.num_qo_heads * problem.query_len
    if part != DQ:
        written = problem.num_kv_heads * problem.kv_len * (2 if part == DKDV else 1)
    out_bytes = problem.batch * written * problem.head_dim * OUT_DTYPE_BYTES[problem.dtype]
    share = problem.num_pairs / (problem.query_len * problem.kv_len)
    padded = row_tiles * block_m * key_tiles * block_n
    flops = 2 * _PRODUCTS[part] * heads * problem.head_dim * padded * share
    step = config.number(f"{part}_block_{_AXIS[part]}")
    stages = max(1, config.number(f"{part}_num_stages") - 1)
    return LaunchEstimate(
        kernel=GRADIENT_KERNELS[part],
        num_programs=config.num_programs(part),
        bytes_moved=out_bytes + heads * head_bytes * reads,
        flops=int(flops),
        bytes_in_flight=int(stages * step * problem.head_dim * token_bytes),
        serial_loads=2,
        longest_share=2.0 if problem.is_causal and outer_tiles > 1 else 1.0,
    )
