"""Scales between the plain layout and Blackwell's tiles of 128 rows by 4 blocks.

Element (r, c) of a matrix of C blocks lies at byte
``((r // 128) * ceil(C / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4``
(the layout of scale factors in cuBLAS' and CUTLASS' documentation).
"""

from __future__ import annotations

import torch

from ...errors import UsageError

__all__ = ["ROWS_PER_TILE", "from_swizzled", "swizzled_elements", "to_swizzled"]

ROWS_PER_TILE = 128
_BLOCKS_PER_TILE = 4
_ROWS_INSIDE = 32


def swizzled_elements(num_rows: int, num_blocks: int) -> int:
    """Scales of one matrix in the swizzled layout, padding included."""
    row_tiles, block_tiles = _num_tiles(num_rows, num_blocks)
    return row_tiles * block_tiles * ROWS_PER_TILE * _BLOCKS_PER_TILE


def to_swizzled(scales: torch.Tensor) -> torch.Tensor:
    """``[..., rows, blocks]`` to ``[..., elements]``; the padding is 0."""
    *batch, num_rows, num_blocks = scales.shape
    row_tiles, block_tiles = _num_tiles(num_rows, num_blocks)
    padded = torch.zeros(
        (*batch, row_tiles * ROWS_PER_TILE, block_tiles * _BLOCKS_PER_TILE),
        dtype=torch.uint8,
        device=scales.device,
    )
    padded[..., :num_rows, :num_blocks] = scales.view(torch.uint8)
    tiles = padded.view(
        *batch, row_tiles, ROWS_PER_TILE // _ROWS_INSIDE, _ROWS_INSIDE, block_tiles, 4
    )
    return tiles.transpose(-4, -2).flatten(len(batch)).view(scales.dtype)


def from_swizzled(swizzled: torch.Tensor, num_rows: int, num_blocks: int) -> torch.Tensor:
    """The inverse of ``to_swizzled``: ``[..., rows, blocks]``, contiguous.

    Raises:
        UsageError: the last axis has not as many elements as such a matrix takes.
    """
    needed = swizzled_elements(num_rows, num_blocks)
    if swizzled.shape[-1] != needed:
        raise UsageError(
            f"{swizzled.shape[-1]} swizzled scales: {num_rows} rows of {num_blocks} blocks take "
            f"{needed}"
        )
    batch = swizzled.shape[:-1]
    row_tiles, block_tiles = _num_tiles(num_rows, num_blocks)
    tiles = swizzled.view(torch.uint8).view(
        *batch, row_tiles, block_tiles, _ROWS_INSIDE, ROWS_PER_TILE // _ROWS_INSIDE, 4
    )
    padded = tiles.transpose(-4, -2).reshape(
        *batch, row_tiles * ROWS_PER_TILE, block_tiles * _BLOCKS_PER_TILE
    )
    return padded[..., :num_rows, :num_blocks].contiguous().view(swizzled.dtype)


def _num_tiles(num_rows: int, num_blocks: int) -> tuple[int, int]:
    return -(-num_rows // ROWS_PER_TILE), -(-num_blocks // _BLOCKS_PER_TILE)
