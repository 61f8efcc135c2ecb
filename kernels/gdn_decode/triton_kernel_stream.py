"""Triton device code of gated-delta-net decode: runs of state tiles, loads before all else.

A program owns a run of tiles of one value head of one sequence, each BLOCK_V columns of the state,
whole along K. What a token brings is under way before the first tile's address is known, and with
LOADS_AHEAD the next tile before the current one is computed. Both sums over the old state are taken
at once, so that a step is one round of reductions.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_kernel import _normalised


@triton.jit
def _load_tile(state_in, offsets, mask, POLICY: tl.constexpr, HAS_STATE_IN: tl.constexpr):
    """A tile as it is in memory; zeros where there is none."""
    if not HAS_STATE_IN:
        tile = tl.zeros(offsets.shape, tl.float32)
    elif POLICY == "cg":
        tile = tl.load(state_in + offsets, mask, other=0.0, cache_modifier=".cg")
    else:
        tile = tl.load(state_in + offsets, mask, other=0.0, eviction_policy=POLICY)
    return tile


@triton.jit
def _store_tile(state_out, offsets, state, mask, POLICY: tl.constexpr):
    value = state.to(state_out.dtype.element_ty)
    if POLICY == "cs":
        tl.store(state_out + offsets, value, mask, cache_modifier=".cs")
    else:
        tl.store(state_out + offsets, value, mask, eviction_policy=POLICY)


@triton.jit
def _load_gates(gate, beta, a_log, dt_bias, head, GATE: tl.constexpr):
    """What ``_gates`` takes of one token and head, in fp32; zeros for what GATE does without."""
    g = tl.load(gate).to(tl.float32)
    b = tl.load(beta).to(tl.float32)
    rate, bias = 0.0, 0.0
    if GATE == "fused":
        rate = tl.load(a_log + head).to(tl.float32)
        bias = tl.load(dt_bias + head).to(tl.float32)
    return g, b, rate, bias


@triton.jit
def _gates(g, b, rate, bias, GATE: tl.constexpr, BETA: tl.constexpr, BETA_SCALE: tl.constexpr):
    """(decay e^g, beta): the formulas of the other template, apart from the loads."""
    if GATE == "fused":
        x = g + bias
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        g = -tl.exp(rate) * softplus
    if BETA == "sigmoid":
        b = BETA_SCALE / (1.0 + tl.exp(-b))
    return tl.exp(g), b


@triton.jit
def _step(state, q_t, k_t, v_t, decay, b):
    """(state after the token, its output before it is scaled): o = e^g S^T q + e (k . q)."""
    known = tl.sum(state * k_t[:, None], 0)
    read = tl.sum(state * q_t[:, None], 0)
    error = (v_t - decay * known) * b
    o_t = decay * read + error * tl.sum(k_t * q_t, 0)
    return state * decay + k_t[:, None] * error[None, :], o_t


@triton.jit
def gdn_decode_stream_kernel(
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
    BLOCK_TILES: tl.constexpr,
    LOADS_AHEAD: tl.constexpr,
    IS_ONE_STEP: tl.constexpr,
    STATE_LOAD: tl.constexpr,
    STATE_STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """S <- e^g S; e = beta (v - S^T k); S <- S + k e^T; o = scale S^T q, token by token.

    Grid: one axis, runs of tiles fastest, then value heads, then sequences; tiles of a run lie one
    behind the other. ``slots`` gives the state's row of each sequence; a negative one leaves every
    state alone and writes zeros. The rows of ``state_in`` and ``state_out`` may be the same memory:
    a tile is read before it is written. BLOCK_K pads head_dim_k to a power of two with zeros, which
    change no sum. IS_ONE_STEP: every sequence has one token, and nothing of it is loaded twice.
    """
    TILE: tl.constexpr = BLOCK_V if STATE_LAYOUT == "KV" else BLOCK_V * HEAD_DIM_K
    RUNS: tl.constexpr = (HEAD_DIM_V + BLOCK_V * BLOCK_TILES - 1) // (BLOCK_V * BLOCK_TILES)
    first_v = (tl.program_id(0) % RUNS) * (BLOCK_V * BLOCK_TILES)
    head = (tl.program_id(0) // RUNS) % NUM_V_HEADS
    sequence = tl.program_id(0) // (RUNS * NUM_V_HEADS)
    qk_head = head // (NUM_V_HEADS // NUM_HEADS)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    is_k = offs_k < HEAD_DIM_K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    slot = sequence.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(slots + sequence).to(tl.int64)
    if IS_VARLEN:
        token = tl.load(cu_seqlens + sequence).to(tl.int64)
        count = (tl.load(cu_seqlens + sequence + 1) - token).to(tl.int32)
    else:
        token = sequence.to(tl.int64) * num_steps
        count = num_steps
    q_rows = q + qk_head * q_stride_h + offs_k
    k_rows = k + qk_head * k_stride_h + offs_k
    v_rows = v + head * v_stride_h + first_v + offs_v
    out_rows = out + head * out_stride_h + first_v + offs_v
    if IS_ONE_STEP:
        q_raw = tl.load(q_rows + token * q_stride_t, is_k, other=0.0)
        k_raw = tl.load(k_rows + token * k_stride_t, is_k, other=0.0)
        v_raw = tl.load(v_rows + token * v_stride_t, first_v + offs_v < HEAD_DIM_V, other=0.0)
        index = token * NUM_V_HEADS + head
        g, b, rate, bias = _load_gates(gate + index, beta + index, a_log, dt_bias, head, GATE)
        # ptxas would move loads to where their values are used, so that latencies add up. None
        # crosses a barrier, which costs a single warp next to nothing.
        tl.debug_barrier()

    is_live = slot >= 0
    row = (tl.maximum(slot, 0) * NUM_V_HEADS + head) * HEAD_DIM_K * HEAD_DIM_V
    if STATE_LAYOUT == "KV":
        offsets = row + offs_k[:, None] * HEAD_DIM_V + (first_v + offs_v)[None, :]
    else:
        offsets = row + (first_v + offs_v)[None, :] * HEAD_DIM_K + offs_k[:, None]
    is_row = offs_k[:, None] < tl.where(is_live, HEAD_DIM_K, 0)
    mask = is_row & (first_v + offs_v < HEAD_DIM_V)[None, :]
    tile = _load_tile(state_in, offsets, mask, STATE_LOAD, HAS_STATE_IN)
    if IS_ONE_STEP:
        tl.debug_barrier()
        q_t = _normalised(q_raw.to(tl.float32), USE_L2NORM) * scale
        k_t = _normalised(k_raw.to(tl.float32), USE_L2NORM)
        decay, b = _gates(g, b, rate, bias, GATE, BETA, BETA_SCALE)

    for i in tl.static_range(BLOCK_TILES):
        is_v = first_v + i * BLOCK_V + offs_v < HEAD_DIM_V
        state = tile.to(tl.float32)
        if LOADS_AHEAD and i + 1 < BLOCK_TILES:
            is_next = is_row & (first_v + (i + 1) * BLOCK_V + offs_v < HEAD_DIM_V)[None, :]
            tile = _load_tile(state_in, offsets + (i + 1) * TILE, is_next, STATE_LOAD, HAS_STATE_IN)
        if IS_ONE_STEP:
            v_t = v_raw.to(tl.float32)
            if i + 1 < BLOCK_TILES:
                v_raw = tl.load(
                    v_rows + token * v_stride_t + (i + 1) * BLOCK_V,
                    first_v + (i + 1) * BLOCK_V + offs_v < HEAD_DIM_V,
                    other=0.0,
                )
                tl.debug_barrier()
            state, o_t = _step(state, q_t, k_t, v_t, decay, b)
        else:
            for step in range(count):
                at = token + step
                q_t = tl.load(q_rows + at * q_stride_t, is_k, other=0.0).to(tl.float32)
                k_t = tl.load(k_rows + at * k_stride_t, is_k, other=0.0).to(tl.float32)
                v_t = tl.load(v_rows + at * v_stride_t + i * BLOCK_V, is_v, other=0.0)
                index = at * NUM_V_HEADS + head
                g, b, rate, bias = _load_gates(
                    gate + index, beta + index, a_log, dt_bias, head, GATE
                )
                decay, b = _gates(g, b, rate, bias, GATE, BETA, BETA_SCALE)
                q_t = _normalised(q_t, USE_L2NORM) * scale
                k_t = _normalised(k_t, USE_L2NORM)
                state, o_t = _step(state, q_t, k_t, v_t.to(tl.float32), decay, b)
                o_t = tl.where(is_live, o_t, 0.0).to(out.dtype.element_ty)
                tl.store(out_rows + at * out_stride_t + i * BLOCK_V, o_t, is_v)
        if HAS_STATE_OUT:  # noqa: SIM102 - this is known when compiling, the next is not
            if is_live:
                mask = is_k[:, None] & is_v[None, :]
                _store_tile(state_out, offsets + i * TILE, state, mask, STATE_STORE)
        if IS_ONE_STEP:
            # Behind the tile: its way to few threads takes longer than the tile's to memory.
            o_t = tl.where(is_live, o_t, 0.0).to(out.dtype.element_ty)
            tl.store(out_rows + token * out_stride_t + i * BLOCK_V, o_t, is_v)
        if not LOADS_AHEAD and i + 1 < BLOCK_TILES:
            is_next = is_row & (first_v + (i + 1) * BLOCK_V + offs_v < HEAD_DIM_V)[None, :]
            tile = _load_tile(state_in, offsets + (i + 1) * TILE, is_next, STATE_LOAD, HAS_STATE_IN)
