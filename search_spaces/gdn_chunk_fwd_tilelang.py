"""The search space of the chunked gated-delta-net forward's TileLang template.

What prepares the chunks are the Triton template's kernels, with its parameters and constraints; the
scan has its own.
"""

from __future__ import annotations

from dataclasses import replace

from ..kernels.base import Config, ParameterValue
from ..kernels.device import DeviceSpec
from ..kernels.gdn_chunk_fwd import GdnChunkProblem
from ..kernels.gdn_chunk_fwd.problem import DTYPE_BYTES
from ..kernels.gdn_chunk_fwd.tilelang_config import (
    DECAY_PADDING,
    OUTPUT_THREADS,
    PRODUCER_THREADS,
    PRODUCERS,
    group_registers,
)
from .constraints import Constraint, fits_shared_memory
from .parameters import ActiveWhen, Parameter, categorical, ordered
from .space import SearchSpace

__all__ = ["tilelang_space"]

_TEMPLATE = "tilelang"
_SCAN, _OUTPUT = "scan", "output"
_CHUNKS = (32, 64)
_ALGORITHM: dict[str, ParameterValue] = {"algorithm": "fused"}
"""What the Triton template chooses and this one has but one of."""
_LIGHT_SCAN: dict[str, ParameterValue] = {
    "scan_block_v": 16,
    "scan_num_warps": 8,
    "scan_num_stages": 1,
    "scan_maxnreg": 255,
    "scan_order": "given",
}
"""A scan of Triton's that no constraint refuses before it refuses the preparation."""
_WARP, _WARP_ROWS, _WARP_GROUP = 32, 16, 128
_OUTPUT_ROWS = 64
"""Tokens of a chunk that a warp group's products have as rows."""
_HOPPER_HEAD_DIM_K = 128
"""The state of longer keys leaves no registers for chunks of 64."""
_MAX_REGISTERS = 255
_CROWDED = 0.9
"""Share of the multiprocessors that chains must keep busy before a block may take all columns."""
_ALIGNMENT = 1024
"""Bytes that a tile in shared memory starts at a multiple of."""


def tilelang_space(
    problem: GdnChunkProblem, device: DeviceSpec, triton: SearchSpace
) -> SearchSpace:
    """The space of the TileLang template, beside the Triton template's of the same problem."""
    parameters = (*_preparation(triton), *_scan(device))
    return SearchSpace(
        template=_TEMPLATE,
        parameters=parameters,
        constraints=(
            Constraint("preparation", lambda c: triton.check(_as_triton(triton, c))),
            Constraint("columns of a block", lambda c: _has_whole_blocks(problem, c)),
            Constraint("roles", _has_roles),
            Constraint("state within registers", lambda c: _fits_registers(problem, device, c)),
            Constraint("ring in shared memory", lambda c: _ring_fits(problem, device, c)),
        ),
        default=_default(problem, device, triton),
        seeds=_seeds(problem, device, triton),
    )


def _preparation(triton: SearchSpace) -> tuple[Parameter, ...]:
    """Parameters of the Triton template that are not of its scan."""
    kept = (
        p for p in triton.parameters if p.part not in (_SCAN, _OUTPUT) and p.name not in _ALGORITHM
    )
    return tuple(replace(p, values=_CHUNKS) if p.name == "chunk" else p for p in kept)


def _scan(device: DeviceSpec) -> tuple[Parameter, ...]:
    # Only Hopper has wgmma; what later architectures have in its place, the scan does not use.
    is_hopper = device.compute_capability == (9, 0)
    matmuls = ("mma", "wgmma") if is_hopper else ("mma",)
    roles = ("joint", "split") if is_hopper else ("joint",)
    split = ActiveWhen("scan_roles", ("split",))
    return (
        ordered("scan_block_v", 32, 64, 128, part=_SCAN),
        ordered("scan_num_stages", 2, 3, 4, 5, part=_SCAN),
        categorical("scan_producer", *PRODUCERS, part=_SCAN),
        categorical("scan_matmul", *matmuls, part=_SCAN),
        categorical("scan_roles", *roles, part=_SCAN),
        ordered("scan_num_turns", 1, 2, active_when=split, part=_SCAN),
    )


def _as_triton(triton: SearchSpace, config: Config) -> Config:
    """The Triton template's config with the same preparation."""
    own = {name: value for name, value in config.values if not name.startswith("scan_")}
    values = {**own, **_ALGORITHM, **_LIGHT_SCAN}
    if config["segment"]:
        del values["scan_order"]
    return Config.of(triton.template, values)


def _has_whole_blocks(problem: GdnChunkProblem, config: Config) -> str | None:
    block_v = int(config["scan_block_v"])
    if problem.head_dim_v % block_v:
        return f"head_dim_v={problem.head_dim_v} is no multiple of scan_block_v={block_v}"
    if config["scan_matmul"] == "wgmma" and block_v * _WARP // _WARP_ROWS < _WARP_GROUP:
        return f"scan_block_v={block_v} has less warps than the four of a warp group"
    return None


def _has_roles(config: Config) -> str | None:
    """A group that hands its registers on has others that can use them; roles are warp groups."""
    block_v, producer = int(config["scan_block_v"]), config["scan_producer"]
    if config["scan_roles"] == "joint":
        if config["scores"] == "computed":
            return "scores=computed is the work of the output's role, and scan_roles=joint has none"
        if producer == "own_group" and block_v * _WARP // _WARP_ROWS != 2 * _WARP_GROUP:
            return f"scan_block_v={block_v} has not the two computing groups that registers move to"
        return None
    if producer != "own_group" or config["scan_matmul"] != "wgmma":
        return "roles are split between warp groups: with wgmma and scan_producer=own_group"
    if int(config["chunk"]) != _OUTPUT_ROWS:
        return f"chunk={config['chunk']} is not the {_OUTPUT_ROWS} rows of the output's warp group"
    return None


def _threads(config: Config) -> int:
    computing = int(config["scan_block_v"]) // _WARP_ROWS * _WARP
    others = OUTPUT_THREADS[str(config["scan_roles"])]
    return computing + others + PRODUCER_THREADS[str(config["scan_producer"])]


def _fits_registers(problem: GdnChunkProblem, device: DeviceSpec, config: Config) -> str | None:
    """State and its rounded copy; errors, output and values of a chunk, and two rounded copies.

    A thread has two rows of each. What binaries for sm_90 need beside that fits where the sum is a
    bit below the limit, and what they spill is seen when they are compiled.
    """
    # Where roles are split, the output and one rounded copy are another's.
    chunk_registers = 2.0 if config["scan_roles"] == "joint" else 1.5
    needed = int(problem.head_dim_k * 3 // 4 + chunk_registers * int(config["chunk"]))
    warp_groups = -(-_threads(config) // _WARP_GROUP)
    limit = min(_MAX_REGISTERS, device.registers_per_sm // (warp_groups * _WARP_GROUP))
    if config["scan_producer"] == "own_group":
        limit = group_registers(int(config["scan_block_v"]), str(config["scan_roles"]))[0]
    if needed > limit + 1:
        return f"about {needed} registers a thread for the tiles of the scan, above {limit}"
    return None


def _ring_fits(problem: GdnChunkProblem, device: DeviceSpec, config: Config) -> str | None:
    """Tiles of q, k, the left operand, v or u, scores, decay for every stage; the output; gates."""
    size, chunk, block_v = DTYPE_BYTES[problem.dtype], int(config["chunk"]), config["scan_block_v"]
    stages, dim_k = int(config["scan_num_stages"]), problem.head_dim_k
    inner = dim_k if config["form"] == "wy" else chunk
    columns = (dim_k, dim_k, inner, int(block_v))
    rings = sum(_aligned(stages * chunk * n * size) for n in columns)
    rings += _aligned((stages if config["scores"] == "stored" else 1) * chunk * chunk * size)
    decay = 2 * _aligned(2 * chunk * 4) + _aligned(4 * _threads(config))
    decay += _aligned(stages * (chunk + DECAY_PADDING) * 4)
    if config["scan_roles"] == "split":
        turns = int(config["scan_num_turns"])
        rings += sum(_aligned(turns * int(block_v) * n * size) for n in (dim_k, chunk))
        decay += _aligned(2 * chunk * 4)
    return fits_shared_memory(rings + _aligned(chunk * int(block_v) * size) + decay, device)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _default(problem: GdnChunkProblem, device: DeviceSpec, triton: SearchSpace) -> Config:
    """Where it fits, what a warp of copies keeps supplied; else what fits any device.

    That is 99 KiB of shared memory that a block of the smallest device may ask for.
    """
    block_v = 64 if problem.head_dim_v % 64 == 0 else 32
    is_hopper = device.compute_capability == (9, 0)
    prepared = next(seed for seed in triton.seeds if seed["form"] == "inverse")
    if is_hopper and block_v == 64 and problem.head_dim_k <= _HOPPER_HEAD_DIM_K:
        supplied = _with_scan(prepared, device, block_v=block_v, stages=3, producer="own_warp")
        if _ring_fits(problem, device, supplied) is None:
            return supplied
    prepared = prepared.replace(chunk=32)
    return _with_scan(prepared, device, block_v=block_v, stages=2, producer="shared")


def _with_scan(
    triton_config: Config,
    device: DeviceSpec,
    *,
    block_v: int,
    stages: int,
    producer: str,
    turns: int = 0,
) -> Config:
    """A Triton config's preparation with a scan of this template; with turns, in two roles."""
    dropped = (f"{_SCAN}_", f"{_OUTPUT}_")
    kept = {
        name: value
        for name, value in triton_config.values
        if not name.startswith(dropped) and name not in _ALGORITHM
    }
    has_wgmma = device.compute_capability == (9, 0) and block_v >= 64
    scan: dict[str, ParameterValue] = {
        "scan_block_v": block_v,
        "scan_num_stages": stages,
        "scan_producer": producer,
        "scan_matmul": "wgmma" if has_wgmma else "mma",
        "scan_roles": "split" if turns else "joint",
    }
    if turns:
        scan["scan_num_turns"] = turns
    return Config.of(_TEMPLATE, {**kept, **scan})


def _num_chains(problem: GdnChunkProblem, config: Config) -> int:
    """States that are carried side by side."""
    span = int(config["chunk"]) * int(config["segment"])
    pieces = -(-problem.num_tokens // span) if span else problem.num_sequences
    return problem.num_v_heads * pieces


def _seeds(problem: GdnChunkProblem, device: DeviceSpec, triton: SearchSpace) -> tuple[Config, ...]:
    """The Triton template's fused seeds, each with the scans that have a chance."""
    narrow_scan, wide_scan = (64, 2, "own_group", 2), (128, 2, "own_group", 1)
    others = ((64, 3, "own_warp", 0), (128, 2, "own_group", 0))
    found: list[Config] = []
    for seed in triton.seeds:
        if seed.get("algorithm") != "fused" or seed.get("scores") != "stored":
            continue
        # Wide blocks read less, where there are enough of them for all multiprocessors.
        is_crowded = _num_chains(problem, seed) >= _CROWDED * device.num_sms
        first = (wide_scan, narrow_scan) if is_crowded else (narrow_scan, wide_scan)
        for block_v, stages, producer, turns in (*first, *others[: 2 if not found else 1]):
            if problem.head_dim_v % block_v:
                continue
            scan = {"block_v": block_v, "stages": stages, "turns": turns}
            if turns:
                computed = seed.replace(scores="computed")
                found.append(_with_scan(computed, device, producer=producer, **scan))
            found.append(_with_scan(seed, device, producer=producer, **scan))
        if seed["segment"]:
            # Small tiles: two blocks of the scan on a multiprocessor.
            small = seed.replace(chunk=32, form="inverse")
            found.append(_with_scan(small, device, block_v=64, stages=2, producer="shared"))
    narrow = triton.seeds[0].replace(chunk=32)
    found.append(_with_scan(narrow, device, block_v=32, stages=3, producer="own_warp"))
    return tuple(dict.fromkeys(found))
