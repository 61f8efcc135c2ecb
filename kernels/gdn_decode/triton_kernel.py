"""Triton device code of gated-delta-net decode: the recurrence, state in registers.

Columns of the state (along V) do not mix, so a program owns a block of them for one value head of
one sequence, whole along K, and walks the sequence's tokens with it. One read and one write of the
state is all the traffic that counts.
"""

import triton
import triton.language as tl


@triton.jit
def _normalised(x, USE_L2NORM: tl.constexpr):
    """Gives x / sqrt(sum x^2 + 1e-6) in fp32, or x."""
    if USE_L2NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
    return x


@triton.jit
def _gates(
    gate,
    beta,
    a_log,
    dt_bias,
    head,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    BETA_SCALE: tl.constexpr,
):
    """(decay e^g, beta) of one token and head in fp32.

    "fused": g = -exp(a_log) softplus(gate + dt_bias), softplus linear above 20 as torch has it.
    BETA "sigmoid": beta = BETA_SCALE sigmoid(beta).
    """
    g = tl.load(gate).to(tl.float32)
    if GATE == "fused":
        x = g + tl.load(dt_bias + head).to(tl.float32)
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        g = -tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus
    b = tl.load(beta).to(tl.float32)
    if BETA == "sigmoid":
        b = BETA_SCALE / (1.0 + tl.exp(-b))
    return tl.exp(g), b


@triton.jit
def gdn_decode_kernel(
    q,
    k,
    v,
    gate,
    beta,
    a_log,
    dt_bias,
    state_in,
    state_out,
    slots,
    cu_seqlens,
    out,
    scale,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    out_stride_t,
    out_stride_h,
    num_steps,
    NUM_HEADS: tl.constexpr,
    NUM_V_HEADS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STATE_LAYOUT: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_STATE_IN: tl.constexpr,
    HAS_STATE_OUT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    STATE_EVICTION: tl.constexpr,
):
    """S <- e^g S; e = beta (v - S^T k); S <- S + k e^T; o = scale S^T q, token by token.

    Grid: one axis, blocks of V fastest, then value heads, then sequences. ``slots`` gives the
    state's row of each sequence; a negative one leaves every state alone and writes zeros. The rows
    of ``state_in`` and ``state_out`` may be the same memory: a block reads its part before it
    writes it. BLOCK_K pads head_dim_k to a power of two with zeros, which change no sum.
    """
    V_BLOCKS: tl.constexpr = (HEAD_DIM_V + BLOCK_V - 1) // BLOCK_V
    v_block = tl.program_id(0) % V_BLOCKS
    head = (tl.program_id(0) // V_BLOCKS) % NUM_V_HEADS
    sequence = tl.program_id(0) // (V_BLOCKS * NUM_V_HEADS)
    qk_head = head // (NUM_V_HEADS // NUM_HEADS)

    if IS_VARLEN:
        first = tl.load(cu_seqlens + sequence).to(tl.int64)
        count = (tl.load(cu_seqlens + sequence + 1) - first).to(tl.int32)
    else:
        first = sequence.to(tl.int64) * num_steps
        count = num_steps

    offs_k = tl.arange(0, BLOCK_K)
    offs_v = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k = offs_k < HEAD_DIM_K
    is_v = offs_v < HEAD_DIM_V
    slot = sequence.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slots + sequence).to(tl.int64)
    is_live = slot >= 0
    row = (tl.maximum(slot, 0) * NUM_V_HEADS + head) * HEAD_DIM_K * HEAD_DIM_V
    if STATE_LAYOUT == "KV":
        offsets = offs_k[:, None] * HEAD_DIM_V + offs_v[None, :]
    else:
        offsets = offs_v[None, :] * HEAD_DIM_K + offs_k[:, None]
    mask = (offs_k[:, None] < tl.where(is_live, HEAD_DIM_K, 0)) & is_v[None, :]
    if HAS_STATE_IN:
        state = tl.load(
            state_in + row + offsets, mask, other=0.0, eviction_policy=STATE_EVICTION
        ).to(tl.float32)
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)

    for step in range(count):
        token = first + step
        q_row = q + token * q_stride_t + qk_head * q_stride_h
        k_row = k + token * k_stride_t + qk_head * k_stride_h
        v_row = v + token * v_stride_t + head * v_stride_h
        q_t = _normalised(tl.load(q_row + offs_k, is_k, other=0.0).to(tl.float32), USE_L2NORM)
        k_t = _normalised(tl.load(k_row + offs_k, is_k, other=0.0).to(tl.float32), USE_L2NORM)
        v_t = tl.load(v_row + offs_v, is_v, other=0.0).to(tl.float32)
        index = token * NUM_V_HEADS + head
        decay, b = _gates(gate + index, beta + index, a_log, dt_bias, head, GATE, BETA, BETA_SCALE)
        state = state * decay
        error = (v_t - tl.sum(state * k_t[:, None], 0)) * b
        state = state + k_t[:, None] * error[None, :]
        o_t = tl.sum(state * (q_t * scale)[:, None], 0)
        out_row = out + token * out_stride_t + head * out_stride_h
        o_t = tl.where(is_live, o_t, 0.0)
        tl.store(out_row + offs_v, o_t.to(out.dtype.element_ty), is_v)

    if HAS_STATE_OUT:
        result = state.to(state_out.dtype.element_ty)
        tl.store(state_out + row + offsets, result, mask, eviction_policy=STATE_EVICTION)
