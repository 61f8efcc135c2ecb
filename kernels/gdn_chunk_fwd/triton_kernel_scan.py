"""Triton device code that carries the state along a sequence or along segments of it."""

import triton
import triton.language as tl

from .triton_kernel import _bounds, _by_length, _locate, _pieces_before


@triton.jit
def _state_offsets(offs_k, offs_v, K: tl.constexpr, V: tl.constexpr, LAYOUT: tl.constexpr):
    """Offsets inside one state of a tile ``[offs_k, offs_v]``."""
    if LAYOUT == "KV":
        return offs_k[:, None] * V + offs_v[None, :]
    return offs_v[None, :] * K + offs_k[:, None]


@triton.jit
def _load_tile(start, offsets, is_row, is_column, IS_WHOLE: tl.constexpr):
    """A tile, 0 where a row or a column is not inside; IS_WHOLE: every column is."""
    if IS_WHOLE:
        tile = tl.load(start + offsets, is_row[:, None], other=0.0)
    else:
        tile = tl.load(start + offsets, is_row[:, None] & is_column[None, :], other=0.0)
    return tile


@triton.jit
def _scan(
    q,
    k,
    v,
    cu_seqlens,
    total_decay,
    inverse,
    w,
    u,
    scores,
    initial_state,
    entry_state,
    chunk_state,
    errors,
    segment_state,
    out,
    final_state,
    scale,
    num_sequences,
    tokens_each,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    out_stride_t,
    out_stride_h,
    scratch_tokens,
    num_heads,
    num_v_heads,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORM: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    RESULT: tl.constexpr,
    ORDER: tl.constexpr,
    FORGET_BITS: tl.constexpr,
    STATE_LAYOUT: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    HAS_FINAL_STATE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """S <- 2^G_last S + k^T (2^(G_last - G) e), e = u - w S, chunk by chunk, S in registers.

    A program owns BLOCK_V columns of the state of one value head along one segment of SEGMENT
    chunks of a sequence (0: along all of it), and the other columns do not concern it. FORM
    "inverse": e = A (v - 2^G (k S)) instead. RESULT says what is stored: see the kernels.

    Grid: column blocks fastest, then value heads, then segments.
    """
    V_BLOCKS: tl.constexpr = (HEAD_DIM_V + BLOCK_V - 1) // BLOCK_V
    K_BLOCKS: tl.constexpr = (HEAD_DIM_K + BLOCK_V - 1) // BLOCK_V
    COLUMN_BLOCKS: tl.constexpr = V_BLOCKS + K_BLOCKS if RESULT == "transition" else V_BLOCKS
    block = tl.program_id(0) % COLUMN_BLOCKS
    head = (tl.program_id(0) // COLUMN_BLOCKS) % num_v_heads
    segment = tl.program_id(0) // (COLUMN_BLOCKS * num_v_heads)
    qk_head = (head // (num_v_heads // num_heads)).to(tl.int64)
    if SEGMENT > 0:
        sequence, place = _locate(
            cu_seqlens,
            num_sequences,
            tokens_each,
            segment,
            SEGMENT * CHUNK,
            1,
            IS_VARLEN,
            BLOCK_N,
        )
    else:
        sequence = segment
        place = segment * 0
        if ORDER == "longest" and IS_VARLEN:
            sequence = _by_length(cu_seqlens, num_sequences, segment, BLOCK_N)
    if sequence < num_sequences:
        first, count = _bounds(cu_seqlens, tokens_each, sequence, IS_VARLEN)
        begin = place * (SEGMENT * CHUNK)
        end = count
        if SEGMENT > 0:
            end = tl.minimum(count, begin + SEGMENT * CHUNK)
        is_last = end == count
        is_wanted = True
        is_unit = False
        if RESULT == "transition":
            is_unit = block >= V_BLOCKS
            # Nothing comes behind the last; the first starts from a state that is known.
            is_wanted = (is_last == 0) & ((place > 0) | (is_unit == 0))
        if is_wanted:
            offs_k = tl.arange(0, BLOCK_K)
            offs_c = tl.arange(0, CHUNK)
            offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
            if RESULT == "transition":
                offs_v = tl.where(is_unit, offs_v - V_BLOCKS * BLOCK_V, offs_v)
            is_k = offs_k < HEAD_DIM_K
            is_v = offs_v < HEAD_DIM_V
            is_value = is_v
            if RESULT == "transition":
                # Columns of the unit matrix see v = 0.
                is_v = offs_v < tl.where(is_unit, HEAD_DIM_K, HEAD_DIM_V)
                is_value = offs_v < tl.where(is_unit, 0, HEAD_DIM_V)
            is_state = is_k[:, None] & is_v[None, :]
            wide: tl.constexpr = HEAD_DIM_K * HEAD_DIM_V
            own = (sequence.to(tl.int64) * num_v_heads + head) * wide
            state_offsets = _state_offsets(offs_k, offs_v, HEAD_DIM_K, HEAD_DIM_V, STATE_LAYOUT)
            state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            if HAS_INITIAL_STATE:
                is_given = (offs_k < tl.where(place == 0, HEAD_DIM_K, 0))[:, None]
                is_given = is_given & is_value[None, :]
                state += tl.load(initial_state + own + state_offsets, is_given, other=0.0)
            if SEGMENT > 0:
                if RESULT == "transition":
                    diagonal = tl.where(is_unit, offs_v, -1)
                    state += (offs_k[:, None] == diagonal[None, :]).to(tl.float32)
                else:
                    entry = (segment.to(tl.int64) * num_v_heads + head) * wide
                    offsets = offs_k[:, None] * HEAD_DIM_V + offs_v[None, :]
                    is_entry = (offs_k < tl.where(place > 0, HEAD_DIM_K, 0))[:, None]
                    is_entry = is_entry & is_v[None, :]
                    state += tl.load(entry_state + entry + offsets, is_entry, other=0.0)
            element = k.dtype.element_ty
            K_WHOLE: tl.constexpr = HEAD_DIM_K == BLOCK_K
            V_WHOLE: tl.constexpr = HEAD_DIM_V % BLOCK_V == 0 and RESULT != "transition"
            # Tiles are read at a scalar address plus offsets that no step changes.
            k_offsets = offs_c[:, None] * k_stride_t.to(tl.int32) + offs_k[None, :]
            w_offsets = offs_c[:, None] * HEAD_DIM_K + offs_k[None, :]
            u_offsets = offs_c[:, None] * HEAD_DIM_V + offs_v[None, :]
            c_offsets = offs_c[:, None] * CHUNK + offs_c[None, :]
            s_offsets = offs_k[:, None] * HEAD_DIM_V + offs_v[None, :]
            rows = head.to(tl.int64) * scratch_tokens + first
            if RESULT == "transition" and FORGET_BITS > 0:
                steps = begin + tl.arange(0, SEGMENT) * CHUNK
                ends = tl.minimum(steps + CHUNK, end) - 1
                decays = tl.load(total_decay + rows + ends, steps < end, other=0.0)
                # Decay of what enters each chunk until the end: falls with the distance from it.
                until_end = tl.sum(decays, 0) - tl.cumsum(decays, 0) + decays
                num_forgotten = tl.sum((until_end < -FORGET_BITS).to(tl.int32), 0)
                if num_forgotten > 0:
                    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
                    begin = tl.where(is_unit, end, begin + (num_forgotten - 1) * CHUNK)
            chunk_start = own * 0
            if RESULT == "states":
                before = _pieces_before(
                    cu_seqlens, tokens_each, sequence, CHUNK, 0, IS_VARLEN, BLOCK_N
                )
                before += begin // CHUNK
                chunk_start = (before.to(tl.int64) * num_v_heads + head) * wide
            for at in tl.range(begin, end, CHUNK, num_stages=NUM_STAGES):
                is_c = offs_c < end - at
                row = rows + at
                token = (first + at).to(tl.int64)
                total = tl.load(total_decay + row + offs_c, is_c, other=0.0)
                last = tl.load(total_decay + rows + tl.minimum(at + CHUNK, end) - 1)
                k_start = k + token * k_stride_t + qk_head * k_stride_h
                k_tile = _load_tile(k_start, k_offsets, is_c, is_k, K_WHOLE)
                rounded = state.to(element)
                if RESULT == "states":
                    target = chunk_state + chunk_start + s_offsets
                    tl.store(target, rounded, is_state)
                    chunk_start += num_v_heads * wide
                if FORM == "wy":
                    w_tile = _load_tile(w + row * HEAD_DIM_K, w_offsets, is_c, is_k, K_WHOLE)
                    u_tile = _load_tile(u + row * HEAD_DIM_V, u_offsets, is_c, is_value, V_WHOLE)
                    error = u_tile - tl.dot(w_tile, rounded, input_precision=PRECISION)
                else:
                    a_tile = _load_tile(inverse + row * CHUNK, c_offsets, is_c, is_c, True)
                    v_start = v + token * v_stride_t + head.to(tl.int64) * v_stride_h
                    v_offsets = offs_c[:, None] * v_stride_t.to(tl.int32) + offs_v[None, :]
                    v_tile = _load_tile(v_start, v_offsets, is_c, is_value, V_WHOLE)
                    known = tl.dot(k_tile, rounded, input_precision=PRECISION)
                    wrong = v_tile - tl.exp2(total)[:, None] * known
                    error = tl.dot(a_tile, wrong.to(element), input_precision=PRECISION)
                if RESULT == "states":
                    target = errors + row * HEAD_DIM_V + u_offsets
                    tl.store(target, error.to(element), is_c[:, None] & is_v[None, :])
                if RESULT == "output":
                    q_start = q + token * q_stride_t + qk_head * q_stride_h
                    q_offsets = offs_c[:, None] * q_stride_t.to(tl.int32) + offs_k[None, :]
                    q_tile = _load_tile(q_start, q_offsets, is_c, is_k, K_WHOLE)
                    result = tl.dot(q_tile, rounded, input_precision=PRECISION)
                    result = result * (tl.exp2(total) * scale)[:, None]
                    if HAS_SCORES:
                        p_tile = _load_tile(scores + row * CHUNK, c_offsets, is_c, is_c, True)
                    else:
                        p = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                        is_lower = (offs_c[:, None] >= offs_c[None, :]) & is_c[:, None]
                        difference = total[:, None] - total[None, :]
                        decay = tl.exp2(tl.where(is_lower, difference, float("-inf")))
                        p_tile = (p * decay * scale).to(element)
                    result = tl.dot(p_tile, error.to(element), result, input_precision=PRECISION)
                    out_start = out + token * out_stride_t + head.to(tl.int64) * out_stride_h
                    out_offsets = offs_c[:, None] * out_stride_t.to(tl.int32) + offs_v[None, :]
                    is_out = is_c[:, None] & is_v[None, :]
                    tl.store(out_start + out_offsets, result.to(element), is_out)
                left = tl.where(is_c, tl.exp2(last - total), 0.0)
                decayed = (error * left[:, None]).to(element)
                state = state * tl.exp2(last)
                state = tl.dot(tl.trans(k_tile), decayed, state, input_precision=PRECISION)
            if RESULT == "transition":
                both: tl.constexpr = HEAD_DIM_K * (HEAD_DIM_V + HEAD_DIM_K)
                target = (segment.to(tl.int64) * num_v_heads + head) * both
                columns = tl.where(is_unit, HEAD_DIM_V + offs_v, offs_v)
                target += offs_k[:, None] * (HEAD_DIM_V + HEAD_DIM_K) + columns[None, :]
                tl.store(segment_state + target, state, is_state)
            elif HAS_FINAL_STATE:
                is_kept = (offs_k < tl.where(is_last, HEAD_DIM_K, 0))[:, None] & is_v[None, :]
                tl.store(final_state + own + state_offsets, state, is_kept)


@triton.jit
def gdn_chunk_scan_kernel(
    q,
    k,
    v,
    cu_seqlens,
    total_decay,
    inverse,
    w,
    u,
    scores,
    initial_state,
    entry_state,
    chunk_state,
    errors,
    out,
    final_state,
    scale,
    num_sequences,
    tokens_each,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    out_stride_t,
    out_stride_h,
    scratch_tokens,
    num_heads,
    num_v_heads,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORM: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    RESULT: tl.constexpr,
    ORDER: tl.constexpr,
    STATE_LAYOUT: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    HAS_FINAL_STATE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Carries the state along segments, each from a state that is known.

    RESULT "states": stores S at each chunk's start (``chunk_state``) and e (``errors``).
    RESULT "output": stores scale 2^G (q S) + tril(q k^T Gamma) scale e (``out``). Both: the state
    behind the sequence. Segments behind a sequence's first start from ``entry_state``. ORDER
    "longest": programs of long sequences come first where sequences are not cut.
    """
    _scan(
        q,
        k,
        v,
        cu_seqlens,
        total_decay,
        inverse,
        w,
        u,
        scores,
        initial_state,
        entry_state,
        chunk_state,
        errors,
        entry_state,
        out,
        final_state,
        scale,
        num_sequences,
        tokens_each,
        q_stride_t,
        q_stride_h,
        k_stride_t,
        k_stride_h,
        v_stride_t,
        v_stride_h,
        out_stride_t,
        out_stride_h,
        scratch_tokens,
        num_heads,
        num_v_heads,
        HEAD_DIM_K,
        HEAD_DIM_V,
        CHUNK,
        SEGMENT,
        BLOCK_K,
        BLOCK_V,
        BLOCK_N,
        FORM,
        HAS_SCORES,
        RESULT,
        ORDER,
        0,
        STATE_LAYOUT,
        HAS_INITIAL_STATE,
        HAS_FINAL_STATE,
        IS_VARLEN,
        PRECISION,
        NUM_STAGES,
    )


@triton.jit
def gdn_chunk_transition_kernel(
    k,
    v,
    cu_seqlens,
    total_decay,
    inverse,
    w,
    u,
    initial_state,
    segment_state,
    num_sequences,
    tokens_each,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    scratch_tokens,
    num_heads,
    num_v_heads,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORM: tl.constexpr,
    FORGET_BITS: tl.constexpr,
    STATE_LAYOUT: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Finds what each segment makes of the state that enters it: M S + B.

    ``segment_state`` gets B, the state behind the segment from a state of 0 (the sequence's first
    segment: from the initial state), and behind it M, what the segment makes of the unit matrix,
    which is the same recurrence with v = 0. FORGET_BITS > 0: what decays to less than
    2^-FORGET_BITS of itself until the segment's end counts as forgotten.
    """
    _scan(
        k,
        k,
        v,
        cu_seqlens,
        total_decay,
        inverse,
        w,
        u,
        segment_state,
        initial_state,
        segment_state,
        segment_state,
        segment_state,
        segment_state,
        segment_state,
        segment_state,
        0.0,
        num_sequences,
        tokens_each,
        0,
        0,
        k_stride_t,
        k_stride_h,
        v_stride_t,
        v_stride_h,
        0,
        0,
        scratch_tokens,
        num_heads,
        num_v_heads,
        HEAD_DIM_K,
        HEAD_DIM_V,
        CHUNK,
        SEGMENT,
        BLOCK_K,
        BLOCK_V,
        BLOCK_N,
        FORM,
        False,
        "transition",
        "given",
        FORGET_BITS,
        STATE_LAYOUT,
        HAS_INITIAL_STATE,
        False,
        IS_VARLEN,
        PRECISION,
        NUM_STAGES,
    )
