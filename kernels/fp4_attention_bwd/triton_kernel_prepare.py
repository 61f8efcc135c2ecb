"""Device code that makes the operands of the backward products: layouts, formats, row statistics.

FP8 products on Hopper read both operands along the summed axis only, so that what is summed over
dimensions and over tokens is there twice: ``[tokens, dims]`` and ``[dims, tokens]``. All rows up to
the padded length are written, zeros past the last: no product then has a tail.
"""

import triton
import triton.language as tl

from ..quantization.triton_kernel import dequantize_tile

_LOG2_E = tl.constexpr(1.4426950408889634)
_FINITE_BITS = tl.constexpr(0x7F800000)
_TOP_EXPONENT = tl.constexpr(14)
"""The largest element of dO becomes 2^14 or more: below e5m2's 57344, and 2^30 above its least."""


@triton.jit
def fp4_attention_bwd_amax_kernel(
    grad_out,
    partial_amax,
    grad_out_stride_b,
    grad_out_stride_h,
    grad_out_stride_s,
    query_len,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The largest magnitude of BLOCK_M rows of dO of one head, as bits of fp32: NaN is largest."""
    row_tiles = tl.cdiv(query_len, BLOCK_M)
    matrix = (tl.program_id(0) // row_tiles).to(tl.int64)
    rows = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    start = grad_out + matrix // num_heads * grad_out_stride_b
    start += matrix % num_heads * grad_out_stride_h
    pointers = start + rows.to(tl.int64)[:, None] * grad_out_stride_s
    x = tl.load(pointers + tl.arange(0, HEAD_DIM)[None, :], (rows < query_len)[:, None], other=0.0)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(partial_amax + tl.program_id(0), tl.max(tl.max(bits, 1), 0))


@triton.jit
def _power_of(partial_amax, first, count, BLOCK: tl.constexpr):
    """2^a that takes the largest of dO's magnitudes of ``count`` tiles to e5m2's top, as fp32.

    A power of two: what it does to dO is undone exactly.
    """
    bits = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        tiles = start + tl.arange(0, BLOCK)
        bits = tl.maximum(bits, tl.load(partial_amax + first + tiles, tiles < count, other=0))
    exponent = (tl.max(bits, 0) >> 23) - 127
    # Zeros and what is not finite are left as they are.
    power = tl.minimum(tl.maximum(-exponent + _TOP_EXPONENT, -100), 100)
    power = tl.where((exponent == -127) | (exponent == 128), 0, power)
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp4_attention_bwd_rows_kernel(
    out,
    grad_out,
    lse,
    v_scale,
    partial_amax,
    do,
    do_t,
    do_power,
    shift,
    dot_rows,
    out_stride_b,
    out_stride_h,
    out_stride_s,
    grad_out_stride_b,
    grad_out_stride_h,
    grad_out_stride_s,
    query_len,
    padded_rows,
    num_heads,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """DO in e5m2 both ways, and what each row adds: 8 - lse in log2 units, and sum(O dO).

    A program owns BLOCK_M rows of one head. The sum is in units of the product of stored dO and
    stored V, so that it can be taken off that product. Rows past the last, and those that see no
    key, get -inf: their P is 0.
    """
    row_tiles = padded_rows // BLOCK_M
    matrix = (tl.program_id(0) // row_tiles).to(tl.int64)
    tile = tl.program_id(0) % row_tiles
    batch, head = matrix // num_heads, matrix % num_heads
    kv_matrix = matrix // GROUP_SIZE
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    is_row = rows < query_len
    wide_rows = rows.to(tl.int64)[:, None]

    count = GROUP_SIZE * tl.cdiv(query_len, BLOCK_M)
    power = _power_of(partial_amax, kv_matrix * count, count, BLOCK_P)
    if (tile == 0) & (head % GROUP_SIZE == 0):
        tl.store(do_power + kv_matrix, power)

    out_rows = out + batch * out_stride_b + head * out_stride_h + wide_rows * out_stride_s
    o = tl.load(out_rows + dims[None, :], is_row[:, None], other=0.0).to(tl.float32)
    grad_rows = grad_out + batch * grad_out_stride_b + head * grad_out_stride_h
    grad_rows += wide_rows * grad_out_stride_s
    x = tl.load(grad_rows + dims[None, :], is_row[:, None], other=0.0).to(tl.float32)
    is_finite = (x.to(tl.int32, bitcast=True) & _FINITE_BITS) != _FINITE_BITS
    # The conversion would make the largest finite number of infinity.
    stored = tl.where(is_finite, x * power, float("nan")).to(tl.float8e5)
    tl.store(do + (matrix * padded_rows + wide_rows) * HEAD_DIM + dims[None, :], stored)
    columns = matrix * HEAD_DIM + dims.to(tl.int64)[:, None]
    tl.store(do_t + columns * padded_rows + rows[None, :], tl.trans(stored))

    sums = tl.sum(o * x, 1) / tl.load(v_scale + kv_matrix) * power
    tl.store(dot_rows + matrix * padded_rows + rows, sums)
    given = tl.load(lse + matrix * query_len + rows, is_row, other=float("-inf"))
    no_key = given == float("-inf")
    shifts = tl.where(no_key, float("-inf"), 8.0 - tl.where(no_key, 0.0, given) * _LOG2_E)
    tl.store(shift + matrix * padded_rows + rows, shifts)


@triton.jit
def fp4_attention_bwd_operand_kernel(
    codes,
    scales,
    values,
    values_t,
    num_rows,
    padded_rows,
    STORE_VALUES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Q or K from its codes: bf16 ``[tokens, dims]``, exact, and e4m3 ``[dims, tokens]``.

    A program owns BLOCK_M tokens of one head. The latter is an eighth of code times scale, which
    is at most 2688.
    """
    row_tiles = padded_rows // BLOCK_M
    matrix = (tl.program_id(0) // row_tiles).to(tl.int64)
    rows = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    is_row = (rows < num_rows)[:, None]
    given = (matrix * num_rows + rows)[:, None]
    half = given * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :]
    blocks = given * (HEAD_DIM // 16) + tl.arange(0, HEAD_DIM // 16)[None, :]
    packed = tl.load(codes + half, is_row, other=0)
    stored = tl.load(scales + blocks, is_row, other=0)
    exact = dequantize_tile(packed, stored, "nvfp4", BLOCK_M, HEAD_DIM, tl.float32)
    if STORE_VALUES:
        written = (matrix * padded_rows + rows)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(values + written, exact.to(tl.bfloat16))
    columns = (matrix * HEAD_DIM + dims)[:, None]
    eighth = tl.trans(exact * 0.125).to(tl.float8e4nv)
    tl.store(values_t + columns * padded_rows + rows[None, :], eighth)


@triton.jit
def fp4_attention_bwd_turn_kernel(
    v_t,
    v,
    padded_keys,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """V ``[tokens, dims]`` from ``[dims, tokens]``, bytes as they are.

    A program owns BLOCK_M tokens of one head.
    """
    row_tiles = padded_keys // BLOCK_M
    matrix = (tl.program_id(0) // row_tiles).to(tl.int64)
    rows = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    columns = (matrix * HEAD_DIM + dims)[:, None]
    tile = tl.load(v_t + columns * padded_keys + rows[None, :])
    written = (matrix * padded_keys + rows)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(v + written, tl.trans(tile))
