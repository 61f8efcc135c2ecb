"""Device code of FP4 attention on FP4 tensor cores (``tl.dot_scaled``): sm_100, sm_103, sm_120."""

import triton
import triton.language as tl

from ..quantization.triton_kernel import encode_packed, round_to_e2m1

_LOG2_6 = tl.constexpr(2.584962500721156)
_LOG2_2688 = tl.constexpr(11.392317422778761)
_LN_2 = tl.constexpr(0.6931471805599453)
_LEAST_P_EXPONENT = tl.constexpr(-110.0)


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
    """(P in units of its block's scale and rounded, e8m0 bytes, the scales) of Direct-P."""
    top = block_top * factor - base[:, None]
    exponent = tl.maximum(tl.ceil(top) if SCALE == "ceil" else tl.floor(top), _LEAST_P_EXPONENT)
    byte = exponent.to(tl.int32) + 127
    power = (byte << 23).to(tl.float32, bitcast=True)
    if MAP == "exact":
        codes = tl.exp2(scores * factor + ((-base + _LOG2_6)[:, None] - exponent)[:, :, None])
    else:
        shift = SHIFT + SLOPE * ((-base + _LOG2_6)[:, None] - exponent)
        codes = tl.maximum(scores * (SLOPE * factor) + shift[:, :, None], 0.0)
    return round_to_e2m1(tl.minimum(codes, 6.0)), byte.to(tl.uint8), power


@triton.jit
def _two_level_p(scores, base, block_top, factor):
    """(P in units of its block's scale, e4m3 scales, 2688 P unrounded) of NVFP4's two levels."""
    shift = -base + _LOG2_2688
    p = tl.exp2(scores * factor + shift[:, None, None])
    wanted = tl.minimum(tl.exp2(block_top * factor + shift[:, None]) * (1.0 / 6.0), 448.0)
    stored = wanted.to(tl.float8e4nv)
    scale = stored.to(tl.float32)
    # Half the least scale: where the scale is 0, so is what comes of any code.
    reciprocal = 1.0 / tl.maximum(scale, 0.0009765625)
    return p * reciprocal[:, :, None], stored, p


@triton.jit
def _tile(
    q,
    q_stored,
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
    HARDWARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Takes one tile of keys in; MASKED: keys past kv_len or a row's last key count nothing."""
    P_BLOCK: tl.constexpr = 16 if MODE == "nvfp4" else 32
    keys = first_key + tl.arange(0, BLOCK_N)
    wide_keys = keys.to(tl.int64)
    half = tl.arange(0, HEAD_DIM // 2)
    blocks = tl.arange(0, HEAD_DIM // 16)
    dims = tl.arange(0, HEAD_DIM).to(tl.int64)
    is_key = keys < kv_len
    k_pointers = k_rows + wide_keys[None, :] * (HEAD_DIM // 2) + half[:, None]
    scale_pointers = k_scales + wide_keys[:, None] * (HEAD_DIM // 16) + blocks[None, :]
    if MASKED:
        k = tl.load(k_pointers, is_key[None, :], other=0)
        k_stored = tl.load(scale_pointers, is_key[:, None], other=0.0)
    else:
        k = tl.load(k_pointers)
        k_stored = tl.load(scale_pointers)
    scores = tl.dot_scaled(q, q_stored, "e2m1", k, k_stored, "e2m1")
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
    acc = acc * alpha[:, None]

    if MODE == "fp8_p":
        exact = tl.exp2(scores * factor + (8.0 - base)[:, None])
        total = total * alpha + tl.sum(exact, 1)
        v = tl.load(v_rows + dims[None, :] * padded_keys + wide_keys[:, None])
        acc = tl.dot(exact.to(tl.float8e4nv), v, acc)
    else:
        if MODE == "nvfp4":
            codes, p_stored, exact = _two_level_p(in_blocks, base, block_top, factor)
            total = total * alpha + tl.sum(tl.reshape(exact, (BLOCK_M, BLOCK_N)), 1)
        else:
            codes, p_stored, power = _direct_p(
                in_blocks, base, block_top, factor, P_SCALE, P_MAP, SLOPE, SHIFT
            )
            total = total * alpha + tl.sum(tl.sum(codes, 2) * power, 1)
            if EXACT_LSE:
                # In blocks, as P is: another shape would take another way through shared memory.
                exact = tl.exp2(in_blocks * factor + (-base + _LOG2_6)[:, None, None])
                exact_total = exact_total * alpha + tl.sum(tl.reshape(exact, (BLOCK_M, BLOCK_N)), 1)
        p = encode_packed(tl.reshape(codes, (BLOCK_M, BLOCK_N)), BLOCK_M, BLOCK_N, HARDWARE)
        half_keys = first_key // 2 + tl.arange(0, BLOCK_N // 2)
        key_blocks = first_key // P_BLOCK + tl.arange(0, BLOCK_N // P_BLOCK)
        v = tl.load(v_rows + dims[None, :] * (padded_keys // 2) + half_keys[:, None])
        v_stored = tl.load(
            v_scales + dims[:, None] * (padded_keys // P_BLOCK) + key_blocks[None, :]
        )
        acc = tl.dot_scaled(p, p_stored, "e2m1", v, v_stored, "e2m1", acc)
    return acc, total, exact_total, new_m


@triton.jit
def fp4_attention_native_kernel(
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
    HARDWARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Out = softmax(Q K^T) V with P rounded as MODE says; lse = ln of the exact sum.

    A program owns BLOCK_M query rows of one head; under a causal mask the longest start first.
    Both products take codes and scales as they are; V is transposed, blocks along keys. Whole tiles
    of keys are not masked. The row reference m is an integer (numerics.py); sums are fp32.
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
    q = tl.load(
        q_codes + code_rows * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :],
        is_row[:, None],
        other=0,
    )
    q_stored = tl.load(
        q_scales + code_rows * (HEAD_DIM // 16) + tl.arange(0, HEAD_DIM // 16)[None, :],
        is_row[:, None],
        other=0.0,
    )
    factor = tl.load(q_tensor_scale) * tl.load(k_tensor_scale) * logit_scale
    k_rows = k + kv_matrix * kv_len * (HEAD_DIM // 2)
    k_scale_rows = k_scales + kv_matrix * kv_len * (HEAD_DIM // 16)
    if MODE == "fp8_p":
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
            *(q, q_stored, acc, total, exact_total, m, k_rows, k_scale_rows),
            *(v_rows, v_scale_rows, delta_row, factor, logit_scale),
            *(first_key, kv_len, padded_keys, last_key),
            *(MODE, P_SCALE, P_MAP, SLOPE, SHIFT, HAS_DELTA, STORE_LSE, False, HARDWARE),
            *(HEAD_DIM, BLOCK_M, BLOCK_N),
        )
    for first_key in range(whole_end, end, BLOCK_N):
        acc, total, exact_total, m = _tile(
            *(q, q_stored, acc, total, exact_total, m, k_rows, k_scale_rows),
            *(v_rows, v_scale_rows, delta_row, factor, logit_scale),
            *(first_key, kv_len, padded_keys, last_key),
            *(MODE, P_SCALE, P_MAP, SLOPE, SHIFT, HAS_DELTA, STORE_LSE, True, HARDWARE),
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
