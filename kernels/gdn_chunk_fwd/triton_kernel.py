"""Triton device code that prepares chunks: where they lie, their gates, normalised q and k.

Scratch memory is head-major, ``[heads, tokens, ...]``, so that a tile of one head is contiguous.
Decay is kept as its cumulative sum inside the chunk, in fp32 and in base 2; whoever uses it takes
2 to the power of differences that are at most 0, never of the sum's negative.
"""

import triton
import triton.language as tl


@triton.jit
def _locate(
    cu_seqlens,
    num_sequences,
    tokens_each,
    index,
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(sequence, place) of piece ``index`` where each sequence is cut into pieces of UNIT tokens.

    An empty sequence has LEAST pieces, 0 or 1. Behind the last piece: (num_sequences, how many
    pieces behind).
    """
    if IS_VARLEN:
        sequence = 0
        begin = 0
        seen = 0
        for base in range(0, num_sequences, BLOCK_N):
            offs = base + tl.arange(0, BLOCK_N)
            is_in = offs < num_sequences
            starts = tl.load(cu_seqlens + offs, is_in, other=0)
            ends = tl.load(cu_seqlens + offs + 1, is_in, other=0)
            counts = ((ends - starts + (UNIT - 1)) // UNIT).to(tl.int32)
            counts = tl.where(is_in, tl.maximum(counts, LEAST), 0)
            after = seen + tl.cumsum(counts, 0)
            is_before = is_in & (after <= index)
            sequence += tl.sum(is_before.to(tl.int32), 0)
            begin = tl.maximum(begin, tl.max(tl.where(is_before, after, 0), 0))
            seen += tl.sum(counts, 0)
        place = index - begin
    else:
        pieces = tl.maximum((tokens_each + (UNIT - 1)) // UNIT, LEAST)
        sequence = index // pieces
        place = index - sequence * pieces
    return sequence, place


@triton.jit
def _pieces_before(
    cu_seqlens,
    tokens_each,
    sequence,
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Pieces of UNIT tokens in the sequences before this one."""
    if IS_VARLEN:
        total = 0
        for base in range(0, sequence, BLOCK_N):
            offs = base + tl.arange(0, BLOCK_N)
            is_in = offs < sequence
            starts = tl.load(cu_seqlens + offs, is_in, other=0)
            ends = tl.load(cu_seqlens + offs + 1, is_in, other=0)
            counts = ((ends - starts + (UNIT - 1)) // UNIT).to(tl.int32)
            total += tl.sum(tl.where(is_in, tl.maximum(counts, LEAST), 0), 0)
    else:
        total = sequence * tl.maximum((tokens_each + (UNIT - 1)) // UNIT, LEAST)
    return total


@triton.jit
def _by_length(cu_seqlens, num_sequences, rank, BLOCK_N: tl.constexpr):
    """The sequence of that rank, the longest first; beyond BLOCK_N sequences in their order."""
    offs = tl.arange(0, BLOCK_N)
    is_in = offs < num_sequences
    starts = tl.load(cu_seqlens + offs, is_in, other=0)
    ends = tl.load(cu_seqlens + offs + 1, is_in, other=0)
    lengths = tl.where(is_in, (ends - starts).to(tl.int32), -1)
    is_longer = lengths[None, :] > lengths[:, None]
    is_first = (lengths[None, :] == lengths[:, None]) & (offs[None, :] < offs[:, None])
    ranks = tl.sum((is_longer | is_first).to(tl.int32), 1)
    found = tl.sum(tl.where((ranks == rank) & is_in, offs, 0), 0)
    return tl.where(num_sequences <= BLOCK_N, found, rank)


@triton.jit
def _bounds(cu_seqlens, tokens_each, sequence, IS_VARLEN: tl.constexpr):
    """(first token, tokens) of a sequence."""
    if IS_VARLEN:
        first = tl.load(cu_seqlens + sequence).to(tl.int32)
        count = tl.load(cu_seqlens + sequence + 1).to(tl.int32) - first
    else:
        first = sequence * tokens_each
        count = tokens_each
    return first, count


@triton.jit
def gdn_chunk_gate_kernel(
    gate,
    beta,
    a_log,
    dt_bias,
    cu_seqlens,
    table,
    total_decay,
    beta_rows,
    out,
    num_tokens,
    num_sequences,
    tokens_each,
    scratch_tokens,
    out_stride_t,
    out_stride_h,
    num_v_heads,
    HEAD_DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Table = (first token, tokens) of the chunk; total_decay = cumulative log2 decay; beta.

    Grid: chunks, blocks of BLOCK_H value heads. "fused": g = -exp(a_log) softplus(gate + dt_bias),
    softplus linear above 20 as torch has it. A decay below e^-128 is 0 in fp32 in any case, so g is
    at least -128: that keeps the sum precise behind a reset. Chunks that the grid has and the
    sequences have not zero the rows of ``out`` behind the last sequence.
    """
    chunk = tl.program_id(0)
    head_block = tl.program_id(1)
    sequence, place = _locate(
        cu_seqlens, num_sequences, tokens_each, chunk, CHUNK, 0, IS_VARLEN, BLOCK_N
    )
    offs_c = tl.arange(0, CHUNK)
    heads = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < num_v_heads
    if sequence >= num_sequences:
        if head_block == 0:
            tl.store(table + 2 * chunk, 0)
            tl.store(table + 2 * chunk + 1, 0)
        end = num_tokens
        if IS_VARLEN:
            end = tl.load(cu_seqlens + num_sequences).to(tl.int32)
        rows = end + place * CHUNK + offs_c
        row = out + rows.to(tl.int64)[:, None] * out_stride_t
        offs_v = tl.arange(0, BLOCK_V)
        zeros = tl.zeros([CHUNK, BLOCK_V], out.dtype.element_ty)
        for head in range(
            head_block * BLOCK_H, tl.minimum(num_v_heads, head_block * BLOCK_H + BLOCK_H)
        ):
            for v0 in range(0, HEAD_DIM_V, BLOCK_V):
                cols = v0 + offs_v
                mask = (rows < num_tokens)[:, None] & (cols < HEAD_DIM_V)[None, :]
                tl.store(row + head * out_stride_h + cols[None, :], zeros, mask)
    else:
        first, count = _bounds(cu_seqlens, tokens_each, sequence, IS_VARLEN)
        first += place * CHUNK
        count = tl.minimum(CHUNK, count - place * CHUNK)
        if head_block == 0:
            tl.store(table + 2 * chunk, first)
            tl.store(table + 2 * chunk + 1, count)
        mask = (offs_c < count)[:, None] & is_head[None, :]
        token = (first + offs_c).to(tl.int64)[:, None]
        source = token * num_v_heads + heads[None, :]
        target = heads.to(tl.int64)[None, :] * scratch_tokens + token
        g = tl.load(gate + source, mask, other=0.0).to(tl.float32)
        if GATE == "fused":
            x = g + tl.load(dt_bias + heads, is_head, other=0.0)[None, :]
            softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
            g = -tl.exp(tl.load(a_log + heads, is_head, other=0.0))[None, :] * softplus
        # ln 2 in the base change; rows behind the chunk's end are not stored.
        g = tl.maximum(g, -128.0) * 1.4426950408889634
        tl.store(total_decay + target, tl.cumsum(g, 0), mask)
        b = tl.load(beta + source, mask, other=0.0).to(tl.float32)
        if BETA == "sigmoid":
            b = BETA_SCALE / (1.0 + tl.exp(-b))
        tl.store(beta_rows + target, b, mask)


@triton.jit
def gdn_chunk_norm_kernel(
    x,
    normalised,
    num_rows,
    stride_t,
    stride_h,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """X / sqrt(sum x^2 + 1e-6), in fp32, of BLOCK_R rows; a row is a token and a head."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    source = (rows // num_heads) * stride_t + (rows % num_heads) * stride_h
    value = tl.load(x + source[:, None] + offs_d[None, :], mask, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 1) + 1e-6)[:, None]
    target = normalised + rows[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(target, value.to(normalised.dtype.element_ty), mask)
