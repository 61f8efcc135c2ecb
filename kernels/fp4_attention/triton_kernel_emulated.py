"""Device code of FP4 attention by exact dequantisation: 16-bit products, any GPU from sm_90 on.

The codes and scales of P are those that FP4 tensor cores would be given, so that the output is
what they compute but for the order of sums.
"""

import triton
import triton.language as tl

from ..quantization.triton_kernel import dequantize_tile

_LOG2_6 = tl.constexpr(2.584962500721156)
_LOG2_2688 = tl.constexpr(11.392317422778761)
_LN_2 = tl.constexpr(0.6931471805599453)
_LEAST_P_EXPONENT = tl.constexpr(-110.0)
_EXPONENT_BITS = tl.constexpr(0x7F800000)
_ROUNDING = tl.constexpr(4194304.0)  # 2^22: times a power of two, steps of half of it


@triton.jit
def _rounded(x, least_power):
    """The nearest value of one mantissa bit to x of 0 or more, on the grid of least_power below it.

    As ``round_to_e2m1``, but the constant is a product, and so fused with the sum and the
    difference: four operations.
    """
    exponent = (x.to(tl.int32, bitcast=True) & _EXPONENT_BITS).to(tl.float32, bitcast=True)
    constant = tl.maximum(exponent, least_power) * _ROUNDING
    return (x + constant) - constant


@triton.jit
def _direct_p(
    scores,
    base,
    block_top,
    factor,
    SCALE: tl.constexpr,
    MAP: tl.constexpr,
    SLOPE: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """6 P of scores in blocks, as Direct-P represents it."""
    top = block_top * factor - base[:, None]
    exponent = tl.maximum(tl.ceil(top) if SCALE == "ceil" else tl.floor(top), _LEAST_P_EXPONENT)
    power = ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)[:, :, None]
    if MAP == "exact":
        # Rounding on the grid of the block's scale needs no division by it.
        p = tl.exp2(scores * factor + (-base + _LOG2_6)[:, None, None])
        if SCALE == "floor":
            p = tl.minimum(p, 6.0 * power)
        represented = _rounded(p, power)
    else:
        shift = SHIFT + SLOPE * ((-base + _LOG2_6)[:, None] - exponent)
        line = scores * (SLOPE * factor) + shift[:, :, None]
        represented = _rounded(tl.minimum(tl.maximum(line, 0.0), 6.0), 1.0) * power
    return represented


@triton.jit
def _two_level_p(scores, base, block_top, factor):
    """(2688 P of scores in blocks as NVFP4 represents it, 2688 P unrounded)."""
    shift = -base + _LOG2_2688
    p = tl.exp2(scores * factor + shift[:, None, None])
    wanted = tl.minimum(tl.exp2(block_top * factor + shift[:, None]) * (1.0 / 6.0), 448.0)
    scale = wanted.to(tl.float8e4nv).to(tl.float32)
    # Half the least scale: where the scale is 0, so is what comes of any code.
    reciprocal = 1.0 / tl.maximum(scale, 0.0009765625)
    codes = tl.minimum(p * reciprocal[:, :, None], 6.0)
    return _rounded(codes, 1.0) * scale[:, :, None], p


@triton.jit
def _tile(
    q,
    acc,
    total,
    exact_total,
    m,
    k_rows,
    k_scales,
    v_rows,
    v_scales,
    delta_row,
    factor,
    delta_factor,
    first_key,
    kv_len,
    padded_keys,
    last_key,
    MODE: tl.constexpr,
    P_SCALE: tl.constexpr,
    P_MAP: tl.constexpr,
    SLOPE: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    EXACT_LSE: tl.constexpr,
    MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Takes one tile of keys in; MASKED: keys past kv_len or a row's last key count nothing."""
    P_BLOCK: tl.constexpr = 16 if MODE == "nvfp4" else 32
    V_FORMAT: tl.constexpr = "nvfp4" if MODE == "nvfp4" else "mxfp4"
    columns = tl.arange(0, BLOCK_N)
    if MODE == "fp8_p":
        # Of each 16 keys, in this order, a thread's scores of two neighbouring tiles of 8 columns
        # are what an FP8 product wants of it as P: no value goes to another thread.
        columns = columns // 16 * 16 + columns % 8 // 2 * 4 + columns // 8 % 2 * 2 + columns % 2
    keys = first_key + columns
    wide_keys = keys.to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    is_key = keys < kv_len
    if AHEAD:
        k_pointers = k_rows + wide_keys[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_pointers, is_key[:, None], other=0.0) if MASKED else tl.load(k_pointers)
    else:
        half = tl.arange(0, HEAD_DIM // 2)
        blocks = tl.arange(0, HEAD_DIM // 16)
        k_pointers = k_rows + wide_keys[:, None] * (HEAD_DIM // 2) + half[None, :]
        scale_pointers = k_scales + wide_keys[:, None] * (HEAD_DIM // 16) + blocks[None, :]
        if MASKED:
            packed = tl.load(k_pointers, is_key[:, None], other=0)
            stored = tl.load(scale_pointers, is_key[:, None], other=0)
        else:
            packed = tl.load(k_pointers)
            stored = tl.load(scale_pointers)
        k = dequantize_tile(packed, stored, "nvfp4", BLOCK_N, HEAD_DIM, tl.bfloat16)
    scores = tl.dot(q, tl.trans(k))
    if HAS_DELTA:
        if MASKED:
            delta = tl.load(delta_row + keys, is_key, other=0.0)
        else:
            delta = tl.load(delta_row + keys)
        scores = scores * factor + (delta * delta_factor)[None, :]
        factor = 1.0
    if MASKED:
        is_seen = is_key[None, :] & (keys[None, :] <= last_key[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))

    if MODE == "fp8_p":
        row_top = tl.max(scores, 1)
    else:
        in_blocks = tl.reshape(scores, (BLOCK_M, BLOCK_N // P_BLOCK, P_BLOCK))
        block_top = tl.max(in_blocks, 2)
        row_top = tl.max(block_top, 1)
    new_m = tl.maximum(m, tl.ceil(row_top * factor))
    # A row that has seen no key yet must not subtract infinity from infinity.
    base = tl.where(new_m == float("-inf"), 0.0, new_m) if MASKED else new_m
    alpha = tl.exp2(m - base)

    v_keys = first_key + tl.arange(0, BLOCK_N)
    v_pointers = v_rows + dims.to(tl.int64)[None, :] * padded_keys + v_keys[:, None]
    if MODE == "fp8_p":
        exact = tl.exp2(scores * factor + (8.0 - base)[:, None])
        total = total * alpha + tl.sum(exact, 1)
        # A sum of its own for each tile: Hopper's FP8 products keep few bits of what they add to.
        in_pairs = tl.reshape(exact.to(tl.float8e4nv), (BLOCK_M, BLOCK_N // 16, 2, 4, 2))
        p = tl.reshape(tl.permute(in_pairs, (0, 1, 3, 2, 4)), (BLOCK_M, BLOCK_N))
        acc = acc * alpha[:, None] + tl.dot(p, tl.load(v_pointers))
    else:
        if MODE == "nvfp4":
            represented, exact = _two_level_p(in_blocks, base, block_top, factor)
            total = total * alpha + tl.sum(tl.reshape(exact, (BLOCK_M, BLOCK_N)), 1)
        else:
            represented = _direct_p(
                in_blocks, base, block_top, factor, P_SCALE, P_MAP, SLOPE, SHIFT
            )
            total = total * alpha + tl.sum(tl.reshape(represented, (BLOCK_M, BLOCK_N)), 1)
            if EXACT_LSE:
                # In blocks, as P is: another shape would take another way through shared memory.
                exact = tl.exp2(in_blocks * factor + (-base + _LOG2_6)[:, None, None])
                exact_total = exact_total * alpha + tl.sum(tl.reshape(exact, (BLOCK_M, BLOCK_N)), 1)
        p = tl.reshape(represented, (BLOCK_M, BLOCK_N)).to(tl.bfloat16)
        if AHEAD:
            v = tl.load(v_pointers)
        else:
            half_keys = first_key // 2 + tl.arange(0, BLOCK_N // 2)
            key_blocks = first_key // P_BLOCK + tl.arange(0, BLOCK_N // P_BLOCK)
            wide_dims = dims.to(tl.int64)[:, None]
            v_packed = tl.load(v_rows + wide_dims * (padded_keys // 2) + half_keys[None, :])
            v_stored = tl.load(
                v_scales + wide_dims * (padded_keys // P_BLOCK) + key_blocks[None, :]
            )
            v = tl.trans(
                dequantize_tile(v_packed, v_stored, V_FORMAT, HEAD_DIM, BLOCK_N, tl.bfloat16)
            )
        acc = tl.dot(p, v, acc * alpha[:, None])
    return acc, total, exact_total, new_m


@triton.jit
def fp4_attention_emulated_kernel(
    q_codes,
    q_scales,
    q_tensor_scale,
    k,
    k_scales,
    k_tensor_scale,
    v,
    v_scales,
    v_tensor_scale,
    delta,
    out,
    lse,
    logit_scale,
    out_stride_b,
    out_stride_h,
    out_stride_s,
    query_len,
    kv_len,
    padded_keys,
    num_heads,
    num_deltas,
    GROUP_SIZE: tl.constexpr,
    MODE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    P_SCALE: tl.constexpr,
    P_MAP: tl.constexpr,
    SLOPE: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    STORE_LSE: tl.constexpr,
    AHEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Out = softmax(Q K^T) V with P rounded as MODE says; lse = ln of the exact sum.

    A program owns BLOCK_M query rows of one head; under a causal mask the longest start first.
    With AHEAD, k is bf16 ``[heads, keys, dims]`` and v bf16 ``[heads, dims, padded keys]``, else
    both are codes; v is e4m3 in mode fp8_p. Whole tiles of keys are not masked. The row reference m
    is an integer, so that codes depend on no tile (numerics.py); sums are fp32.
    """
    row_tiles = tl.cdiv(query_len, BLOCK_M)
    tile = tl.program_id(0) % row_tiles
    if IS_CAUSAL:
        tile = row_tiles - 1 - tile
    matrix = (tl.program_id(0) // row_tiles).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    kv_matrix = batch * (num_heads // GROUP_SIZE) + head // GROUP_SIZE
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < query_len
    dims = tl.arange(0, HEAD_DIM)

    code_rows = (matrix * query_len + rows)[:, None]
    packed = tl.load(
        q_codes + code_rows * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :],
        is_row[:, None],
        other=0,
    )
    stored = tl.load(
        q_scales + code_rows * (HEAD_DIM // 16) + tl.arange(0, HEAD_DIM // 16)[None, :],
        is_row[:, None],
        other=0,
    )
    q = dequantize_tile(packed, stored, "nvfp4", BLOCK_M, HEAD_DIM, tl.bfloat16)
    factor = tl.load(q_tensor_scale) * tl.load(k_tensor_scale) * logit_scale

    if AHEAD:
        k_rows = k + kv_matrix * kv_len * HEAD_DIM
    else:
        k_rows = k + kv_matrix * kv_len * (HEAD_DIM // 2)
    k_scale_rows = k_scales + kv_matrix * kv_len * (HEAD_DIM // 16)
    if AHEAD or MODE == "fp8_p":
        v_rows = v + kv_matrix * HEAD_DIM * padded_keys
    else:
        v_rows = v + kv_matrix * HEAD_DIM * (padded_keys // 2)
    v_scale_rows = v_scales + kv_matrix * HEAD_DIM * (
        padded_keys // (16 if MODE == "nvfp4" else 32)
    )
    delta_row = delta
    if HAS_DELTA:
        index = matrix * num_deltas + tl.minimum(first_row // 128, num_deltas - 1)
        delta_row = delta + index * kv_len

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    exact_total = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    end, whole_end = kv_len, kv_len
    last_key = tl.full([BLOCK_M], 0, tl.int32) + kv_len
    if IS_CAUSAL:
        offset = kv_len - query_len
        last_key = rows + offset
        end = tl.minimum(kv_len, tl.maximum(first_row + BLOCK_M + offset, 0))
        whole_end = tl.minimum(kv_len, tl.maximum(first_row + 1 + offset, 0))
    whole_end = whole_end // BLOCK_N * BLOCK_N
    for first_key in range(0, whole_end, BLOCK_N):
        acc, total, exact_total, m = _tile(
            *(q, acc, total, exact_total, m, k_rows, k_scale_rows, v_rows, v_scale_rows),
            *(delta_row, factor, logit_scale, first_key, kv_len, padded_keys, last_key),
            *(MODE, P_SCALE, P_MAP, SLOPE, SHIFT, HAS_DELTA, STORE_LSE, False, AHEAD),
            *(HEAD_DIM, BLOCK_M, BLOCK_N),
        )
    for first_key in range(whole_end, end, BLOCK_N):
        acc, total, exact_total, m = _tile(
            *(q, acc, total, exact_total, m, k_rows, k_scale_rows, v_rows, v_scale_rows),
            *(delta_row, factor, logit_scale, first_key, kv_len, padded_keys, last_key),
            *(MODE, P_SCALE, P_MAP, SLOPE, SHIFT, HAS_DELTA, STORE_LSE, True, AHEAD),
            *(HEAD_DIM, BLOCK_M, BLOCK_N),
        )

    v_factor = tl.load(v_tensor_scale + kv_matrix) if MODE == "fp8_p" else tl.load(v_tensor_scale)
    is_empty = total == 0.0
    result = acc * (v_factor / tl.where(is_empty, 1.0, total))[:, None]
    out_rows = out + batch * out_stride_b + head * out_stride_h
    out_pointers = out_rows + rows.to(tl.int64)[:, None] * out_stride_s + dims[None, :]
    tl.store(out_pointers, result.to(out.dtype.element_ty), is_row[:, None])
    if STORE_LSE:
        if MODE == "direct":
            total = exact_total
        SHIFT_OF_P: tl.constexpr = (
            8.0 if MODE == "fp8_p" else (_LOG2_2688 if MODE == "nvfp4" else _LOG2_6)
        )
        log_total = tl.log2(tl.where(is_empty, 1.0, total)) - SHIFT_OF_P
        value = tl.where(is_empty, float("-inf"), (m + log_total) * _LN_2)
        tl.store(lse + matrix * query_len + rows, value, is_row)
