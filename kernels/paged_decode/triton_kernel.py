"""Triton device code of paged decode: attention of one pair's piece over gathered pages.

A tile holds BLOCK_M rows, each a query token with a query head of one KV head, and BLOCK_N tokens.
Tokens are gathered row by row through the page table, so the tile is not bound to the page size.
The softmax is online, in base 2, with fp32 accumulators. Rows outside the piece are loaded as
zeros, so that NaN in unused cache never reaches the output. ``triton_kernel_partition`` and
``triton_kernel_merge`` say what the tuples hold.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_kernel_merge import store_merged_rows
from .triton_kernel_partition import (
    piece_tokens,
    pieces_of_pair,
    request_of_item,
    span_of,
    stream_start,
)

LOG2_E = tl.constexpr(1.4426950408889634)
INVERSE_TWO_PI = tl.constexpr(0.15915494309189535)


@triton.jit
def _sine_and_cosine(turns):
    """Sine and cosine of an angle from -1/2 to 1/2 turns, within 1e-6.

    Taylor series of half the angle, then the doubling formulas: a tenth of the code of the general
    functions, whose range reduction is not needed here.
    """
    x = turns * 3.14159265358979
    y = x * x
    s = -1.0 / 39916800.0 * y + 1.0 / 362880.0
    s = ((s * y - 1.0 / 5040.0) * y + 1.0 / 120.0) * y - 1.0 / 6.0
    s = (s * y + 1.0) * x
    c = (1.0 / 479001600.0 * y - 1.0 / 3628800.0) * y + 1.0 / 40320.0
    c = ((c * y - 1.0 / 720.0) * y + 1.0 / 24.0) * y - 0.5
    c = c * y + 1.0
    return 2.0 * s * c, 1.0 - 2.0 * s * s


@triton.jit
def _rotated(tile, rows, is_row, position, offs_d, rope, HEAD_DIM: tl.constexpr):
    """The tile [positions, dim] rotated by its positions, in fp32.

    ``rope`` is (theta, scale). The other half of each row is read again: it lies in another
    thread's registers.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    is_low = offs_d < HALF
    partner_d = tl.where(is_low, offs_d + HALF, offs_d - HALF)
    is_used = is_row[:, None] & (offs_d < HEAD_DIM)[None, :]
    partner = tl.load(rows[:, None] + partner_d[None, :], is_used, other=0.0).to(tl.float32)
    # In units of 2^-32 turns whole turns drop out of the product, however far the position.
    exponent = (offs_d % HALF).to(tl.float64) * (-2.0 / HEAD_DIM)
    radians = tl.exp2(exponent * tl.log2(tl.zeros_like(exponent) + rope[0])) / rope[1]
    frequency = (radians * (4294967296.0 * INVERSE_TWO_PI) + 0.5).to(tl.int64).to(tl.int32)
    angle = position[:, None] * frequency[None, :]
    sine, cosine = _sine_and_cosine(angle.to(tl.float32) * 2.3283064365386963e-10)
    return tile.to(tl.float32) * cosine + partner * tl.where(is_low[None, :], -sine, sine)


@triton.jit
def _scaled_to_half(q_tile):
    """(q as fp16, factor to undo): rows times a power of two, so that nothing overflows."""
    largest = tl.max(tl.abs(q_tile.to(tl.float32)), 1)
    exponent = tl.where(largest > 0, tl.floor(tl.log2(largest)), 0.0)
    scaled = q_tile.to(tl.float32) * tl.exp2(-exponent)[:, None]
    return scaled.to(tl.float16), tl.exp2(exponent)


@triton.jit
def _logits(dots, token, is_token, query, row_scale, slope_log2, cap_log2, window_left, LOGITS):
    """Base-2 logits of a tile, -inf where a row does not see a token.

    ``query``, ``row_scale`` and ``slope_log2`` belong to the rows of q; all operands broadcast.
    LOGITS is (QUERY_LEN, IS_CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI).
    """
    x = dots * row_scale
    if LOGITS[3]:
        # tanh(y) = 1 - 2 / (e^2y + 1) is right at both ends.
        x = cap_log2 * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))
    if LOGITS[4]:
        x += slope_log2 * (token - query).to(tl.float32)
    is_seen = is_token
    if LOGITS[0] > 1:
        if LOGITS[1]:
            is_seen = is_seen & (token <= query)
        if LOGITS[2]:
            is_seen = is_seen & (token >= query - window_left)
    return tl.where(is_seen, x, -float("inf"))


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
    q, k, v, arrivals, q_strides, k_strides, v_strides = pools
    indptr, indices, _, table_stride, window_left = table
    out, lse, partial_out, partial_lse, lse_factor, out_stride_t, out_stride_h = result
    sinks, alibi_slopes, k_scale, v_scale, logit_scale, out_scale, cap_log2, rope = options
    request, pair, first, begin, end, tokens, slot, is_alone = piece
    MERGE: tl.constexpr = OPTIONS[0]
    PREFETCH_PAGES: tl.constexpr = OPTIONS[1]
    SWAP_AB: tl.constexpr = OPTIONS[2]
    KV_EVICTION: tl.constexpr = OPTIONS[3]
    SAME_STRIDES: tl.constexpr = OPTIONS[4]
    SCALES_ON_DEVICE: tl.constexpr = OPTIONS[5]
    HAS_SINKS: tl.constexpr = OPTIONS[6]
    HAS_ROPE: tl.constexpr = OPTIONS[7]
    NUM_QO_HEADS: tl.constexpr = RESULT[0]
    GROUP_SIZE: tl.constexpr = RESULT[1]
    QUERY_LEN: tl.constexpr = RESULT[2]
    BLOCK_M: tl.constexpr = RESULT[3]
    HEAD_DIM: tl.constexpr = RESULT[4]
    PADDED_DIM: tl.constexpr = RESULT[5]
    PAGE_SIZE: tl.constexpr = TABLE[0]
    BLOCK_N: tl.constexpr = SPLIT[1]
    ROW_TILES: tl.constexpr = (GROUP_SIZE * QUERY_LEN + BLOCK_M - 1) // BLOCK_M
    MIN_ROWS: tl.constexpr = 8 if SWAP_AB else 16
    ROWS: tl.constexpr = BLOCK_M if BLOCK_M > MIN_ROWS else MIN_ROWS
    # Partial results that a block holds at once in a merge: 8192 values.
    AT_ONCE: tl.constexpr = 8192 // (RESULT[6] * PADDED_DIM)
    MERGE_ROWS: tl.constexpr = max(1, min(BLOCK_M, AT_ONCE))
    IS_8_BIT: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8
    AXIS: tl.constexpr = 0 if SWAP_AB else 1

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
    k_head = k + kv_head.to(tl.int64) * k_strides[2]
    v_head = v + kv_head.to(tl.int64) * v_strides[2]
    q_rows = q + q_row.to(tl.int64) * q_strides[0] + head * q_strides[1]
    q_mask = is_row[:, None] & is_dim[None, :]
    q_tile = tl.load(q_rows[:, None] + offs_d[None, :], q_mask, other=0.0)
    if HAS_ROPE:
        q_tile = _rotated(q_tile, q_rows, is_row, query, offs_d, rope, HEAD_DIM)
        q_tile = q_tile.to(q.dtype.element_ty)
    row_scale = tl.full([ROWS], 1.0, tl.float32) * logit_scale
    if SCALES_ON_DEVICE:
        row_scale *= tl.load(k_scale)
        out_scale *= tl.load(v_scale)
    if IS_8_BIT:
        # 8-bit values are exact in fp16, and one instruction away from it on Hopper.
        q_tile, undo = _scaled_to_half(q_tile)
        row_scale *= undo
    slope_log2 = row_scale
    if LOGITS[4]:
        slope_log2 = tl.load(alibi_slopes + head, is_row, other=0.0) * LOG2_E
    if SWAP_AB:
        query, row_scale, slope_log2 = query[None, :], row_scale[None, :], slope_log2[None, :]
    else:
        query, row_scale, slope_log2 = query[:, None], row_scale[:, None], slope_log2[:, None]

    m = tl.full([ROWS], -float("inf"), tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, is_row, other=0.0) * LOG2_E
        has_sink = (sink > -float("inf")) & (begin == first)
        m = tl.where(has_sink, sink, m)
        den = tl.where(has_sink, 1.0, den)
    if SWAP_AB:
        acc = tl.zeros([PADDED_DIM, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)

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
        k_row = page.to(tl.int64) * k_strides[0] + (token % PAGE_SIZE) * k_strides[1]
        v_row = k_row
        if not SAME_STRIDES:
            v_row = page.to(tl.int64) * v_strides[0] + (token % PAGE_SIZE) * v_strides[1]
        mask = is_token[:, None]
        if HEAD_DIM != PADDED_DIM:
            mask = mask & is_dim[None, :]
        k_rows = k_head + k_row
        k_tile = tl.load(
            k_rows[:, None] + offs_d[None, :], mask, other=0.0, eviction_policy=KV_EVICTION
        )
        v_rows = v_head + v_row
        v_tile = tl.load(
            v_rows[:, None] + offs_d[None, :], mask, other=0.0, eviction_policy=KV_EVICTION
        )
        if HAS_ROPE:
            k_tile = _rotated(k_tile, k_rows, is_token, token, offs_d, rope, HEAD_DIM)
        k_tile = k_tile.to(q_tile.dtype)
        v_tile = v_tile.to(q_tile.dtype)
        if SWAP_AB:
            dots = tl.dot(k_tile, tl.trans(q_tile))
            token, is_token = token[:, None], is_token[:, None]
        else:
            dots = tl.dot(q_tile, tl.trans(k_tile))
            token, is_token = token[None, :], is_token[None, :]
        x = _logits(
            dots, token, is_token, query, row_scale, slope_log2, cap_log2, window_left, LOGITS
        )
        m_new = tl.maximum(m, tl.max(x, AXIS))
        m_safe = m_new
        if QUERY_LEN > 1:
            m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row may see nothing yet
        rescale = tl.exp2(m - m_safe)
        if SWAP_AB:
            p = tl.exp2(x - m_safe[None, :])
            acc = tl.dot(tl.trans(v_tile), p.to(v_tile.dtype), acc * rescale[None, :])
        else:
            p = tl.exp2(x - m_safe[:, None])
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None])
        den = den * rescale + tl.sum(p, AXIS)
        m = m_new

    if SWAP_AB:
        acc = tl.trans(acc)
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
def paged_decode_kernel(
    q,
    k,
    v,
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
    rope_theta,
    rope_scale,
    q_stride_t,
    q_stride_h,
    k_stride_page,
    k_stride_token,
    k_stride_head,
    v_stride_page,
    v_stride_token,
    v_stride_head,
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
    SWAP_AB: tl.constexpr,
    KV_EVICTION: tl.constexpr,
    DENSE_TABLE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    SCALES_ON_DEVICE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    STORE_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """softmax2(q k^T) v of every request, piece by piece.

    ``count`` and ``size``: one program a piece, on one axis, the pairs of a request fastest, so
    that blocks which run side by side read neighbouring heads of the same tokens. ``stream``: a
    persistent grid of ``num_splits`` programs a pair, which own equal runs of tiles. Pieces of a
    pair are merged by ``merge_kernel`` (MERGE "kernel") or by the block of the pair that arrives
    last (MERGE "last_block"). PDL: a programmatic dependent launch, whose blocks may be in place
    before the kernel before it has ended; nothing is read until it has.
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
        SWAP_AB,
        KV_EVICTION,
        SAME_STRIDES,
        SCALES_ON_DEVICE,
        HAS_SINKS,
        HAS_ROPE,
    )
    q_strides = (q_stride_t, q_stride_h)
    k_strides = (k_stride_page, k_stride_token, k_stride_head)
    v_strides = (v_stride_page, v_stride_token, v_stride_head)
    pools = (q, k, v, arrivals, q_strides, k_strides, v_strides)
    table = (indptr, indices, lengths, table_stride, window_left)
    splits = (batch, num_splits, split_tokens)
    result = (out, lse, partial_out, partial_lse, lse_factor, out_stride_t, out_stride_h)
    rope = (rope_theta, rope_scale)
    options = (sinks, alibi_slopes, k_scale, v_scale, logit_scale, out_scale, cap_log2, rope)
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
