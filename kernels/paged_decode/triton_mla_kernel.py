"""Triton device code of paged MLA decode: attention of one pair's piece to latent rows.

All query heads share one KV head, whose row of HEAD_DIM_V + ROPE_DIM values is read once: all of it
is K, the first HEAD_DIM_V values are V. A tile holds BLOCK_M rows of q, each a query token with a
query head, and BLOCK_N tokens. The softmax is online, in base 2, with fp32 accumulators. Tokens
outside the piece are loaded as zeros, so that NaN in unused cache never reaches the output.
``triton_kernel_partition`` and ``triton_kernel_merge`` say what the tuples hold.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_kernel_partition import (
    piece_tokens,
    pieces_of_pair,
    request_of_item,
    span_of,
    stream_start,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scaled_to_half(latent, rope):
    """(both parts of q as fp16, factor to undo): rows times a power of two, to avoid overflow."""
    latent, rope = latent.to(tl.float32), rope.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(latent), 1), tl.max(tl.abs(rope), 1))
    exponent = tl.where(largest > 0, tl.floor(tl.log2(largest)), 0.0)
    down = tl.exp2(-exponent)[:, None]
    return (latent * down).to(tl.float16), (rope * down).to(tl.float16), tl.exp2(exponent)


@triton.jit
def _tile_rows(kv, stride_page, page, token, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Pointers [BLOCK_N] to the rows of tokens; of one page where PAGE_TILES.

    TILE is (BLOCK_N, HEAD_DIM_V, ROPE_DIM, KV_STRIDE_TOKEN, PAGE_TILES, PREFETCH_PAGES,
    KV_EVICTION). Where a page serves a whole tile, ``token`` is the first and distances are
    constants, which spares a register pair for every row of the tile.
    """
    # 64 bits: a pool may hold more than 2^31 elements.
    row = page.to(tl.int64) * stride_page + (token % PAGE_SIZE).to(tl.int64) * TILE[3]
    rows = kv + row
    if TILE[4]:
        offs_n = tl.arange(0, TILE[0])
        if TILE[0] * TILE[3] < 2**31:
            rows = rows + offs_n * TILE[3]
        else:
            rows = rows + offs_n.to(tl.int64) * TILE[3]
    return rows


@triton.jit
def _tile_scores(
    q_latent,
    q_rope,
    latent_t,
    rope_t,
    token,
    is_token,
    query,
    scale,
    cap_log2,
    window_left,
    m,
    den,
    FORM: tl.constexpr,
    IS_APART: tl.constexpr,
):
    """(weights of a tile, factor of what was summed before, largest logit, denominator).

    Weights are 2^(logit - largest), rounded to q's dtype, 0 where a row does not see a token; the
    denominator sums them before they are rounded. ``query`` and ``scale`` broadcast over the rows.
    IS_APART: neither product adds to the other, which would make them a chain; see LOOP_BODY.
    """
    SWAP_AB: tl.constexpr = FORM[0]
    HAS_SOFT_CAP: tl.constexpr = FORM[1]
    IS_CAUSAL: tl.constexpr = FORM[2]
    HAS_WINDOW: tl.constexpr = FORM[3]
    AXIS: tl.constexpr = 0 if SWAP_AB else 1
    if SWAP_AB:
        x = tl.dot(tl.trans(rope_t), tl.trans(q_rope))
        if IS_APART:
            x = tl.dot(tl.trans(latent_t), tl.trans(q_latent)) * scale + x * scale
        else:
            x = tl.dot(tl.trans(latent_t), tl.trans(q_latent), x) * scale
        token, is_seen = token[:, None], is_token[:, None]
    else:
        x = tl.dot(q_rope, rope_t)
        if IS_APART:
            x = tl.dot(q_latent, latent_t) * scale + x * scale
        else:
            x = tl.dot(q_latent, latent_t, x) * scale
        token, is_seen = token[None, :], is_token[None, :]
    if HAS_SOFT_CAP:
        # tanh(y) = 1 - 2 / (e^2y + 1) is right at both ends.
        x = cap_log2 * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))
    if IS_CAUSAL:
        is_seen = is_seen & (token <= query)
    if HAS_WINDOW:
        is_seen = is_seen & (token >= query - window_left)
    x = tl.where(is_seen, x, -float("inf"))
    m_new = tl.maximum(m, tl.max(x, AXIS))
    m_safe = m_new
    if IS_CAUSAL or HAS_WINDOW:
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row may see nothing yet
    rescale = tl.exp2(m - m_safe)
    p = tl.exp2(x - (m_safe[None, :] if SWAP_AB else m_safe[:, None]))
    return p.to(q_latent.dtype), rescale, m_new, den * rescale + tl.sum(p, AXIS)


@triton.jit
def _add_tile(acc, p, rescale, latent, SWAP_AB: tl.constexpr):
    """The accumulator with a tile's values added."""
    if SWAP_AB:
        acc = tl.dot(tl.trans(latent), p, acc * rescale[None, :])
    else:
        acc = tl.dot(p, latent, acc * rescale[:, None])
    return acc


@triton.jit
def _merge_tile(
    result, slot, distance, count, request, row_tile, MERGE_ROWS: tl.constexpr, RESULT: tl.constexpr
):
    """Merges and writes the rows of a tile, MERGE_ROWS at a time.

    As ``merged_row``, with the weights first: the loads of the values then depend on nothing.
    """
    out, lse, partial_out, partial_lse, lse_factor, out_stride_t, out_stride_h = result
    NUM_ROWS: tl.constexpr = RESULT[0] * RESULT[2]
    BLOCK_M: tl.constexpr = RESULT[3]
    HEAD_DIM_V: tl.constexpr = RESULT[4]
    BLOCK_S: tl.constexpr = RESULT[6]
    offs_v = tl.arange(0, HEAD_DIM_V)
    for first_row in range(0, BLOCK_M, MERGE_ROWS):
        row_in_tile = first_row + tl.arange(0, MERGE_ROWS)
        row = row_tile * BLOCK_M + row_in_tile
        is_row = row < NUM_ROWS
        m = tl.full([MERGE_ROWS], -float("inf"), tl.float32)
        den = tl.zeros([MERGE_ROWS], tl.float32)
        for s0 in range(0, count, BLOCK_S):
            piece = s0 + tl.arange(0, BLOCK_S)
            index = (slot + piece * distance).to(tl.int64)[None, :] * BLOCK_M + row_in_tile[:, None]
            is_part = is_row[:, None] & (piece < count)[None, :]
            # .cg: another multiprocessor wrote these; the first-level cache must not answer.
            part_lse = tl.load(
                partial_lse + index, is_part, other=-float("inf"), cache_modifier=".cg"
            )
            m_new = tl.maximum(m, tl.max(part_lse, 1))
            m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
            den = den * tl.exp2(m - m_safe) + tl.sum(tl.exp2(part_lse - m_safe[:, None]), 1)
            m = m_new
        total = m + tl.log2(den)
        shift = tl.where(total == -float("inf"), 0.0, total)
        acc = tl.zeros([MERGE_ROWS, HEAD_DIM_V], tl.float32)
        for piece in range(count):
            index = (slot + piece * distance).to(tl.int64) * BLOCK_M + row_in_tile
            part_lse = tl.load(
                partial_lse + index, is_row, other=-float("inf"), cache_modifier=".cg"
            )
            part = tl.load(
                partial_out + index[:, None] * HEAD_DIM_V + offs_v[None, :],
                is_row[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += part * tl.exp2(part_lse - shift)[:, None]
        token = request * RESULT[2] + row // RESULT[0]
        rows = out + token.to(tl.int64) * out_stride_t + (row % RESULT[0]) * out_stride_h
        tl.store(rows[:, None] + offs_v[None, :], acc.to(out.dtype.element_ty), is_row[:, None])
        if RESULT[7]:
            tl.store(lse + request.to(tl.int64) * NUM_ROWS + row, total * lse_factor, is_row)


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
    TILE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Attention of a pair over tokens ``begin`` to ``end``; the result or a partial result.

    ``piece`` is (request, pair, first token of the pair's span, begin, end, tokens of the request,
    slot, is alone). The sinks count in the piece that begins the span.

    LOOP_BODY says how the loop is written, not what it computes. Triton's pipeliner puts a branch
    that nothing else waits for after the loads of later tiles: with "branch" these are under way
    while a tile is computed, with "flat" they follow it. With "two_branches" the product with K is
    in one of its own, and Triton does not see that its result feeds another product: else it gives
    every warp group of 64 rows all scores, computed twice (Triton 3.9, sm_90). Both conditions are
    true always, and written in two ways so that they are not taken for one.
    """
    q, kv, arrivals, q_stride_t, q_stride_h, kv_stride_page = pools
    indptr, indices, _, table_stride, window_left = table
    out, lse, partial_out, partial_lse, lse_factor, out_stride_t, out_stride_h = result
    sinks, k_scale, v_scale, logit_scale, out_scale, cap_log2 = options
    request, pair, first, begin, end, tokens, slot, is_alone = piece
    MERGE: tl.constexpr = OPTIONS[0]
    SWAP_AB: tl.constexpr = OPTIONS[1]
    SCALES_ON_DEVICE: tl.constexpr = OPTIONS[2]
    HAS_SINKS: tl.constexpr = OPTIONS[3]
    HAS_SOFT_CAP: tl.constexpr = OPTIONS[4]
    QUERY_LEN: tl.constexpr = RESULT[2]
    IS_CAUSAL: tl.constexpr = OPTIONS[5] and QUERY_LEN > 1
    HAS_WINDOW: tl.constexpr = TABLE[3] and QUERY_LEN > 1
    NUM_QO_HEADS: tl.constexpr = RESULT[0]
    BLOCK_M: tl.constexpr = RESULT[3]
    HEAD_DIM_V: tl.constexpr = RESULT[4]
    PAGE_SIZE: tl.constexpr = TABLE[0]
    BLOCK_N: tl.constexpr = TILE[0]
    PREFETCH_PAGES: tl.constexpr = TILE[5]
    IS_8_BIT: tl.constexpr = kv.dtype.element_ty.primitive_bitwidth == 8
    LOOP_BODY: tl.constexpr = OPTIONS[7]
    FORM: tl.constexpr = (SWAP_AB, HAS_SOFT_CAP, IS_CAUSAL, HAS_WINDOW)

    row = pair * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < NUM_QO_HEADS * QUERY_LEN
    head = row % NUM_QO_HEADS
    query = tokens - QUERY_LEN + row // NUM_QO_HEADS
    q_row = request * QUERY_LEN + row // NUM_QO_HEADS
    offs_v = tl.arange(0, HEAD_DIM_V)[None, :]
    offs_r = HEAD_DIM_V + tl.arange(0, TILE[2])[None, :]
    q_rows = (q + q_row.to(tl.int64) * q_stride_t + head * q_stride_h)[:, None]
    q_latent = tl.load(q_rows + offs_v, is_row[:, None], other=0.0)
    q_rope = tl.load(q_rows + offs_r, is_row[:, None], other=0.0)
    scale = tl.full([BLOCK_M], 1.0, tl.float32) * logit_scale
    if SCALES_ON_DEVICE:
        scale *= tl.load(k_scale)
        out_scale *= tl.load(v_scale)
    if IS_8_BIT:
        # 8-bit values are exact in fp16, and one instruction away from it on Hopper.
        q_latent, q_rope, undo = _scaled_to_half(q_latent, q_rope)
        scale *= undo
    if SWAP_AB:
        query, scale = query[None, :], scale[None, :]
    else:
        query, scale = query[:, None], scale[:, None]

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, is_row, other=0.0) * LOG2_E
        has_sink = (sink > -float("inf")) & (begin == first)
        m = tl.where(has_sink, sink, m)
        den = tl.where(has_sink, 1.0, den)
    if SWAP_AB:
        acc = tl.zeros([HEAD_DIM_V, BLOCK_M], tl.float32)
        p = tl.zeros([BLOCK_N, BLOCK_M], q_latent.dtype)
    else:
        acc = tl.zeros([BLOCK_M, HEAD_DIM_V], tl.float32)
        p = tl.zeros([BLOCK_M, BLOCK_N], q_latent.dtype)

    if TABLE[1]:
        pages = indices + request.to(tl.int64) * table_stride
    else:
        pages = indices + tl.load(indptr + request)
    offs_n = tl.arange(0, BLOCK_N)
    if PREFETCH_PAGES:
        ahead = begin if TILE[4] else begin + offs_n
        next_page = tl.load(pages + ahead // PAGE_SIZE, ahead < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=OPTIONS[8]):
        token = start + offs_n
        is_token = token < end
        looked_up = start if TILE[4] else token
        if PREFETCH_PAGES:
            # The page ids of the next tile are on their way while this tile is computed.
            page = next_page
            ahead = looked_up + BLOCK_N
            next_page = tl.load(pages + ahead // PAGE_SIZE, ahead < end, other=0)
        else:
            page = tl.load(pages + looked_up // PAGE_SIZE, looked_up < end, other=0)
        rows = _tile_rows(kv, kv_stride_page, page, looked_up, PAGE_SIZE, TILE)[:, None]
        latent = tl.load(rows + offs_v, is_token[:, None], other=0.0, eviction_policy=TILE[6])
        rope = tl.load(rows + offs_r, is_token[:, None], other=0.0, eviction_policy=TILE[6])
        latent, rope = latent.to(q_latent.dtype), rope.to(q_latent.dtype)
        # Outside the branches, or the tile would be held once more for them.
        latent_t, rope_t = tl.trans(latent), tl.trans(rope)
        tile = (latent_t, rope_t, token, is_token, query, scale, cap_log2, window_left)
        if LOOP_BODY == "flat":
            p, rescale, m, den = _tile_scores(q_latent, q_rope, *tile, m, den, FORM, False)
            acc = _add_tile(acc, p, rescale, latent, SWAP_AB)
        elif start < end:
            if LOOP_BODY == "branch":
                p, rescale, m, den = _tile_scores(q_latent, q_rope, *tile, m, den, FORM, False)
            else:
                rescale = tl.full([BLOCK_M], 1.0, tl.float32)
                if end > start:
                    p, rescale, m, den = _tile_scores(q_latent, q_rope, *tile, m, den, FORM, True)
            acc = _add_tile(acc, p, rescale, latent, SWAP_AB)

    if SWAP_AB:
        acc = tl.trans(acc)
    # No token: acc and den are 0, m is -inf; the result is 0 with LSE -inf.
    acc = acc * (out_scale / tl.where(den > 0, den, 1.0))[:, None]
    piece_lse = m + tl.log2(den)
    if is_alone:
        out_rows = (out + q_row.to(tl.int64) * out_stride_t + head * out_stride_h)[:, None]
        tl.store(out_rows + offs_v, acc.to(out.dtype.element_ty), is_row[:, None])
        if RESULT[7]:
            tl.store(lse + q_row * NUM_QO_HEADS + head, piece_lse * lse_factor, is_row)
    else:
        part = slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial_out + part[:, None] * HEAD_DIM_V + offs_v, acc, is_row[:, None])
        tl.store(partial_lse + part, piece_lse, is_row)
        if MERGE == "last_block":
            slot, distance, count = pieces_of_pair(table, splits, request, pair, TABLE, SPLIT)
            # All threads' stores come before the one atomic, which publishes them.
            tl.debug_barrier()
            arrival = arrivals + request * SPLIT[3] + pair
            if tl.atomic_add(arrival, 1, sem="acq_rel") == count - 1:
                tl.store(arrival, 0)  # ready for the next launch
                _merge_tile(result, slot, distance, count, request, pair, OPTIONS[6], RESULT)


@triton.jit
def paged_decode_mla_kernel(
    q,
    kv,
    indptr,
    indices,
    lengths,
    out,
    lse,
    partial_out,
    partial_lse,
    arrivals,
    sinks,
    k_scale,
    v_scale,
    logit_scale,
    out_scale,
    lse_factor,
    cap_log2,
    q_stride_t,
    q_stride_h,
    kv_stride_page,
    out_stride_t,
    out_stride_h,
    table_stride,
    window_left,
    batch,
    num_splits,
    split_tokens,
    NUM_QO_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_STRIDE_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    SPLIT_RULE: tl.constexpr,
    MERGE: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    PREFETCH_PAGES: tl.constexpr,
    SWAP_AB: tl.constexpr,
    KV_EVICTION: tl.constexpr,
    LOOP_BODY: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DENSE_TABLE: tl.constexpr,
    SCALES_ON_DEVICE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STORE_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """softmax2(q k^T) v of every request, piece by piece, with v the first part of k.

    ``count`` and ``size``: one program a piece, on one axis, the pairs of a request fastest, so
    that blocks which run side by side read the same tokens. ``stream``: a persistent grid of
    ``num_splits`` programs a pair, which own equal runs of tiles. Pieces of a pair are merged by
    ``merge_kernel`` (MERGE "kernel") or by the block of the pair that arrives last (MERGE
    "last_block"). PAGE_TILES: a tile lies within one page, so one page id serves it; otherwise each
    token looks its page up. PDL: a programmatic dependent launch, whose blocks may be in place
    before the kernel before it has ended; nothing is read until it has.
    """
    PAIRS: tl.constexpr = (NUM_QO_HEADS * QUERY_LEN + BLOCK_M - 1) // BLOCK_M
    TABLE: tl.constexpr = (PAGE_SIZE, DENSE_TABLE, QUERY_LEN, HAS_WINDOW)
    SPLIT: tl.constexpr = (SPLIT_RULE, BLOCK_N, BLOCK_B, PAIRS)
    RESULT: tl.constexpr = (
        NUM_QO_HEADS,
        NUM_QO_HEADS,
        QUERY_LEN,
        BLOCK_M,
        HEAD_DIM_V,
        HEAD_DIM_V,
        BLOCK_S,
        STORE_LSE,
    )
    TILE: tl.constexpr = (
        BLOCK_N,
        HEAD_DIM_V,
        ROPE_DIM,
        KV_STRIDE_TOKEN,
        PAGE_TILES,
        PREFETCH_PAGES,
        KV_EVICTION,
    )
    OPTIONS: tl.constexpr = (
        MERGE,
        SWAP_AB,
        SCALES_ON_DEVICE,
        HAS_SINKS,
        HAS_SOFT_CAP,
        IS_CAUSAL,
        MERGE_ROWS,
        LOOP_BODY,
        NUM_STAGES,
    )
    pools = (q, kv, arrivals, q_stride_t, q_stride_h, kv_stride_page)
    table = (indptr, indices, lengths, table_stride, window_left)
    splits = (batch, num_splits, split_tokens)
    result = (out, lse, partial_out, partial_lse, lse_factor, out_stride_t, out_stride_h)
    options = (sinks, k_scale, v_scale, logit_scale, out_scale, cap_log2)
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
                pools, table, splits, result, options, piece, TABLE, SPLIT, RESULT, TILE, OPTIONS
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
            pools, table, splits, result, options, piece, TABLE, SPLIT, RESULT, TILE, OPTIONS
        )
