"""Names and sizes of the block-scaled FP4 formats, and the conventions by which scales are chosen.

Imports neither torch nor a compiler: problems and search spaces read it.

A value is ``code * scale * tensor_scale``. A code is e2m1: sign, two bits of exponent, one of
mantissa; magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Rounding is to nearest, ties to the even code, as
``cvt.rn.satfinite.e2m1x2.f32`` does; above 6 it saturates, NaN becomes +6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import UnknownNameError

__all__ = [
    "E2M1_MAGNITUDES",
    "E2M1_MAX",
    "E4M3_MAX",
    "FORMATS",
    "FOUR_OVER_SIX",
    "FOUR_OVER_SIX_LARGEST_SCALE",
    "MXFP4",
    "NVFP4",
    "SCALE_LAYOUTS",
    "BlockFormat",
    "format_named",
]

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of the lower three bits of a code; bit 3 is the sign."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0

FOUR_OVER_SIX = ("four_over_six_mae", "four_over_six_mse")
"""NVFP4's conventions that map a block's largest value to 6 or to 4, whichever errs less."""
FOUR_OVER_SIX_LARGEST_SCALE = 256.0
"""What a tensor scale for them leaves to the largest value's block: 1.5 times this, 384, is an e4m3
too, so that this block has the choice as well; from 448 it has none."""

SCALE_LAYOUTS = ("plain", "swizzled")
"""``plain``: ``[rows, blocks]``; ``swizzled``: tiles of 128 rows by 4 blocks, 512 bytes each, as
cuBLAS, CUTLASS and ``tcgen05.cp`` take them."""


@dataclass(frozen=True)
class BlockFormat:
    """A block-scaled format: what of it is stored and how a block's scale may be chosen."""

    name: str
    block_size: int
    """Elements along the contraction axis that share a scale."""
    scale_dtype: str
    """Torch's name of what a scale byte is."""
    conventions: Mapping[str, str]
    """Name of each scale convention and what it does; the first is the default."""

    @property
    def default_convention(self) -> str:
        """The convention where none is named."""
        return next(iter(self.conventions))

    def check_convention(self, name: str) -> None:
        """Raises ``UnknownNameError`` unless the format has the convention."""
        if name not in self.conventions:
            raise UnknownNameError(f"scale convention of {self.name}", name, self.conventions)

    @property
    def bits_per_element(self) -> float:
        """Stored bits of an element, its share of the scale included."""
        return 4.0 + 8.0 / self.block_size


NVFP4 = BlockFormat(
    "nvfp4",
    16,
    "float8_e4m3fn",
    {
        "nearest": "e4m3(amax / 6), subnormal scales used; a block whose scale is 0 has codes 0",
        "normal": "the same, but no scale below 2^-6, the smallest normal one (torchao)",
        "four_over_six_mae": "e4m3(amax / 6), or e4m3(1.5 * amax / 6) where the block's sum of "
        "absolute errors is lower with it (4/6, arXiv 2512.02010; Transformer Engine's default)",
        "four_over_six_mse": "the same by the sum of squared errors (4/6 as its paper has it)",
    },
)
MXFP4 = BlockFormat(
    "mxfp4",
    32,
    "float8_e8m0fnu",
    {
        "rceil": "least power of two that clips nothing, 2^ceil(log2(amax / 6)) (cuBLAS)",
        "floor": "2^(floor(log2 amax) - 2): values above 6 scales clip (OCP, torchao's default)",
        "ceil": "2^(ceil(log2 amax) - 2) (torchao)",
        "even": "as floor, with amax rounded to one bit of mantissa before (torchao)",
    },
)
FORMATS = {found.name: found for found in (NVFP4, MXFP4)}


def format_named(name: str) -> BlockFormat:
    """The format of that name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in FORMATS:
        raise UnknownNameError("FP4 format", name, FORMATS)
    return FORMATS[name]
