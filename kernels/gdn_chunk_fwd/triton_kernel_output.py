"""Triton device code that reads the output off the states at the starts of chunks."""

import triton
import triton.language as tl


@triton.jit
def gdn_chunk_output_kernel(
    q,
    k,
    table,
    total_decay,
    chunk_state,
    errors,
    scores,
    out,
    scale,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    out_stride_t,
    out_stride_h,
    scratch_tokens,
    num_heads,
    num_v_heads,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Out = scale 2^G (q S) + tril(q k^T Gamma) scale e, of one chunk, head and block of V.

    Grid: blocks of V fastest, then value heads, then chunks.
    """
    V_BLOCKS: tl.constexpr = (HEAD_DIM_V + BLOCK_V - 1) // BLOCK_V
    block = tl.program_id(0) % V_BLOCKS
    head = (tl.program_id(0) // V_BLOCKS) % num_v_heads
    chunk = tl.program_id(0) // (V_BLOCKS * num_v_heads)
    qk_head = (head // (num_v_heads // num_heads)).to(tl.int64)
    first = tl.load(table + 2 * chunk).to(tl.int64)
    count = tl.load(table + 2 * chunk + 1)
    if count > 0:
        offs_c = tl.arange(0, CHUNK)
        offs_k = tl.arange(0, BLOCK_K)
        offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
        is_c = offs_c < count
        is_v = offs_v < HEAD_DIM_V
        token = first + offs_c
        row = head.to(tl.int64) * scratch_tokens + token
        q_rows = q + (token * q_stride_t + qk_head * q_stride_h)[:, None]
        k_rows = k + (token * k_stride_t + qk_head * k_stride_h)[:, None]
        state = chunk_state + (chunk.to(tl.int64) * num_v_heads + head) * (HEAD_DIM_K * HEAD_DIM_V)
        result = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        p = tl.zeros([CHUNK, CHUNK], tl.float32)
        for k0 in range(0, HEAD_DIM_K, BLOCK_K):
            is_k = k0 + offs_k < HEAD_DIM_K
            mask = is_c[:, None] & is_k[None, :]
            q_tile = tl.load(q_rows + (k0 + offs_k)[None, :], mask, other=0.0)
            s_tile = tl.load(
                state + (k0 + offs_k)[:, None] * HEAD_DIM_V + offs_v[None, :],
                is_k[:, None] & is_v[None, :],
                other=0.0,
            )
            result = tl.dot(q_tile, s_tile, result, input_precision=PRECISION)
            if not HAS_SCORES:
                k_tile = tl.load(k_rows + (k0 + offs_k)[None, :], mask, other=0.0)
                p = tl.dot(q_tile, tl.trans(k_tile), p, input_precision=PRECISION)
        total = tl.load(total_decay + row, is_c, other=0.0)
        result = result * (tl.exp2(total) * scale)[:, None]
        element = q.dtype.element_ty
        if HAS_SCORES:
            p_tile = tl.load(
                scores + row[:, None] * CHUNK + offs_c[None, :],
                is_c[:, None],
                other=0.0,
            )
        else:
            is_lower = (offs_c[:, None] >= offs_c[None, :]) & is_c[:, None]
            difference = total[:, None] - total[None, :]
            decay = tl.exp2(tl.where(is_lower, difference, float("-inf")))
            p_tile = (p * decay * scale).to(element)
        mask = is_c[:, None] & is_v[None, :]
        e_tile = tl.load(errors + row[:, None] * HEAD_DIM_V + offs_v[None, :], mask, other=0.0)
        result = tl.dot(p_tile, e_tile, result, input_precision=PRECISION)
        target = out + (token * out_stride_t + head.to(tl.int64) * out_stride_h)[:, None]
        tl.store(target + offs_v[None, :], result.to(element), mask)
