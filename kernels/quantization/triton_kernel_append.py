"""Device code that quantises new tokens of K and V to NVFP4 and writes them into a paged cache."""

import triton
import triton.language as tl

from .triton_kernel import _FINITE_BITS, encode_packed, nvfp4_scales


@triton.jit
def _quantized(
    values,
    tensor_scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CONVENTION: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """(packed codes, scale bytes) of ``[ROWS, COLUMNS]`` fp32, those of ``reference.quantize``."""
    blocks = tl.reshape(values, (ROWS, COLUMNS // 16, 16))
    # As integers, magnitudes order the same way, and NaN is the largest: it is not lost.
    amax_bits = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    is_finite = amax_bits < _FINITE_BITS
    amax = tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True)
    stored, factors = nvfp4_scales(blocks, amax, is_finite, tensor_scale, CONVENTION)
    # Codes of a block that is not finite are those of NaN.
    factors = tl.where(is_finite, factors, float("nan"))
    scaled = tl.reshape(blocks * factors[:, :, None], (ROWS, COLUMNS))
    return encode_packed(scaled, ROWS, COLUMNS, HARDWARE), stored


@triton.jit
def append_kernel(
    k,
    v,
    slots,
    k_codes,
    v_codes,
    k_scales,
    v_scales,
    k_scale,
    v_scale,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    k_codes_stride_page,
    k_codes_stride_token,
    k_codes_stride_head,
    v_codes_stride_page,
    v_codes_stride_token,
    v_codes_stride_head,
    k_scales_stride_page,
    k_scales_stride_token,
    k_scales_stride_head,
    v_scales_stride_page,
    v_scales_stride_token,
    v_scales_stride_head,
    num_tokens,
    num_heads,
    page_size,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SCALES_ON_DEVICE: tl.constexpr,
    CONVENTION: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Writes rows of k and v ``[tokens, heads, HEAD_DIM]`` to their slots.

    A program owns BLOCK_M rows, each a token with a head; the second axis of the grid is K or V. A
    slot is a page times the page's tokens plus the token in it; negative ones are padding. Codes
    are of values over the tensor scale, a number or on the device.
    """
    is_v = tl.program_id(1) == 1
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // num_heads, row % num_heads
    slot = tl.load(slots + token, token < num_tokens, other=-1).to(tl.int64)
    is_row = slot >= 0
    page, inside = slot // page_size, slot % page_size
    column = tl.arange(0, PADDED_DIM)
    is_read = is_row[:, None] & (column < HEAD_DIM)[None, :]
    if is_v:
        source = v + token.to(tl.int64) * v_stride_t + head * v_stride_h
        codes = v_codes + page * v_codes_stride_page
        codes += inside * v_codes_stride_token + head * v_codes_stride_head
        scales = v_scales + page * v_scales_stride_page
        scales += inside * v_scales_stride_token + head * v_scales_stride_head
    else:
        source = k + token.to(tl.int64) * k_stride_t + head * k_stride_h
        codes = k_codes + page * k_codes_stride_page
        codes += inside * k_codes_stride_token + head * k_codes_stride_head
        scales = k_scales + page * k_scales_stride_page
        scales += inside * k_scales_stride_token + head * k_scales_stride_head
    if SCALES_ON_DEVICE:
        tensor_scale = tl.load(v_scale) if is_v else tl.load(k_scale)
    else:
        tensor_scale = v_scale if is_v else k_scale
    values = tl.load(source[:, None] + column[None, :], is_read, other=0.0).to(tl.float32)
    packed, stored = _quantized(values, tensor_scale, BLOCK_M, PADDED_DIM, CONVENTION, HARDWARE)
    half = tl.arange(0, PADDED_DIM // 2)
    block = tl.arange(0, PADDED_DIM // 16)
    is_code = is_row[:, None] & (half < HEAD_DIM // 2)[None, :]
    tl.store(codes[:, None] + half[None, :], packed, is_code)
    is_scale = is_row[:, None] & (block < HEAD_DIM // 16)[None, :]
    tl.store(scales[:, None] + block[None, :], stored, is_scale)
