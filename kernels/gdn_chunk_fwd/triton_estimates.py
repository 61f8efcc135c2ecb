"""How each launch of the Triton template loads the device: the cost model's view of a config."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import LaunchEstimate
from .problem import DTYPE_BYTES
from .triton_config import (
    GATE,
    INTRA,
    NORM,
    OUTPUT,
    SCAN,
    STITCH,
    TRANSITION,
    GdnChunkTritonConfig,
)
from .triton_specs import KERNELS

__all__ = ["launch_estimates"]

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class _Sizes:
    """Counts that several launches share."""

    config: GdnChunkTritonConfig

    @property
    def chunks(self) -> int:
        """Chunks of all sequences, times value heads."""
        per_head = sum(-(-n // self.config.chunk) for n in self.config.problem.lengths)
        return per_head * self.config.problem.num_v_heads

    @property
    def segments(self) -> tuple[int, ...]:
        """Chunks of each segment of all sequences."""
        found: list[int] = []
        for length in self.config.problem.lengths:
            chunks = -(-length // self.config.chunk)
            size = self.config.segment or max(1, chunks)
            found += [size] * (chunks // size) + ([chunks % size] if chunks % size else [])
        return tuple(found) or (0,)

    @property
    def size(self) -> int:
        """Bytes of an element of q."""
        return DTYPE_BYTES[self.config.problem.dtype]

    def tile(self, columns: int) -> int:
        """Bytes of the rows of a chunk with so many columns."""
        return self.config.chunk * columns * self.size

    @property
    def product(self) -> int:
        """Multiply-adds of chunk x chunk, twice: to be multiplied by the third dimension."""
        return 2 * self.config.chunk**2


def launch_estimates(config: GdnChunkTritonConfig) -> tuple[LaunchEstimate, ...]:
    """One estimate a launch, in launch order."""
    sizes = _Sizes(config)
    makers = {
        GATE: _gate,
        NORM: _norm,
        INTRA: _intra,
        TRANSITION: _transition,
        STITCH: _stitch,
        SCAN: _scan,
        OUTPUT: _output,
    }
    found = [makers[part](sizes) for part in config.parts]
    if NORM in config.parts:
        found.insert(config.parts.index(NORM), _norm(sizes))  # q, then k
    return tuple(found)


def _gate(sizes: _Sizes) -> LaunchEstimate:
    problem, config = sizes.config.problem, sizes.config
    values = problem.num_tokens * problem.num_v_heads
    read = DTYPE_BYTES[problem.gate_dtype] + DTYPE_BYTES[problem.beta_dtype]
    block_h = config.number("gate_block_h")
    chunks = config.max_chunks(problem.num_tokens, problem.num_sequences)
    return LaunchEstimate(
        kernel=KERNELS[GATE],
        num_programs=chunks * -(-problem.num_v_heads // block_h),
        bytes_moved=values * (read + 2 * _FLOAT_BYTES),
        flops=8 * values,
        bytes_in_flight=config.chunk * block_h * read,
        serial_loads=3,
    )


def _norm(sizes: _Sizes) -> LaunchEstimate:
    problem = sizes.config.problem
    rows, block = problem.num_tokens * problem.num_heads, sizes.config.number("norm_block_r")
    row = problem.head_dim_k * sizes.size
    return LaunchEstimate(
        kernel=KERNELS[NORM],
        num_programs=-(-rows // block),
        bytes_moved=2 * rows * row,
        flops=4 * rows * problem.head_dim_k,
        bytes_in_flight=block * row,
        serial_loads=1,
    )


def _intra(sizes: _Sizes) -> LaunchEstimate:
    problem, config = sizes.config.problem, sizes.config
    dim_k, dim_v, chunk = problem.head_dim_k, problem.head_dim_v, config.chunk
    is_wy = config.form == "wy"
    # Every level of merging that is above the diagonal blocks is two products of the whole tile.
    start = 16 if config.config.get("inverse") == "substitution" else 2
    levels = max(0, chunk.bit_length() - start.bit_length())
    products = dim_k * (1 + config.has_scores)
    products += dim_k + dim_v if is_wy else 0
    if config.has_intra_blocks:
        # The lower half alone, and at each level of merging inside blocks of 16 a transpose too.
        products = products * (chunk + 16) // (2 * chunk) + 9 * 16 * 16 // chunk + chunk // 3
    else:
        products += 2 * levels * chunk
    stored = sizes.tile(dim_k + dim_v) if is_wy else sizes.tile(chunk)
    stored += sizes.tile(chunk) if config.has_scores else 0
    loaded = sizes.tile(dim_v) if is_wy else 0
    group = problem.num_v_heads // problem.num_heads
    shared = sizes.tile(dim_k) * (1 + config.has_scores) // group
    is_apart = config.has_intra_blocks and config.has_scores
    return LaunchEstimate(
        kernel=KERNELS[INTRA],
        num_programs=sizes.chunks * (group + is_apart) // group,
        bytes_moved=sizes.chunks * (stored + loaded + shared),
        flops=sizes.chunks * sizes.product * products,
        bytes_in_flight=sizes.tile(min(config.number("intra_block_k"), config.block_k)),
        serial_loads=4 + 2 * levels,
    )


def _columns(sizes: _Sizes, part: str) -> tuple[int, int]:
    """(blocks, padded columns) of the state of one head."""
    problem = sizes.config.problem
    block = sizes.config.number(f"{part}_block_v")
    blocks = -(-problem.head_dim_v // block)
    if part == TRANSITION:
        blocks += -(-problem.head_dim_k // block)
    return blocks, blocks * block


def _step(sizes: _Sizes, part: str) -> tuple[int, int, int]:
    """(bytes read in whole by each column block, bytes a column, multiply-adds a column)."""
    config = sizes.config
    dim_k, chunk = config.problem.head_dim_k, config.chunk
    is_wy, is_output = config.form == "wy", part == SCAN and config.algorithm == "fused"
    whole = sizes.tile(dim_k) * (1 + is_wy + is_output) + (0 if is_wy else sizes.tile(chunk))
    column = sizes.tile(1)
    work = 2 * chunk * (2 * dim_k + (0 if is_wy else chunk))
    if is_output:
        whole += sizes.tile(chunk) if config.has_scores else 0
        column += sizes.tile(1)
        work += 2 * chunk * (dim_k + chunk)
    elif part == SCAN:
        column += sizes.tile(1) + dim_k * sizes.size
    return whole, column, work


def _chain(sizes: _Sizes, part: str) -> LaunchEstimate:
    """A scan: every program is a chain of chunks, each of which waits for two or three products."""
    problem, config = sizes.config.problem, sizes.config
    blocks, columns = _columns(sizes, part)
    whole, column, work = _step(sizes, part)
    segments = sizes.segments
    longest = max(segments)
    block = config.number(f"{part}_block_v")
    # Column blocks of a head run together: what all of them read comes once from memory.
    step_bytes = whole + column * columns
    mean = sum(segments) / len(segments)
    return LaunchEstimate(
        kernel=KERNELS[part],
        num_programs=len(segments) * problem.num_v_heads * blocks,
        bytes_moved=sizes.chunks * step_bytes,
        flops=sizes.chunks * (work * columns + _shared_work(sizes, part) * blocks),
        bytes_in_flight=(whole + column * block) * config.number(f"{part}_num_stages"),
        serial_loads=3 + longest * (2 if config.form == "wy" else 3),
        longest_share=longest / mean if mean else 1.0,
    )


def _shared_work(sizes: _Sizes, part: str) -> int:
    """Multiply-adds of a chunk that every column block repeats: q k^T where it is not stored."""
    config = sizes.config
    if part == SCAN and config.algorithm == "fused" and not config.has_scores:
        return sizes.product * config.problem.head_dim_k
    return 0


def _transition(sizes: _Sizes) -> LaunchEstimate:
    return _chain(sizes, TRANSITION)


def _scan(sizes: _Sizes) -> LaunchEstimate:
    return _chain(sizes, SCAN)


def _stitch(sizes: _Sizes) -> LaunchEstimate:
    problem, config = sizes.config.problem, sizes.config
    dim_k, dim_v = problem.head_dim_k, problem.head_dim_v
    block = config.number("stitch_block_v")
    blocks = -(-dim_v // block)
    span = config.chunk * config.segment
    steps = [max(0, -(-n // span) - 1) for n in problem.lengths]
    state, moved = dim_k * dim_v * _FLOAT_BYTES, dim_k * dim_k * _FLOAT_BYTES
    mean = sum(steps) / len(steps)
    return LaunchEstimate(
        kernel=KERNELS[STITCH],
        num_programs=problem.num_sequences * problem.num_v_heads * blocks,
        bytes_moved=sum(steps) * problem.num_v_heads * (2 * state + moved),
        flops=sum(steps) * problem.num_v_heads * 2 * dim_k * dim_k * blocks * block,
        bytes_in_flight=moved * config.number("stitch_num_stages"),
        serial_loads=3 + max(steps),
        longest_share=max(steps) / mean if mean else 1.0,
    )


def _output(sizes: _Sizes) -> LaunchEstimate:
    problem, config = sizes.config.problem, sizes.config
    dim_k, dim_v, chunk = problem.head_dim_k, problem.head_dim_v, config.chunk
    block = config.number("output_block_v")
    blocks = -(-dim_v // block)
    shared = sizes.tile(chunk) if config.has_scores else sizes.tile(dim_k)
    read = sizes.tile(dim_k) + shared + dim_k * dim_v * sizes.size + 2 * sizes.tile(dim_v)
    work = 2 * chunk * (dim_k + chunk) * blocks * block
    work += 0 if config.has_scores else sizes.product * dim_k * blocks
    return LaunchEstimate(
        kernel=KERNELS[OUTPUT],
        num_programs=sizes.chunks * blocks,
        bytes_moved=sizes.chunks * read,
        flops=sizes.chunks * work,
        bytes_in_flight=(sizes.tile(1) + block * sizes.size)
        * min(config.number("output_block_k"), config.block_k),
        serial_loads=3,
    )
