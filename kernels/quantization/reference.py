"""Quantisers and dequantiser in plain torch: what every kernel must give bit for bit.

Scales of blocks with NaN or infinity are NaN, so that such a block stays visible; its codes are
+6. Scale arithmetic is fp32, correctly rounded: codes are those of ``x * ((1 / tensor_scale) /
scale)``, the form that torchao's NVFP4 has too. Where errors of two scales are compared, they are
in units of the tensor scale, absolute ones in fp32 and squares in fp64, added in a fixed order.
"""

from __future__ import annotations

import torch

from .block_tensor import BlockTensor, check_blocks, unit_tensor_scale
from .codec import decode, encode, pack, unpack
from .formats import E2M1_MAX, E4M3_MAX, FOUR_OVER_SIX, MXFP4, NVFP4, BlockFormat
from .scale_layout import from_swizzled, to_swizzled

__all__ = ["dequantize", "quantize"]

_LEAST_NORMAL_E4M3 = 2.0**-6
_FOUR_TO_SIX = 1.5
"""How much larger the scale is that takes a block's largest value to 4 instead of 6."""
_E8M0_BIAS = 127
_E8M0_NAN = 255
_MANTISSA_BITS = 23


def quantize(
    values: torch.Tensor,
    block_format: BlockFormat = NVFP4,
    *,
    tensor_scale: torch.Tensor | None = None,
    convention: str = "",
    scale_layout: str = "plain",
) -> BlockTensor:
    """The block-scaled form of values, blocks along the last axis; codes and scales contiguous.

    Args:
        values: ``[..., rows, elements]``, any floating dtype and strides, elements a multiple of
            the block.
        block_format: NVFP4 or MXFP4.
        tensor_scale: fp32 of one element, NVFP4 only; None: 1.
        convention: How scales are chosen, one of the format's; empty: its default.
        scale_layout: ``plain`` or ``swizzled``.

    Raises:
        UsageError: a row is not a whole number of blocks.
        UnknownNameError: the format has no such convention.
    """
    convention = convention or block_format.default_convention
    block_format.check_convention(convention)
    check_blocks(values.shape[-1], block_format)
    # Element-wise operations keep strides, and kernels read codes in the order of the shape.
    blocks = _in_blocks(values.float().contiguous(), block_format)
    if block_format is NVFP4:
        tensor_scale = unit_tensor_scale(values.device) if tensor_scale is None else tensor_scale
        scales, factors = _nvfp4_scales(blocks, tensor_scale, convention)
    else:
        assert tensor_scale is None, "MXFP4 has no tensor scale"
        tensor_scale = unit_tensor_scale(values.device)
        scales, factors = _mxfp4_scales(blocks, convention)
    codes = pack(encode(blocks * factors[..., None]).flatten(-2))
    if scale_layout == "swizzled":
        scales = to_swizzled(scales)
    return BlockTensor(codes, scales, tensor_scale, block_format, scale_layout)


def dequantize(quantized: BlockTensor) -> torch.Tensor:
    """fp32 values ``[..., rows, elements]``."""
    scales = quantized.scales
    if quantized.scale_layout == "swizzled":
        scales = from_swizzled(scales, quantized.codes.shape[-2], quantized.num_blocks)
    is_power = quantized.block_format is MXFP4
    factors = e8m0_to_float32(scales) if is_power else scales.float()
    values = decode(unpack(quantized.codes))
    blocks = _in_blocks(values, quantized.block_format)
    return (blocks * factors[..., None]).flatten(-2) * quantized.tensor_scale


def _in_blocks(values: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    *rows, elements = values.shape
    num_blocks = elements // block_format.block_size
    return values.reshape(*rows, num_blocks, block_format.block_size)


def e8m0_to_float32(scale_bytes: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127); 255 is NaN. Byte 0 is a subnormal fp32."""
    exponents = scale_bytes.to(torch.int32) - _E8M0_BIAS
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return powers.masked_fill(scale_bytes == _E8M0_NAN, torch.nan)


def _nvfp4_scales(
    blocks: torch.Tensor, tensor_scale: torch.Tensor, convention: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 scales, fp32 factors that take values to codes)."""
    amax = blocks.abs().amax(-1)
    wanted = amax / E2M1_MAX / tensor_scale
    if convention == "normal":
        wanted = wanted.clamp_min(_LEAST_NORMAL_E4M3)
    # Infinity must stay visible: saturated, it would not.
    wanted = torch.where(torch.isfinite(amax), wanted, torch.nan)
    if convention in FOUR_OVER_SIX:
        six, four = (
            _coding_errors(blocks.abs(), candidate, tensor_scale, convention)
            for candidate in (wanted, _FOUR_TO_SIX * wanted)
        )
        wanted = torch.where(four < six, _FOUR_TO_SIX * wanted, wanted)
    return _e4m3_scales(wanted, tensor_scale)


def _e4m3_scales(
    wanted: torch.Tensor, tensor_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 scales, fp32 factors that take values to codes)."""
    # torch's cast gives NaN above 448, the hardware's saturates.
    scales = wanted.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    exact = scales.float()
    factors = (1.0 / tensor_scale) / exact
    return scales, torch.where(exact == 0.0, torch.zeros_like(factors), factors)


def _coding_errors(
    magnitudes: torch.Tensor, wanted: torch.Tensor, tensor_scale: torch.Tensor, convention: str
) -> torch.Tensor:
    """What each block would err by with these scales, over the tensor scale."""
    scales, factors = _e4m3_scales(wanted, tensor_scale)
    # A code times a scale has at most 6 significant bits, and a square is exact in fp64: a kernel
    # may fuse products with sums and has the same bits.
    coded = decode(encode(magnitudes * factors[..., None])) * scales.float()[..., None]
    differences = coded - magnitudes / tensor_scale
    is_squared = convention == "four_over_six_mse"
    errors = differences.double().square() if is_squared else differences.abs()
    while errors.shape[-1] > 1:
        errors = errors[..., 0::2] + errors[..., 1::2]
    return errors[..., 0]


def _mxfp4_scales(blocks: torch.Tensor, convention: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(e8m0 bytes, fp32 factors that take values to codes), from the bits of amax."""
    amax = blocks.abs().amax(-1)
    bits = amax.view(torch.int32)
    if convention == "even":
        bits = bits + (1 << (_MANTISSA_BITS - 2))
    exponents = (bits >> _MANTISSA_BITS) - _E8M0_BIAS - 2
    mantissa = bits & ((1 << _MANTISSA_BITS) - 1)
    if convention == "rceil":
        exponents = exponents + (mantissa > (1 << (_MANTISSA_BITS - 1))).to(torch.int32)
    elif convention == "ceil":
        exponents = exponents + (mantissa > 0).to(torch.int32)
    exponents = exponents.clamp_min(-_E8M0_BIAS)
    is_finite = torch.isfinite(amax)
    scale_bytes = torch.where(is_finite, exponents + _E8M0_BIAS, _E8M0_NAN).to(torch.uint8)
    factors = torch.ldexp(torch.ones_like(amax), -exponents)
    return scale_bytes, factors.masked_fill(~is_finite, torch.nan)
