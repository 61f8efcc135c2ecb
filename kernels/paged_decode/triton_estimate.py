"""How the launches of a paged-decode config load a device: input of the cost model."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import LaunchEstimate
from ..device import DeviceSpec
from .lengths import request_lengths
from .problem import PagedDecodeProblem
from .triton_specs import PagedDecodeTritonConfig

__all__ = ["estimates"]


@dataclass(frozen=True)
class _Pieces:
    """How one variant of the lengths is cut."""

    num_pieces: int
    """Pieces of all pairs."""
    num_partial: int
    """Those that are merged."""
    num_tiles: int
    """Tiles of all pairs."""
    longest: int
    """Tiles of the longest program."""


def estimates(
    problem: PagedDecodeProblem, config: PagedDecodeTritonConfig, device: DeviceSpec
) -> tuple[LaunchEstimate, ...]:
    """The attention launch and, where there is one, the merge launch.

    Of a problem of mixed lengths: for the variant that the seed 0 gives.
    """
    pieces = _pieces(problem, config, device)
    # Row tiles of one KV head read the same tokens: the cache serves the later ones.
    partial_bytes = 4 * pieces.num_partial * config.block_m * (problem.head_dim + 1)
    rows = max(config.block_m, 8 if config.swap_ab else 16)
    if config.split_rule == "stream":
        pairs = config.num_pairs(problem)
        num_programs = pairs * config.num_streams(device.num_sms, pairs)
    else:
        num_programs = pieces.num_pieces
    tile_bytes = 2 * config.block_n * problem.kv_row_bytes
    attention = LaunchEstimate(
        kernel="paged_decode_kernel",
        num_programs=num_programs,
        bytes_moved=problem.bytes_moved + partial_bytes,
        flops=4 * pieces.num_tiles * config.block_n * rows * problem.head_dim,
        bytes_in_flight=tile_bytes * max(1, config.num_stages - 1),
        serial_loads=_serial_loads(config, pieces),
        longest_share=max(1.0, pieces.longest * num_programs / pieces.num_tiles),
    )
    if not config.has_merge_kernel or pieces.num_partial == 0:
        return (attention,)
    num_rows = problem.batch * problem.query_len * problem.num_qo_heads
    per_row = -(-pieces.num_partial * config.block_m // num_rows)
    merge = LaunchEstimate(
        kernel="merge_kernel",
        num_programs=num_rows,
        bytes_moved=partial_bytes,
        flops=2 * partial_bytes,
        bytes_in_flight=4 * config.merge_block * problem.head_dim,
        serial_loads=2 + per_row // config.merge_block,
    )
    return attention, merge


def _pieces(
    problem: PagedDecodeProblem, config: PagedDecodeTritonConfig, device: DeviceSpec
) -> _Pieces:
    spans = request_lengths(problem.lengths, problem.batch, problem.kv_len, seed=0)
    if problem.window_left >= 0:
        spans = [min(span, problem.window_left + problem.query_len) for span in spans]
    pairs = config.num_pairs(problem)
    tiles = [-(-span // config.block_n) for span in spans]
    num_tiles = pairs * sum(tiles)
    if config.split_rule == "stream":
        share = -(-sum(tiles) // config.num_streams(device.num_sms, pairs))
        # Every stream but the first begins inside a request.
        borders = pairs * (sum(tiles) // share)
        return _Pieces(pairs * len(spans) + borders, 2 * borders, num_tiles, share)
    run_tiles = [_run_tiles(config, span) for span in spans]
    counts = [-(-n // run) for n, run in zip(tiles, run_tiles, strict=True)]
    longest = max(min(n, run) for n, run in zip(tiles, run_tiles, strict=True))
    num_partial = pairs * sum(count for count in counts if count > 1)
    return _Pieces(pairs * sum(counts), num_partial, num_tiles, longest)


def _run_tiles(config: PagedDecodeTritonConfig, span: int) -> int:
    """Tiles of one piece of a request."""
    if config.split_rule == "size":
        return config.split_tokens // config.block_n
    return -(-span // (config.num_splits * config.block_n))


def _serial_loads(config: PagedDecodeTritonConfig, pieces: _Pieces) -> int:
    """Dependent round trips: table bounds, first page ids, first tile, and what the loop adds."""
    page_ids = 0 if config.prefetch_pages else pieces.longest // config.num_stages
    last_block = 2 if pieces.num_partial and config.merge == "last_block" else 0
    return 3 + page_ids + last_block
