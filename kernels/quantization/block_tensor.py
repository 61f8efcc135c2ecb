"""A block-scaled FP4 tensor: packed codes, block scales, tensor scale and their layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import UsageError
from .formats import E2M1_MAX, E4M3_MAX, BlockFormat

__all__ = ["BlockTensor", "amax_tensor_scale", "unit_tensor_scale"]

_LEAST_TENSOR_SCALE = 2.0**-100
"""Keeps the reciprocal of the least scale times this finite; smaller tensors become zeros."""


@dataclass(frozen=True)
class BlockTensor:
    """``codes * scales * tensor_scale``, blocks along the last axis."""

    codes: torch.Tensor
    """uint8 ``[..., rows, elements / 2]``: element 2i in the low nibble."""
    scales: torch.Tensor
    """``[..., rows, blocks]`` where plain, ``[..., swizzled elements]`` where swizzled; e4m3 for
    NVFP4, uint8 (e8m0: 2^(byte - 127), 255 is NaN) for MXFP4."""
    tensor_scale: torch.Tensor
    """fp32 of one element; 1 for MXFP4."""
    block_format: BlockFormat
    scale_layout: str = "plain"

    @property
    def num_blocks(self) -> int:
        """Blocks of one row."""
        return 2 * self.codes.shape[-1] // self.block_format.block_size


def amax_tensor_scale(values: torch.Tensor, *, largest_scale: float = E4M3_MAX) -> torch.Tensor:
    """NVFP4's usual tensor scale, amax / (448 * 6), on the values' device, without a wait.

    A tensor of nothing but zeros gets the least scale.

    Args:
        values: Any shape, floating dtype and strides; no elements: 1.
        largest_scale: amax / 6 of the block with the largest value, in units of the tensor scale.
            448 uses all of e4m3; ``FOUR_OVER_SIX_LARGEST_SCALE`` goes with the conventions that
            may take 1.5 times as much.

    Raises:
        UsageError: no e4m3 is as large, or it is not above 0.
    """
    if not 0.0 < largest_scale <= E4M3_MAX:
        raise UsageError(
            f"largest_scale={largest_scale!r} of amax_tensor_scale must be above 0 and at most "
            f"{E4M3_MAX:g}, the largest e4m3"
        )
    if not values.numel():
        return unit_tensor_scale(values.device)
    # torch has no fp32 abs().amax() without a copy; the two ends are read in one pass.
    low, high = torch.aminmax(values)
    amax = torch.maximum(-low.float(), high.float())
    return (amax / (largest_scale * E2M1_MAX)).clamp_min(_LEAST_TENSOR_SCALE).reshape(1)


def unit_tensor_scale(device: torch.device) -> torch.Tensor:
    """A tensor scale of 1: one level of scales, as SageAttention3 has."""
    return torch.ones(1, device=device)


def check_blocks(num_elements: int, block_format: BlockFormat) -> None:
    """Raises ``UsageError`` where a row is not a whole number of blocks."""
    if num_elements % block_format.block_size:
        raise UsageError(
            f"{num_elements} elements along the contraction axis: {block_format.name} takes a "
            f"multiple of {block_format.block_size}; pad with zeros"
        )
