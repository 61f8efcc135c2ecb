"""Triton device code that joins segments: the state that enters each, one after the other."""

import triton
import triton.language as tl

from .triton_kernel import _bounds, _pieces_before


@triton.jit
def gdn_chunk_stitch_kernel(
    cu_seqlens,
    segment_state,
    entry_state,
    tokens_each,
    num_v_heads,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """entry_state[j + 1] = M_j entry_state[j] + B_j along the segments j of a sequence, fp32.

    B_j and M_j are the columns of ``segment_state``; what the first segment leaves is B_0. Grid:
    blocks of BLOCK_V columns fastest, then value heads, then sequences.
    """
    V_BLOCKS: tl.constexpr = (HEAD_DIM_V + BLOCK_V - 1) // BLOCK_V
    BOTH: tl.constexpr = HEAD_DIM_V + HEAD_DIM_K
    block = tl.program_id(0) % V_BLOCKS
    head = (tl.program_id(0) // V_BLOCKS) % num_v_heads
    sequence = tl.program_id(0) // (V_BLOCKS * num_v_heads)
    _, count = _bounds(cu_seqlens, tokens_each, sequence, IS_VARLEN)
    num_segments = (count + (SEGMENT * CHUNK - 1)) // (SEGMENT * CHUNK)
    if num_segments > 1:
        base = _pieces_before(
            cu_seqlens, tokens_each, sequence, SEGMENT * CHUNK, 1, IS_VARLEN, BLOCK_N
        ).to(tl.int64)
        offs_k = tl.arange(0, BLOCK_K)
        offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
        is_k = offs_k < HEAD_DIM_K
        is_state = is_k[:, None] & (offs_v < HEAD_DIM_V)[None, :]
        added = offs_k[:, None] * BOTH + offs_v[None, :]
        moved = offs_k[:, None] * BOTH + HEAD_DIM_V + offs_k[None, :]
        kept = offs_k[:, None] * HEAD_DIM_V + offs_v[None, :]
        source = segment_state + (base * num_v_heads + head) * (HEAD_DIM_K * BOTH)
        target = entry_state + ((base + 1) * num_v_heads + head) * (HEAD_DIM_K * HEAD_DIM_V)
        state = tl.load(source + added, is_state, other=0.0)
        tl.store(target + kept, state, is_state)
        for _ in tl.range(1, num_segments - 1, num_stages=NUM_STAGES):
            source += num_v_heads * (HEAD_DIM_K * BOTH)
            target += num_v_heads * (HEAD_DIM_K * HEAD_DIM_V)
            m = tl.load(source + moved, is_k[:, None] & is_k[None, :], other=0.0)
            b = tl.load(source + added, is_state, other=0.0)
            state = tl.dot(m, state, b, input_precision=PRECISION)
            tl.store(target + kept, state, is_state)
