"""Triton device code of paged decode over an NVFP4 cache: packed codes and one scale a block of 16.

As ``triton_kernel``, with tokens as the rows of both matrix products, so that codes become the
operand whose values stay in registers. Codes of K are read as words of four: word j of a row holds
the codes 4j to 4j + 3, and q k^T is four products, each over one code of every word, with the rows
of q split in the same way. Scales multiply the fp16 values, exactly. ``V_OPERAND`` says how V comes
to its product: ``registers``, in words of four like K, so that no value is stored again (at most
one warp for every 16 words of a row has work); or ``shared``, as a tile of fp16 in shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_kernel import LOG2_E, _logits, _scaled_to_half
from .triton_kernel_merge import store_merged_rows
from .triton_kernel_nvfp4_dequant import eight_columns, four_planes, in_order, value_factor
from .triton_kernel_partition import (
    piece_tokens,
    pieces_of_pair,
    request_of_item,
    span_of,
    stream_start,
)

BLOCK = tl.constexpr(16)
"""Values of a row that share a scale."""


@triton.jit
def _planes_of_query(q_tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``[ROWS, COLUMNS]`` to four ``[COLUMNS / 4, ROWS]``: columns 4j, 4j + 1, 4j + 2, 4j + 3."""
    even, odd = tl.split(tl.reshape(q_tile, (ROWS, COLUMNS // 2, 2)))
    q0, q2 = tl.split(tl.reshape(even, (ROWS, COLUMNS // 4, 2)))
    q1, q3 = tl.split(tl.reshape(odd, (ROWS, COLUMNS // 4, 2)))
    return tl.trans(q0), tl.trans(q1), tl.trans(q2), tl.trans(q3)


@triton.jit
def _along_columns(scales, ROWS: tl.constexpr, BLOCKS: tl.constexpr, REPEAT: tl.constexpr):
    """``[ROWS, BLOCKS]`` e4m3 to ``[ROWS, BLOCKS * REPEAT]`` fp16, each scale REPEAT times."""
    repeated = tl.broadcast_to(scales.to(tl.float16)[:, :, None], (ROWS, BLOCKS, REPEAT))
    return tl.reshape(repeated, (ROWS, BLOCKS * REPEAT))


@triton.jit
def _along_rows(scales, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, REPEAT: tl.constexpr):
    """``[BLOCKS, COLUMNS]`` e4m3 to ``[BLOCKS * REPEAT, COLUMNS]`` fp16."""
    repeated = tl.broadcast_to(scales.to(tl.float16)[:, None, :], (BLOCKS, REPEAT, COLUMNS))
    return tl.reshape(repeated, (BLOCKS * REPEAT, COLUMNS))


@triton.jit
def _joined_planes(a0, a1, a2, a3, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Four ``[COLUMNS / 4, ROWS]`` to ``[ROWS, COLUMNS]``: the inverse of ``_planes_of_query``."""
    planes = tl.join(tl.join(a0, a2), tl.join(a1, a3))
    return tl.reshape(tl.permute(planes, (1, 0, 2, 3)), (ROWS, COLUMNS))


@triton.jit
def _attend_piece(
    pools,
    table,
    splits,
    result,
    options,
    piece,
    TABLE: tl.constexpr,
    SPLIT: tl.constexpr,
    RESULT: tl.constexpr,
    LOGITS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Attention of a pair over tokens ``begin`` to ``end``; the result or a partial result.

    ``piece`` is (request, pair, first token of the pair's span, begin, end, tokens of the request,
    slot, is alone). The sinks count in the piece that begins the span.
    """
    q, k, v, k_scales, v_scales, arrivals, q_strides, code_strides, scale_strides = pools
    indptr, indices, _, table_stride, window_left = table
    out, lse, partial_out, partial_lse, lse_factor, out_stride_t, out_stride_h = result
    sinks, alibi_slopes, k_scale, v_scale, logit_scale, out_scale, cap_log2 = options
    request, pair, first, begin, end, tokens, slot, is_alone = piece
    MERGE: tl.constexpr = OPTIONS[0]
    PREFETCH_PAGES: tl.constexpr = OPTIONS[1]
    KV_EVICTION: tl.constexpr = OPTIONS[2]
    SAME_STRIDES: tl.constexpr = OPTIONS[3]
    SCALES_ON_DEVICE: tl.constexpr = OPTIONS[4]
    HAS_SINKS: tl.constexpr = OPTIONS[5]
    DEQUANT: tl.constexpr = OPTIONS[6]
    V_IN_REGISTERS: tl.constexpr = OPTIONS[7] == "registers"
    NUM_QO_HEADS: tl.constexpr = RESULT[0]
    GROUP_SIZE: tl.constexpr = RESULT[1]
    QUERY_LEN: tl.constexpr = RESULT[2]
    BLOCK_M: tl.constexpr = RESULT[3]
    HEAD_DIM: tl.constexpr = RESULT[4]
    PADDED_DIM: tl.constexpr = RESULT[5]
    PAGE_SIZE: tl.constexpr = TABLE[0]
    BLOCK_N: tl.constexpr = SPLIT[1]
    ROW_TILES: tl.constexpr = (GROUP_SIZE * QUERY_LEN + BLOCK_M - 1) // BLOCK_M
    ROWS: tl.constexpr = BLOCK_M if BLOCK_M > 8 else 8
    # Partial results that a block holds at once in a merge: 8192 values.
    AT_ONCE: tl.constexpr = 8192 // (RESULT[6] * PADDED_DIM)
    MERGE_ROWS: tl.constexpr = max(1, min(BLOCK_M, AT_ONCE))
    BLOCKS: tl.constexpr = PADDED_DIM // BLOCK
    WORDS: tl.constexpr = PADDED_DIM // 4

    offs_m = tl.arange(0, ROWS)
    offs_d = tl.arange(0, PADDED_DIM)
    row = (pair % ROW_TILES) * BLOCK_M + offs_m
    is_row = (offs_m < BLOCK_M) & (row < GROUP_SIZE * QUERY_LEN)
    is_dim = offs_d < HEAD_DIM
    kv_head = pair // ROW_TILES
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    q_row = request * QUERY_LEN + row // GROUP_SIZE
    query = tokens - QUERY_LEN + row // GROUP_SIZE

    if TABLE[1]:
        pages = indices + request.to(tl.int64) * table_stride
    else:
        pages = indices + tl.load(indptr + request)
    wide_head = kv_head.to(tl.int64)
    k_stride_page, k_stride_token, k_stride_head = code_strides[0]
    v_stride_page, v_stride_token, v_stride_head = code_strides[1]
    ks_stride_page, ks_stride_token, ks_stride_head = scale_strides[0]
    vs_stride_page, vs_stride_token, vs_stride_head = scale_strides[1]
    # Strides of codes are bytes; loads are of words of two bytes, or four.
    k_head = k.to(tl.pointer_type(tl.uint16)) + wide_head * (k_stride_head // 2)
    k_page, k_token = k_stride_page // 2, k_stride_token // 2
    if V_IN_REGISTERS:
        v_head = v.to(tl.pointer_type(tl.uint16)) + wide_head * (v_stride_head // 2)
        v_page, v_token = v_stride_page // 2, v_stride_token // 2
    else:
        v_head = v.to(tl.pointer_type(tl.uint32)) + wide_head * (v_stride_head // 4)
        v_page, v_token = v_stride_page // 4, v_stride_token // 4
    # Strides of scales count rows of them, and rows are aligned: one load takes what it can of one.
    ROW_SCALES: tl.constexpr = HEAD_DIM // BLOCK
    ALIGNMENT: tl.constexpr = ROW_SCALES & -ROW_SCALES
    ks_head = k_scales + wide_head * (ks_stride_head * ROW_SCALES)
    vs_head = v_scales + wide_head * (vs_stride_head * ROW_SCALES)
    ks_head = tl.multiple_of(ks_head, ALIGNMENT)
    vs_head = tl.multiple_of(vs_head, ALIGNMENT)
    q_rows = q + q_row.to(tl.int64) * q_strides[0] + head * q_strides[1]
    q_mask = is_row[:, None] & is_dim[None, :]
    q_tile = tl.load(q_rows[:, None] + offs_d[None, :], q_mask, other=0.0)
    row_scale = tl.full([ROWS], 1.0, tl.float32) * (logit_scale * value_factor(DEQUANT))
    out_scale = out_scale * value_factor(DEQUANT)
    if SCALES_ON_DEVICE:
        row_scale *= tl.load(k_scale)
        out_scale *= tl.load(v_scale)
    q_tile, undo = _scaled_to_half(q_tile)
    row_scale *= undo
    q0, q1, q2, q3 = _planes_of_query(q_tile, ROWS, PADDED_DIM)
    slope_log2 = row_scale
    if LOGITS[4]:
        slope_log2 = tl.load(alibi_slopes + head, is_row, other=0.0) * LOG2_E
    query, row_scale, slope_log2 = query[None, :], row_scale[None, :], slope_log2[None, :]

    m = tl.full([ROWS], -float("inf"), tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, is_row, other=0.0) * LOG2_E
        has_sink = (sink > -float("inf")) & (begin == first)
        m = tl.where(has_sink, sink, m)
        den = tl.where(has_sink, 1.0, den)
    if V_IN_REGISTERS:
        acc0 = tl.zeros([WORDS, ROWS], tl.float32)
        acc1 = tl.zeros([WORDS, ROWS], tl.float32)
        acc2 = tl.zeros([WORDS, ROWS], tl.float32)
        acc3 = tl.zeros([WORDS, ROWS], tl.float32)
    else:
        acc = tl.zeros([PADDED_DIM, ROWS], tl.float32)

    words = tl.arange(0, WORDS)
    long_words = tl.arange(0, PADDED_DIM // 8)
    blocks = tl.arange(0, BLOCKS)
    if PREFETCH_PAGES:
        offs_n = begin + tl.arange(0, BLOCK_N)
        next_page = tl.load(pages + offs_n // PAGE_SIZE, offs_n < end, other=0)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        is_token = token < end
        if PREFETCH_PAGES:
            # The index of the next tile is on its way while this tile is computed.
            page = next_page
            ahead = token + BLOCK_N
            next_page = tl.load(pages + ahead // PAGE_SIZE, ahead < end, other=0)
        else:
            page = tl.load(pages + token // PAGE_SIZE, is_token, other=0)
        # 64 bits: a pool may hold more than 2^31 elements.
        page = page.to(tl.int64)
        inside = token % PAGE_SIZE
        k_row = page * k_page + inside * k_token
        v_row = page * v_page + inside * v_token
        if SAME_STRIDES:
            v_row = k_row if V_IN_REGISTERS else k_row // 2
        ks_row = (page * ks_stride_page + inside * ks_stride_token) * ROW_SCALES
        vs_row = (page * vs_stride_page + inside * vs_stride_token) * ROW_SCALES
        tokens_of_k = is_token[:, None]
        word_mask, block_mask = tokens_of_k, tokens_of_k
        if HEAD_DIM != PADDED_DIM:
            word_mask = tokens_of_k & (words < HEAD_DIM // 4)[None, :]
            block_mask = tokens_of_k & (blocks < ROW_SCALES)[None, :]
        k_words = tl.load(
            (k_head + k_row)[:, None] + words[None, :],
            word_mask,
            other=0,
            eviction_policy=KV_EVICTION,
        )
        k_factors = tl.load(
            (ks_head + ks_row)[:, None] + blocks[None, :],
            block_mask,
            other=0.0,
            eviction_policy=KV_EVICTION,
        )
        k0, k1, k2, k3 = four_planes(k_words, DEQUANT)
        factors = _along_columns(k_factors, BLOCK_N, BLOCKS, BLOCK // 4)
        dots = tl.dot(k0 * factors, q0)
        dots = tl.dot(k1 * factors, q1, dots)
        dots = tl.dot(k2 * factors, q2, dots)
        dots = tl.dot(k3 * factors, q3, dots)
        x = _logits(
            dots,
            token[:, None],
            is_token[:, None],
            query,
            row_scale,
            slope_log2,
            cap_log2,
            window_left,
            LOGITS,
        )
        m_new = tl.maximum(m, tl.max(x, 0))
        m_safe = m_new
        if QUERY_LEN > 1:
            m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row may see nothing yet
        rescale = tl.exp2(m - m_safe)
        p = tl.exp2(x - m_safe[None, :])
        den = den * rescale + tl.sum(p, 0)
        m = m_new
        p = p.to(tl.float16)
        rescale = rescale[None, :]
        if V_IN_REGISTERS:
            # Loaded as they are multiplied, a word of a row below the other.
            if HEAD_DIM != PADDED_DIM:
                word_mask = is_token[None, :] & (words < HEAD_DIM // 4)[:, None]
                block_mask = is_token[None, :] & (blocks < ROW_SCALES)[:, None]
            else:
                word_mask, block_mask = is_token[None, :], is_token[None, :]
            v_words = tl.load(
                (v_head + v_row)[None, :] + words[:, None],
                word_mask,
                other=0,
                eviction_policy=KV_EVICTION,
            )
            v_factors = tl.load(
                (vs_head + vs_row)[None, :] + blocks[:, None],
                block_mask,
                other=0.0,
                eviction_policy=KV_EVICTION,
            )
            v0, v1, v2, v3 = four_planes(v_words, DEQUANT)
            factors = _along_rows(v_factors, BLOCKS, BLOCK_N, BLOCK // 4)
            acc0 = tl.dot(v0 * factors, p, acc0 * rescale)
            acc1 = tl.dot(v1 * factors, p, acc1 * rescale)
            acc2 = tl.dot(v2 * factors, p, acc2 * rescale)
            acc3 = tl.dot(v3 * factors, p, acc3 * rescale)
        else:
            if HEAD_DIM != PADDED_DIM:
                word_mask = tokens_of_k & (long_words < HEAD_DIM // 8)[None, :]
            v_words = tl.load(
                (v_head + v_row)[:, None] + long_words[None, :],
                word_mask,
                other=0,
                eviction_policy=KV_EVICTION,
            )
            v_factors = tl.load(
                (vs_head + vs_row)[:, None] + blocks[None, :],
                block_mask,
                other=0.0,
                eviction_policy=KV_EVICTION,
            )
            v_tile = eight_columns(v_words, BLOCK_N, PADDED_DIM // 8, DEQUANT)
            v_tile = v_tile * _along_columns(v_factors, BLOCK_N, BLOCKS, BLOCK)
            acc = tl.dot(tl.trans(v_tile), p, acc * rescale)

    if V_IN_REGISTERS:
        acc = _joined_planes(acc0, acc1, acc2, acc3, ROWS, PADDED_DIM)
    else:
        acc = in_order(tl.trans(acc), ROWS, PADDED_DIM, DEQUANT)
    # No token: acc and den are 0, m is -inf; the result is 0 with LSE -inf.
    acc = acc * (out_scale / tl.where(den > 0, den, 1.0))[:, None]
    piece_lse = m + tl.log2(den)
    if is_alone:
        out_rows = out + q_row.to(tl.int64) * out_stride_t + head * out_stride_h
        tl.store(out_rows[:, None] + offs_d[None, :], acc.to(out.dtype.element_ty), q_mask)
        if RESULT[7]:
            tl.store(lse + q_row * NUM_QO_HEADS + head, piece_lse * lse_factor, is_row)
    else:
        part = slot.to(tl.int64) * BLOCK_M + offs_m
        tl.store(partial_out + part[:, None] * HEAD_DIM + offs_d[None, :], acc, q_mask)
        tl.store(partial_lse + part, piece_lse, is_row)
        if MERGE == "last_block":
            slot, distance, count = pieces_of_pair(table, splits, request, pair, TABLE, SPLIT)
            # All threads' stores come before the one atomic, which publishes them.
            tl.debug_barrier()
            arrival = arrivals + request * SPLIT[3] + pair
            if tl.atomic_add(arrival, 1, sem="acq_rel") == count - 1:
                tl.store(arrival, 0)  # ready for the next launch
                for i in range(0, BLOCK_M, MERGE_ROWS):
                    store_merged_rows(
                        result, slot, distance, count, request, pair, i, MERGE_ROWS, RESULT
                    )


@triton.jit
def paged_decode_nvfp4_kernel(
    q,
    k,
    v,
    k_scales,
    v_scales,
    indptr,
    indices,
    lengths,
    out,
    lse,
    partial_out,
    partial_lse,
    arrivals,
    sinks,
    alibi_slopes,
    k_scale,
    v_scale,
    logit_scale,
    out_scale,
    lse_factor,
    cap_log2,
    q_stride_t,
    q_stride_h,
    k_stride_page,
    k_stride_token,
    k_stride_head,
    v_stride_page,
    v_stride_token,
    v_stride_head,
    ks_stride_page,
    ks_stride_token,
    ks_stride_head,
    vs_stride_page,
    vs_stride_token,
    vs_stride_head,
    out_stride_t,
    out_stride_h,
    table_stride,
    window_left,
    batch,
    num_splits,
    split_tokens,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT_RULE: tl.constexpr,
    MERGE: tl.constexpr,
    PREFETCH_PAGES: tl.constexpr,
    KV_EVICTION: tl.constexpr,
    DENSE_TABLE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    SCALES_ON_DEVICE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    STORE_LSE: tl.constexpr,
    PDL: tl.constexpr,
    DEQUANT: tl.constexpr,
    V_OPERAND: tl.constexpr,
):
    """softmax2(q k^T) v of every request over NVFP4 pages, piece by piece.

    Codes are bytes ``[pages, tokens, heads, HEAD_DIM / 2]``, the even value low, scales e4m3
    ``[pages, tokens, heads, HEAD_DIM / 16]``; strides of codes are bytes, of scales rows of scales.
    Grids, pieces, merging and PDL are those of ``paged_decode_kernel``.
    """
    PAIRS: tl.constexpr = (
        NUM_QO_HEADS // GROUP_SIZE * ((GROUP_SIZE * QUERY_LEN + BLOCK_M - 1) // BLOCK_M)
    )
    TABLE: tl.constexpr = (PAGE_SIZE, DENSE_TABLE, QUERY_LEN, HAS_WINDOW)
    SPLIT: tl.constexpr = (SPLIT_RULE, BLOCK_N, BLOCK_B, PAIRS)
    LOGITS: tl.constexpr = (QUERY_LEN, IS_CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI)
    RESULT: tl.constexpr = (
        NUM_QO_HEADS,
        GROUP_SIZE,
        QUERY_LEN,
        BLOCK_M,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_S,
        STORE_LSE,
    )
    OPTIONS: tl.constexpr = (
        MERGE,
        PREFETCH_PAGES,
        KV_EVICTION,
        SAME_STRIDES,
        SCALES_ON_DEVICE,
        HAS_SINKS,
        DEQUANT,
        V_OPERAND,
    )
    q_strides = (q_stride_t, q_stride_h)
    k_strides = (k_stride_page, k_stride_token, k_stride_head)
    v_strides = (v_stride_page, v_stride_token, v_stride_head)
    ks_strides = (ks_stride_page, ks_stride_token, ks_stride_head)
    vs_strides = (vs_stride_page, vs_stride_token, vs_stride_head)
    code_strides, scale_strides = (k_strides, v_strides), (ks_strides, vs_strides)
    pools = (q, k, v, k_scales, v_scales, arrivals, q_strides, code_strides, scale_strides)
    table = (indptr, indices, lengths, table_stride, window_left)
    splits = (batch, num_splits, split_tokens)
    result = (out, lse, partial_out, partial_lse, lse_factor, out_stride_t, out_stride_h)
    options = (sinks, alibi_slopes, k_scale, v_scale, logit_scale, out_scale, cap_log2)
    program = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if SPLIT_RULE == "stream":
        # Pairs fastest here too: blocks side by side read neighbouring heads of the same tokens.
        pair = program % PAIRS
        request, tile, left = stream_start(table, splits, program // PAIRS, TABLE, SPLIT)
        while left > 0:
            first, tokens = span_of(table, request, True, TABLE)
            pair_tiles = tl.maximum(tl.cdiv(tokens - first, BLOCK_N), 1)
            tiles = tl.minimum(pair_tiles - tile, left)
            begin = first + tile * BLOCK_N
            end = tl.minimum(begin + tiles * BLOCK_N, tokens)
            slot = program + request * PAIRS
            is_alone = tiles == pair_tiles
            piece = (request, pair, first, begin, end, tokens, slot, is_alone)
            _attend_piece(
                pools, table, splits, result, options, piece, TABLE, SPLIT, RESULT, LOGITS, OPTIONS
            )
            left -= tiles
            tile = 0
            request += 1
    else:
        pair = program % PAIRS
        item = program // PAIRS
        request, index = request_of_item(table, splits, item, TABLE, SPLIT)
        first, tokens = span_of(table, request, request < batch, TABLE)
        run = piece_tokens(tokens - first, splits, SPLIT)
        count = tl.maximum(tl.cdiv(tokens - first, run), 1)
        if (request >= batch) | (index >= count):
            return
        begin = first + index * run
        end = tl.minimum(begin + run, tokens)
        piece = (request, pair, first, begin, end, tokens, program, count == 1)
        _attend_piece(
            pools, table, splits, result, options, piece, TABLE, SPLIT, RESULT, LOGITS, OPTIONS
        )
