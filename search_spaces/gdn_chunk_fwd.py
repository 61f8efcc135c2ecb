"""The search space of the chunked gated-delta-net forward.

What belongs to no part chooses the algorithm; the tiles of each kernel are a space of their own.
"""

from __future__ import annotations

from ..kernels.base import Config, ParameterValue
from ..kernels.device import DeviceSpec
from ..kernels.gdn_chunk_fwd import GdnChunkProblem
from ..kernels.gdn_chunk_fwd.problem import DTYPE_BYTES
from .constraints import TILE_REGISTERS, Constraint, fits_shared_memory
from .external import external_spaces
from .gdn_chunk_fwd_tilelang import tilelang_space
from .parameters import ActiveWhen, Parameter, categorical, filled, ordered
from .space import SearchSpace

__all__ = ["SPACES", "triton_space"]

_CUT = (4, 8, 16, 32, 64, 128)
"""Chunks of a segment."""
_TILED = ("scan", "transition")
_BLOCKS: dict[str, ParameterValue] = {
    "intra_tile": "blocks",
    "intra_num_warps": 1,
}
"""One warp a chunk."""
_BLOCKS_OF_FORM: dict[str, dict[str, ParameterValue]] = {
    "wy": {"intra_block_k": 64},
    "inverse": {"intra_block_k": 32, "intra_maxnreg": 168},
}
"""The best of its kind on an H200: 8 such blocks at once make w and u, 12 the inverse alone."""
_WIDE_OUTPUT: dict[str, ParameterValue] = {
    **{"scan_num_stages": 3, "output_block_v": 128, "output_num_warps": 8}
}
_FIRST_ARCH_OF_REGISTERS = 120
"""From here on a product takes both operands from registers."""
_ROOMY_SMEM_BYTES = 160 << 10
"""Of a block: compute capability 9.0 and 10.x have 227 KiB, 12.x 99."""
_REGISTERS = (128, 168, 255)
"""Of a thread: four, three or two blocks of four warps on a multiprocessor; 255 is the limit."""


def triton_space(problem: GdnChunkProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the Triton template."""
    return SearchSpace(
        template="triton",
        parameters=(*_algorithm(problem), *_tiles(problem)),
        constraints=(
            Constraint("segments", lambda c: _is_cut(problem, device, c)),
            Constraint("order of several sequences", lambda c: _is_ordered(problem, c)),
            Constraint("inverse in blocks", _serves_blocks),
            Constraint("tiles within registers", lambda c: _fits_registers(problem, c)),
            Constraint("tiles within shared memory", lambda c: _fits_smem(problem, device, c)),
        ),
        default=_default(problem, device),
        seeds=_seeds(problem),
    )


def _algorithm(problem: GdnChunkProblem) -> tuple[Parameter, ...]:
    """The parameters that kernels share."""
    is_wide = problem.dtype == "float32"
    return (
        categorical("algorithm", "separate", "fused"),
        ordered("chunk", 16, 32, 64, 128),
        categorical("form", "wy", "inverse"),
        categorical("scores", "stored", "computed"),
        ordered("segment", 0, *_CUT),
        *([categorical("precision", "ieee", "tf32x3")] if is_wide else []),
    )


def _tiles(problem: GdnChunkProblem) -> tuple[Parameter, ...]:
    """The parameters of each kernel."""
    precise = ("tf32x3", "ieee")
    precisions = precise if problem.dtype == "float32" else ("tf32", *precise)
    is_wide = problem.dtype == "float32"
    # Rounded to bf16, operands of merges cost up to 4% of the inverse where keys are nearly equal.
    short = {"bfloat16": ("fp16",), "float16": ("as_input",)}
    merging = (*short.get(problem.dtype, ()), *precisions)
    # Far below what the operands' dtype keeps.
    forget = (0, 32) if problem.dtype == "float32" else (0, 16, 24)
    whole = ActiveWhen("segment", (0,))
    cut, separate = ActiveWhen("segment", _CUT), ActiveWhen("algorithm", ("separate",))
    one_tile = None if is_wide else ActiveWhen("intra_tile", ("chunk",))
    norm = [
        ordered("norm_block_r", 4, 8, 16, 32, 64, part="norm"),
        ordered("norm_num_warps", 1, 2, 4, 8, part="norm"),
    ]
    return (
        ordered("gate_block_h", 1, 2, 4, 8, 16, part="gate"),
        ordered("gate_num_warps", 1, 2, 4, part="gate"),
        *(norm if problem.use_qk_l2norm else []),
        *([] if is_wide else [categorical("intra_tile", "chunk", "blocks", part="intra")]),
        ordered("intra_block_k", 16, 32, 64, 128, part="intra"),
        ordered("intra_num_warps", 1, 2, 4, 8, part="intra"),
        ordered("intra_num_stages", 1, 2, 3, part="intra"),
        categorical(*("inverse", "substitution", "doubling"), active_when=one_tile, part="intra"),
        categorical("inverse_gate", "gated", "free", active_when=one_tile, part="intra"),
        categorical("inverse_precision", *merging, part="intra"),
        ordered("intra_maxnreg", *_REGISTERS, part="intra"),
        *_chain("transition", cut),
        ordered("transition_forget_bits", *forget, active_when=cut, part="transition"),
        ordered("stitch_block_v", 16, 32, 64, 128, active_when=cut, part="stitch"),
        ordered("stitch_num_warps", 4, 8, active_when=cut, part="stitch"),
        ordered("stitch_num_stages", 1, 2, 3, active_when=cut, part="stitch"),
        categorical("stitch_precision", *precisions, active_when=cut, part="stitch"),
        *_chain("scan", None),
        categorical("scan_order", "given", "longest", active_when=whole, part="scan"),
        ordered("output_block_k", 32, 64, 128, active_when=separate, part="output"),
        ordered("output_block_v", 32, 64, 128, active_when=separate, part="output"),
        ordered("output_num_warps", 2, 4, 8, active_when=separate, part="output"),
        ordered("output_num_stages", 1, 2, 3, 4, active_when=separate, part="output"),
    )


def _chain(part: str, condition: ActiveWhen | None) -> tuple[Parameter, ...]:
    return (
        ordered(f"{part}_block_v", 16, 32, 64, 128, active_when=condition, part=part),
        ordered(f"{part}_num_warps", 2, 4, 8, active_when=condition, part=part),
        ordered(f"{part}_num_stages", 1, 2, 3, 4, active_when=condition, part=part),
        ordered(f"{part}_maxnreg", *_REGISTERS, active_when=condition, part=part),
    )


def _config(problem: GdnChunkProblem, **values: ParameterValue) -> Config:
    """A config with these values and usual ones elsewhere; what is not active is dropped."""
    is_wide = problem.dtype == "float32"
    usual: dict[str, ParameterValue] = {
        "algorithm": "separate",
        "chunk": 32 if is_wide else 64,
        "form": "wy",
        "scores": "computed",
        "segment": 0,
        "precision": "tf32x3",
        "gate_block_h": 4,
        "gate_num_warps": 1,
        "norm_block_r": 16,
        "norm_num_warps": 4,
        "intra_tile": "chunk",
        "intra_block_k": 64,
        "intra_num_warps": 4,
        "intra_num_stages": 2,
        "intra_maxnreg": 255,
        "inverse": "substitution",
        "inverse_gate": "free",
        "inverse_precision": "tf32x3" if is_wide else "tf32",
        "transition_block_v": 32,
        "transition_num_warps": 4,
        "transition_num_stages": 2,
        "transition_maxnreg": 255,
        "transition_forget_bits": 0,
        "stitch_block_v": 32,
        "stitch_num_warps": 8,
        "stitch_num_stages": 1,
        "stitch_precision": "tf32x3",
        "scan_block_v": 32,
        "scan_num_warps": 4,
        "scan_num_stages": 2,
        "scan_maxnreg": 255,
        "scan_order": "given",
        "output_block_k": 64,
        "output_block_v": 64,
        "output_num_warps": 4,
        "output_num_stages": 2,
    }
    chosen = {**usual, **values}
    parameters = (*_algorithm(problem), *_tiles(problem))
    return Config.of("triton", filled(parameters, lambda parameter: chosen[parameter.name]))


def _row_bytes(problem: GdnChunkProblem) -> int:
    return problem.head_dim_k * DTYPE_BYTES[problem.dtype]


def _default(problem: GdnChunkProblem, device: DeviceSpec) -> Config:
    """The best of its kind on an H200 where it fits, else what fits any device.

    That is 99 KiB of shared memory that a block of the smallest device may ask for.
    """
    if _row_bytes(problem) > 256:
        return _config(problem, scan_num_stages=1, chunk=16)
    if problem.dtype == "float32":
        return _config(problem)
    is_roomy = device.smem_per_block_bytes >= _ROOMY_SMEM_BYTES
    return _config(problem, **_in_blocks(problem, "wy"), **(_WIDE_OUTPUT if is_roomy else {}))


def _in_blocks(problem: GdnChunkProblem, form: str) -> dict[str, ParameterValue]:
    """The inverse by one warp a chunk, for 16-bit operands; other operands know no blocks."""
    if problem.dtype == "float32":
        return {"form": form}
    precision = "fp16" if problem.dtype == "bfloat16" else "as_input"
    return {**_BLOCKS, **_BLOCKS_OF_FORM[form], "inverse_precision": precision, "form": form}


def _seeds(problem: GdnChunkProblem) -> tuple[Config, ...]:
    """One of each kind: FLA's split, FlashQLA's fused scan, both cut into segments."""
    large: dict[str, ParameterValue] = {"scan_block_v": 64, "scan_num_warps": 8}
    if _row_bytes(problem) > 256:
        large = {"chunk": 16, "scan_block_v": 32, "scan_num_warps": 8, "scan_num_stages": 1}
    wy, inverse = _in_blocks(problem, "wy"), _in_blocks(problem, "inverse")
    cut: dict[str, ParameterValue] = {"segment": 32, "transition_forget_bits": 16}
    if problem.dtype == "float32":
        cut["transition_forget_bits"] = 32
    fused: dict[str, ParameterValue] = {**large, "algorithm": "fused"}
    stored: dict[str, ParameterValue] = {**fused, "scores": "stored"}
    return (
        _config(problem, **stored, **inverse),
        _config(problem, **stored, **wy),
        _config(problem, **stored, **cut, **inverse),
        _config(problem, **stored, **cut, **wy),
        _config(problem, **stored, **{**cut, "segment": 64}, **inverse),
        _config(problem, **wy, **_WIDE_OUTPUT),
        _config(problem, **wy, **_WIDE_OUTPUT, **cut),
        _config(problem, **{**stored, **wy, "scan_block_v": 32, "scan_num_warps": 4}),
        _config(problem, **fused, **inverse),
        _config(problem, **stored),
        _config(problem, **{**stored, "scan_num_warps": 4, "scan_num_stages": 1}),
    )


def _is_cut(problem: GdnChunkProblem, device: DeviceSpec, config: Config) -> str | None:
    """Segments that nothing is cut into would be another name for an algorithm without them."""
    if config["segment"] and (reason := _exceeds_transition(problem, device)):
        return reason
    span = int(config["chunk"]) * int(config["segment"])
    if span and span >= problem.max_seqlen:
        return f"segments of {span} tokens, the longest sequence has {problem.max_seqlen}"
    return None


def _exceeds_transition(problem: GdnChunkProblem, device: DeviceSpec) -> str | None:
    """A segment's transition, K by K in fp32, is one operand of the kernel that stitches."""
    side = 1 << (problem.head_dim_k - 1).bit_length()
    num_bytes = 4 * side * side
    if num_bytes <= device.smem_per_block_bytes:
        return None
    return (
        f"the transition of a segment, {side} x {side} in fp32, takes {num_bytes} bytes of "
        f"shared memory, a block has {device.smem_per_block_bytes}"
    )


def _is_ordered(problem: GdnChunkProblem, config: Config) -> str | None:
    if config.get("scan_order") == "longest" and problem.num_sequences == 1:
        return "there is one sequence"
    return None


def _serves_blocks(config: Config) -> str | None:
    """Blocks of 16 rows: the lower half of a chunk lies in the registers of one warp."""
    if config.get("intra_tile") != "blocks":
        return None
    if int(config["chunk"]) > 64:
        return f"blocks of 16 rows serve chunks of up to 64 tokens, this one has {config['chunk']}"
    if int(config["intra_num_warps"]) > 1:
        return f"intra_num_warps={config['intra_num_warps']}: more than one warp repeats blocks"
    return None


def _fits_registers(problem: GdnChunkProblem, config: Config) -> str | None:
    """Accumulators live in registers: the state and a chunk's errors, or a chunk's products."""
    chunk = int(config["chunk"])
    block_k = 1 << (problem.head_dim_k - 1).bit_length()
    for part in _TILED:
        block_v = config.get(f"{part}_block_v")
        if block_v is None:
            continue
        is_output = part == "scan" and config["algorithm"] == "fused"
        elements = (block_k + chunk * (1 + is_output)) * int(block_v)
        reason = _too_many(config, part, elements)
        if reason is not None:
            return reason
    elements = 2 * chunk * chunk
    if config.get("intra_tile") == "blocks":
        elements = chunk * (chunk + 16) // 2
    reason = _too_many(config, "intra", elements)
    if reason is not None or config["algorithm"] == "fused":
        return reason
    elements = chunk * (int(config["output_block_v"]) + chunk)
    return _too_many(config, "output", elements)


def _too_many(config: Config, part: str, elements: int) -> str | None:
    needed = elements // (32 * int(config[f"{part}_num_warps"]))
    bound = int(config.get(f"{part}_maxnreg") or _REGISTERS[-1])
    limit = bound - (_REGISTERS[-1] - TILE_REGISTERS)
    if needed > limit:
        return f"{needed} registers a thread for the tiles of {part}, above {limit}"
    return None


def _fits_smem(problem: GdnChunkProblem, device: DeviceSpec, config: Config) -> str | None:
    """Tiles that loads fill ahead of their use.

    Products of warp groups and tensor memory read a tile in place, so that it counts until the step
    is over; on sm_120 there is one buffer less. Where the scan makes the output, its new values
    pass through a tile of their own. Binaries for sm_90 agree; near the limit some for sm_100 and
    sm_120 need a tile more or less, which their compile or launch then says.
    """
    size = DTYPE_BYTES[problem.dtype]
    chunk = int(config["chunk"])
    block_k = 1 << (problem.head_dim_k - 1).bit_length()
    for part in _TILED:
        block_v = config.get(f"{part}_block_v")
        if block_v is None:
            continue
        is_output = part == "scan" and config["algorithm"] == "fused"
        columns = block_k + int(block_v)
        columns += block_k if config["form"] == "wy" else chunk
        columns += block_k + chunk * (config["scores"] == "stored") if is_output else 0
        in_place = device.arch < _FIRST_ARCH_OF_REGISTERS
        buffers = max(1, int(config[f"{part}_num_stages"]) - (not in_place))
        columns = buffers * columns + int(block_v) * (is_output and in_place)
        reason = fits_shared_memory(size * chunk * columns, device)
        if reason is not None:
            return f"{part}: {reason}"
    return _stitch_exceeds(problem, device, config)


def _stitch_exceeds(problem: GdnChunkProblem, device: DeviceSpec, config: Config) -> str | None:
    """Transitions and states, in fp32, that loads of the stitch fill ahead of their use.

    As binaries have them: the stage in use is in registers, but for the states added, and but for
    products of warp groups, which read it in place. ``tf32x3`` splits the states in two.
    """
    block_v = config.get("stitch_block_v")
    if block_v is None:
        return None
    side = 1 << (problem.head_dim_k - 1).bit_length()
    added, stages = 4 * side * int(block_v), int(config["stitch_num_stages"])
    in_place = device.compute_capability == (9, 0) and config["stitch_precision"] == "tf32"
    ahead = stages if in_place else stages - 1
    num_parts = 0 if in_place else 1 + (config["stitch_precision"] == "tf32x3")
    num_bytes = ahead * (4 * side * side + added) + num_parts * added
    reason = fits_shared_memory(num_bytes, device)
    return None if reason is None else f"stitch: {reason}"


def _tilelang_space(problem: GdnChunkProblem, device: DeviceSpec) -> SearchSpace:
    return tilelang_space(problem, device, triton_space(problem, device))


SPACES = {
    "triton": triton_space,
    "tilelang": _tilelang_space,
    **external_spaces("flash_qla", "fla", "flashinfer"),
}
