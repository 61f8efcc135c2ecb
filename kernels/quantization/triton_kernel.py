"""Device code of the codecs, and the fused quantiser and dequantiser.

Everything matches ``reference.py`` bit for bit. Sizes are run-time arguments: one compile serves
every shape. ``HARDWARE`` takes ``cvt.rn.satfinite.e2m1x2.f32``, which sm_100a, sm_103a and sm_120a
have; the arithmetic twin runs anywhere and gives the same codes.
"""

import triton
import triton.language as tl

_FINITE_BITS = tl.constexpr(0x7F800000)
_LARGEST_MAGNITUDE = tl.constexpr(6.0)


@triton.jit
def rounding_constant(magnitude, LEAST_EXPONENT: tl.constexpr):
    """Bits of the fp32 number that, added and taken away again, rounds to one bit of mantissa.

    It is 2^(22 + e) for a magnitude in [2^e, 2^(e+1)): the sum has steps of 2^(e-1), and ties go to
    the even step, which is the even code. Below 2^LEAST_EXPONENT steps grow no finer: e2m1's
    subnormals.
    """
    exponent_bits = magnitude.to(tl.int32, bitcast=True) & _FINITE_BITS
    return tl.maximum(exponent_bits, (LEAST_EXPONENT + 127) << 23) + (22 << 23)


@triton.jit
def round_to_e2m1(magnitude):
    """The e2m1 value nearest to a magnitude of at most 6.99, as fp32."""
    constant = rounding_constant(magnitude, 0).to(tl.float32, bitcast=True)
    return (magnitude + constant) - constant


@triton.jit
def magnitude_codes(magnitude):
    """Codes 0 to 7 (int32) of non-negative fp32; saturates, NaN gives 7."""
    magnitude = tl.where(magnitude < _LARGEST_MAGNITUDE, magnitude, _LARGEST_MAGNITUDE)
    constant = rounding_constant(magnitude, 0)
    total = magnitude + constant.to(tl.float32, bitcast=True)
    # Steps above 2^e, and two codes for every exponent below e.
    steps = total.to(tl.int32, bitcast=True) - constant
    return steps + ((constant >> 22) - 2 * 149)


@triton.jit
def e2m1_codes(x):
    """Codes 0 to 15 (int32) of fp32, as ``codec.encode`` gives them."""
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return magnitude_codes(tl.abs(x)) | tl.where(x == x, sign, 0)


@triton.jit
def pack_codes(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``[ROWS, COLUMNS]`` codes to ``[ROWS, COLUMNS / 2]`` bytes, the even element low."""
    low, high = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def convert_packed(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Packed codes of ``[ROWS, COLUMNS]`` fp32 by the hardware's conversion, two at a time."""
    low, high = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b8 b0, b1, b2, b3;
        cvt.rn.satfinite.e2m1x2.f32 b0, $5, $1;
        cvt.rn.satfinite.e2m1x2.f32 b1, $6, $2;
        cvt.rn.satfinite.e2m1x2.f32 b2, $7, $3;
        cvt.rn.satfinite.e2m1x2.f32 b3, $8, $4;
        mov.b32 $0, {b0, b1, b2, b3};
        }
        """,
        "=r,r,r,r,r,r,r,r,r",
        [low, high],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def encode_packed(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr):
    """``[ROWS, COLUMNS]`` fp32 to ``[ROWS, COLUMNS / 2]`` packed codes."""
    if HARDWARE:
        return convert_packed(x, ROWS, COLUMNS)
    return pack_codes(e2m1_codes(x), ROWS, COLUMNS)


@triton.jit
def e8m0_to_float32(scale_bytes):
    """2^(byte - 127); byte 0 is a subnormal, 255 NaN."""
    byte = scale_bytes.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_to_float32(scale_bytes, FORMAT: tl.constexpr):
    """fp32 of stored scales, uint8 in either format."""
    if FORMAT == "nvfp4":
        return scale_bytes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return e8m0_to_float32(scale_bytes)


@triton.jit
def _half_bits(codes):
    """Bits of the fp16 that is 2^-14 times a code's value: exact, 0.5 being a subnormal."""
    wide = codes.to(tl.uint16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def dequantize_tile(
    packed,
    scale_bytes,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``[ROWS, COLUMNS]`` values without the tensor scale: exact in bf16.

    ``packed`` is ``[ROWS, COLUMNS / 2]``, ``scale_bytes`` ``[ROWS, blocks]``. A code times an e4m3
    scale has at most 6 significant bits.
    """
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    values = tl.interleave(_half_bits(packed & 15), _half_bits(packed >> 4)).to(tl.float32)
    # The factor 2^14 goes with the value, not the scale: an e8m0 scale would overflow.
    blocks = tl.reshape(values * 16384.0, (ROWS, COLUMNS // BLOCK, BLOCK))
    scaled = blocks * scale_to_float32(scale_bytes, FORMAT)[:, :, None]
    return tl.reshape(scaled, (ROWS, COLUMNS)).to(DTYPE)


@triton.jit
def _e4m3_scales(wanted, is_finite, one, scale):
    """(stored bytes, their values, factors (one / scale) / value that take values to codes)."""
    stored = tl.where(is_finite, tl.minimum(wanted, 448.0), 0.0).to(tl.float8e4nv)
    exact = stored.to(tl.float32)
    safe = tl.where(exact == 0.0, 1.0, exact)
    factors = tl.where(exact == 0.0, 0.0, tl.div_rn(tl.div_rn(one, scale), safe))
    stored_bytes = tl.where(is_finite, stored.to(tl.uint8, bitcast=True).to(tl.int32), 0x7F)
    return stored_bytes.to(tl.uint8), exact, factors


@triton.jit
def _sum_neighbours(x, LENGTH: tl.constexpr):
    """``[ROWS, BLOCKS, LENGTH]`` to half the length: elements 2i and 2i + 1 added."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], LENGTH // 2, 2)))
    return even + odd


@triton.jit
def _coding_errors(magnitudes, units, scales, factors, CONVENTION: tl.constexpr):
    """``[ROWS, BLOCKS]``: what blocks of 16 would err by with these scales.

    ``units`` are the magnitudes over the tensor scale. Bits are the reference's whether or not a
    product and a sum become one operation: every product is exact, that of a code and a scale in
    fp32, a square in fp64. ``tl.sum`` adds in an order that depends on the layout: hence a tree of
    neighbours.
    """
    codes = magnitudes * factors[:, :, None]
    # What is not below 6 saturates, NaN with it.
    codes = round_to_e2m1(tl.where(codes < _LARGEST_MAGNITUDE, codes, _LARGEST_MAGNITUDE))
    differences = codes * scales[:, :, None] - units
    if CONVENTION == "four_over_six_mse":
        wide = differences.to(tl.float64)
        errors = wide * wide
    else:
        errors = tl.abs(differences)
    errors = _sum_neighbours(_sum_neighbours(errors, 16), 8)
    errors = _sum_neighbours(_sum_neighbours(errors, 4), 2)
    return tl.reshape(errors, (magnitudes.shape[0], magnitudes.shape[1]))


@triton.jit
def nvfp4_scales(blocks, amax, is_finite, tensor_scale, CONVENTION: tl.constexpr):
    """(stored bytes, factors) of blocks ``[ROWS, BLOCKS, 16]``.

    Divisions are rounded as IEEE says, or bits would differ. Of two scales that err equally the
    smaller is kept; a block that is not finite errs by NaN, and keeps it too.
    """
    scale = tl.full(amax.shape, 0.0, tl.float32) + tensor_scale
    one = tl.full(amax.shape, 1.0, tl.float32)
    wanted = tl.div_rn(tl.div_rn(amax, one * 6.0), scale)
    if CONVENTION == "normal":
        wanted = tl.maximum(wanted, 0.015625)
    stored, exact, factors = _e4m3_scales(wanted, is_finite, one, scale)
    if CONVENTION == "four_over_six_mae" or CONVENTION == "four_over_six_mse":
        stored4, exact4, factors4 = _e4m3_scales(wanted * 1.5, is_finite, one, scale)
        magnitudes = tl.abs(blocks)
        units = tl.div_rn(magnitudes, tl.full(blocks.shape, 0.0, tl.float32) + tensor_scale)
        errors = _coding_errors(magnitudes, units, exact, factors, CONVENTION)
        errors4 = _coding_errors(magnitudes, units, exact4, factors4, CONVENTION)
        stored = tl.where(errors4 < errors, stored4, stored)
        factors = tl.where(errors4 < errors, factors4, factors)
    return stored, factors


@triton.jit
def _mxfp4_scales(amax_bits, is_finite, CONVENTION: tl.constexpr):
    """(stored bytes, factors) from the bits of amax."""
    bits = amax_bits
    if CONVENTION == "even":
        bits = bits + (1 << 21)
    exponents = (bits >> 23) - 129
    mantissa = bits & 0x7FFFFF
    if CONVENTION == "rceil":
        exponents = exponents + (mantissa > 0x400000).to(tl.int32)
    if CONVENTION == "ceil":
        exponents = exponents + (mantissa > 0).to(tl.int32)
    exponents = tl.maximum(exponents, -127)
    factors = ((127 - exponents) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, exponents + 127, 255).to(tl.uint8), factors


@triton.jit
def _scale_offsets(rows, blocks, num_blocks, LAYOUT: tl.constexpr):
    """Where scales lie in their matrix; see ``scale_layout.py``."""
    if LAYOUT == "plain":
        return rows[:, None] * num_blocks + blocks[None, :]
    tile = (rows // 128)[:, None] * ((num_blocks + 3) // 4) + (blocks // 4)[None, :]
    inside = ((rows % 32) * 16 + (rows % 128 // 32) * 4)[:, None] + (blocks % 4)[None, :]
    return tile * 512 + inside


@triton.jit
def quantize_kernel(
    x,
    mean,
    codes,
    scales,
    tensor_scale,
    x_stride_b,
    x_stride_h,
    x_stride_s,
    num_heads,
    num_rows,
    num_elements,
    padded_elements,
    scales_per_matrix,
    rows_per_mean,
    num_means,
    ALONG_KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    CONVENTION: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Quantises x - mean, one matrix for each batch entry and head.

    A program owns BLOCK_M rows by BLOCK_N elements. Rows are tokens and elements head dimensions,
    or, with ALONG_KEYS, the other way round: the operand of a product over keys. Elements past the
    last are zeros. ``mean`` is fp32 ``[matrices, num_means, elements]``.
    """
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    column_tiles = tl.cdiv(padded_elements, BLOCK_N)
    matrix = (tl.program_id(0) // (row_tiles * column_tiles)).to(tl.int64)
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    rows = tile // column_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    is_read = is_row[:, None] & (columns < num_elements)[None, :]
    start = x + matrix // num_heads * x_stride_b + matrix % num_heads * x_stride_h
    if ALONG_KEYS:
        pointers = start + columns.to(tl.int64)[None, :] * x_stride_s + rows[:, None]
    else:
        pointers = start + rows.to(tl.int64)[:, None] * x_stride_s + columns[None, :]
    values = tl.load(pointers, is_read, other=0.0).to(tl.float32)
    if HAS_MEAN:
        mean_rows = matrix * num_means + rows // rows_per_mean
        means = mean + mean_rows[:, None] * num_elements + columns[None, :]
        values = values - tl.load(means, is_read, other=0.0)

    blocks = tl.reshape(values, (BLOCK_M, BLOCK_N // BLOCK, BLOCK))
    # As integers, magnitudes order the same way, and NaN is the largest: it is not lost.
    amax_bits = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    is_finite = amax_bits < _FINITE_BITS
    if FORMAT == "nvfp4":
        amax = tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True)
        loaded = tl.load(tensor_scale)
        stored, factors = nvfp4_scales(blocks, amax, is_finite, loaded, CONVENTION)
    else:
        stored, factors = _mxfp4_scales(amax_bits, is_finite, CONVENTION)
    # Codes of a block that is not finite are those of NaN.
    factors = tl.where(is_finite, factors, float("nan"))
    scaled = blocks * factors[:, :, None]
    packed = encode_packed(tl.reshape(scaled, (BLOCK_M, BLOCK_N)), BLOCK_M, BLOCK_N, HARDWARE)

    half_columns = tile % column_tiles * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    code_rows = matrix * num_rows + rows
    tl.store(
        codes + code_rows[:, None] * (padded_elements // 2) + half_columns[None, :],
        packed,
        is_row[:, None] & (half_columns < padded_elements // 2)[None, :],
    )
    num_blocks = padded_elements // BLOCK
    scale_columns = tile % column_tiles * (BLOCK_N // BLOCK) + tl.arange(0, BLOCK_N // BLOCK)
    offsets = _scale_offsets(rows, scale_columns, num_blocks, LAYOUT)
    tl.store(
        scales + matrix * scales_per_matrix + offsets,
        stored,
        is_row[:, None] & (scale_columns < num_blocks)[None, :],
    )


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    out,
    num_rows,
    num_elements,
    FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes values without the tensor scale, ``[rows, elements]``, exact in bf16.

    A program owns BLOCK_M rows by BLOCK_N elements; scales are plain.
    """
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    column_tiles = tl.cdiv(num_elements, BLOCK_N)
    rows = tl.program_id(0) // column_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(0) % column_tiles
    wide_rows = rows.to(tl.int64)[:, None]
    is_row = (rows < num_rows)[:, None]
    half = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    blocks = tile * (BLOCK_N // BLOCK) + tl.arange(0, BLOCK_N // BLOCK)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    packed = tl.load(
        codes + wide_rows * (num_elements // 2) + half[None, :],
        is_row & (half < num_elements // 2)[None, :],
        other=0,
    )
    stored = tl.load(
        scales + wide_rows * (num_elements // BLOCK) + blocks[None, :],
        is_row & (blocks < num_elements // BLOCK)[None, :],
        other=0,
    )
    values = dequantize_tile(packed, stored, FORMAT, BLOCK_M, BLOCK_N, tl.bfloat16)
    tl.store(
        out + wide_rows * num_elements + columns[None, :],
        values,
        is_row & (columns < num_elements)[None, :],
    )
