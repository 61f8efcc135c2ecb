"""e2m1 codes in plain torch: encode, decode, pack, unpack. The definition all else is tested by."""

from __future__ import annotations

from itertools import pairwise

import torch

from ...errors import UsageError
from .formats import E2M1_MAGNITUDES

__all__ = ["decode", "encode", "pack", "unpack"]

_SIGN_BIT = 8
_NAN_CODE = 7
_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(E2M1_MAGNITUDES))


def encode(values: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0 to 15) of fp32 values: nearest, ties to the even code, saturating.

    NaN becomes +6 and minus zero keeps its sign, as in PTX.
    """
    magnitude = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for code, midpoint in enumerate(_MIDPOINTS):
        # A tie between code and code + 1 goes up where code + 1 is even.
        is_above = magnitude >= midpoint if code % 2 else magnitude > midpoint
        codes += is_above.to(torch.uint8)
    is_nan = values.isnan()
    codes[is_nan] = _NAN_CODE
    return codes | (torch.signbit(values) & ~is_nan).to(torch.uint8) * _SIGN_BIT


def decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of codes."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=codes.device)[(codes & 7).long()]
    return torch.where((codes & _SIGN_BIT) != 0, -magnitudes, magnitudes)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte along the last axis, element 2i in the low nibble.

    Raises:
        UsageError: the last axis is odd.
    """
    if codes.shape[-1] % 2:
        raise UsageError(
            f"{codes.shape[-1]} codes along the last axis: must be even, two share a byte"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Codes of packed bytes: the last axis doubles."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
