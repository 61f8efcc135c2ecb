"""Triton device code of paged decode: split-KV attention over gathered pages, and the merge.

One program owns a tile of query heads of one KV head and a run of tokens of one request. Tokens are
gathered row by row through the page table, so the tile is not bound to the page size. The softmax
is online, in base 2, with fp32 accumulators. Rows past the run are loaded as zeros, so that NaN in
unused cache never reaches the output.
"""

import triton
import triton.language as tl


@triton.jit
def _kv_len(kv_indptr, kv_last_page_len, request, mask, PAGE_SIZE: tl.constexpr):
    """Tokens of the requests (a scalar or a vector of indices); 0 for one without pages."""
    first = tl.load(kv_indptr + request, mask=mask, other=0)
    num_pages = tl.load(kv_indptr + request + 1, mask=mask, other=0) - first
    last = tl.load(kv_last_page_len + request, mask=mask, other=0)
    return tl.where(num_pages > 0, (num_pages - 1) * PAGE_SIZE + last, 0)


@triton.jit
def _split_of_work_item(
    kv_indptr,
    kv_last_page_len,
    work_item,
    batch,
    num_splits,
    split_tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLIT_RULE: tl.constexpr,
):
    """(request, first work item of the request, tokens a split, splits, tokens) of a work item.

    ``count``: every request is cut into ``num_splits`` runs of whole tiles; the work items of a
    request are ``num_splits`` apart and the last ones may be empty. ``size``: runs of
    ``split_tokens``, numbered through all requests without gaps; a request without tokens has one,
    empty. A work item past the last has request == batch.
    """
    if SPLIT_RULE == "size":
        index = tl.arange(0, BLOCK_B)
        lengths = _kv_len(kv_indptr, kv_last_page_len, index, index < batch, PAGE_SIZE)
        splits = tl.where(index < batch, tl.maximum(tl.cdiv(lengths, split_tokens), 1), 0)
        ends = tl.cumsum(splits, 0)
        is_before = (ends <= work_item) & (index < batch)
        request = tl.sum(is_before.to(tl.int32), 0)
        first_item = tl.sum(tl.where(is_before, splits, 0), 0)
        length = tl.sum(tl.where(index == request, lengths, 0), 0)
        run = split_tokens
    else:
        request = work_item // num_splits
        first_item = request * num_splits
        length = _kv_len(kv_indptr, kv_last_page_len, request, request < batch, PAGE_SIZE)
        run = tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N), 1) * BLOCK_N
    count = tl.maximum(tl.cdiv(length, run), 1)
    return request, first_item, run, count, length


@triton.jit
def _merged_head(
    partial_out,
    partial_lse,
    first_item,
    count,
    head,
    NUM_QO_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """(output [HEAD_DIM], base-2 LSE) of one head from its ``count`` partial results.

    o = sum_s 2^(lse_s - lse) o_s, in the order of the splits, so the bits do not depend on which
    block finished last.
    """
    offs_d = tl.arange(0, HEAD_DIM)
    m = -float("inf")
    den = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for s0 in range(0, count, BLOCK_S):
        split = s0 + tl.arange(0, BLOCK_S)
        row = (first_item + split).to(tl.int64) * NUM_QO_HEADS + head
        # .cg: another multiprocessor wrote these, so the first-level cache must not answer.
        lse = tl.load(partial_lse + row, split < count, other=-float("inf"), cache_modifier=".cg")
        part = tl.load(
            partial_out + row[:, None] * HEAD_DIM + offs_d[None, :],
            (split < count)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new)
        rescale = tl.exp2(m - m_new)
        den = den * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(part * weight[:, None], 0)
        m = m_new
    return acc / den, m + tl.log2(den)


@triton.jit
def paged_decode_kernel(
    q,
    k,
    v,
    kv_indptr,
    kv_indices,
    kv_last_page_len,
    out,
    lse,
    partial_out,
    partial_lse,
    arrivals,
    scale_log2,
    q_stride_b,
    q_stride_h,
    kv_stride_page,
    kv_stride_token,
    kv_stride_head,
    out_stride_b,
    out_stride_h,
    batch,
    num_splits,
    split_tokens,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT_RULE: tl.constexpr,
    MERGE: tl.constexpr,
    PREFETCH_PAGES: tl.constexpr,
    SWAP_AB: tl.constexpr,
    KV_EVICTION: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """softmax2(q k^T * scale_log2) v over one run of tokens for BLOCK_H query heads.

    Grid: one axis, head tiles of all KV heads fastest, so that blocks which run side by side read
    neighbouring heads of the same tokens; then work items. The matrix tile has at least 16 rows of
    heads (8 columns when swapped), of which BLOCK_H are real. A request with a single run writes
    its result; otherwise runs write partial results, merged by ``merge_kernel`` (MERGE "kernel")
    or by the block of the request that arrives last (MERGE "last_block").
    """
    TILES_PER_KV_HEAD: tl.constexpr = (GROUP_SIZE + BLOCK_H - 1) // BLOCK_H
    HEAD_TILES: tl.constexpr = NUM_QO_HEADS // GROUP_SIZE * TILES_PER_KV_HEAD
    head_tile = tl.program_id(0) % HEAD_TILES
    work_item = tl.program_id(0) // HEAD_TILES
    request, first_item, run, count, length = _split_of_work_item(
        kv_indptr,
        kv_last_page_len,
        work_item,
        batch,
        num_splits,
        split_tokens,
        PAGE_SIZE,
        BLOCK_N,
        BLOCK_B,
        SPLIT_RULE,
    )
    split = work_item - first_item
    if (request >= batch) | (split >= count):
        return

    MIN_ROWS: tl.constexpr = 8 if SWAP_AB else 16
    ROWS: tl.constexpr = BLOCK_H if BLOCK_H > MIN_ROWS else MIN_ROWS
    kv_head = head_tile // TILES_PER_KV_HEAD
    offs_h = tl.arange(0, ROWS)
    head_in_group = (head_tile % TILES_PER_KV_HEAD) * BLOCK_H + offs_h
    is_head = (offs_h < BLOCK_H) & (head_in_group < GROUP_SIZE)
    head = kv_head * GROUP_SIZE + head_in_group
    offs_d = tl.arange(0, HEAD_DIM)

    begin = split * run
    end = tl.minimum(begin + run, length)
    pages = kv_indices + tl.load(kv_indptr + request)
    k_head = k + kv_head.to(tl.int64) * kv_stride_head
    v_head = v + kv_head.to(tl.int64) * kv_stride_head
    q_rows = q + request.to(tl.int64) * q_stride_b + head * q_stride_h
    q_tile = tl.load(q_rows[:, None] + offs_d[None, :], is_head[:, None], other=0.0)

    m = tl.full([ROWS], -float("inf"), tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    if SWAP_AB:
        acc = tl.zeros([HEAD_DIM, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)

    offs_n = begin + tl.arange(0, BLOCK_N)
    if PREFETCH_PAGES:
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
        row = page.to(tl.int64) * kv_stride_page + (token % PAGE_SIZE) * kv_stride_token
        k_tile = tl.load(
            k_head + row[:, None] + offs_d[None, :],
            is_token[:, None],
            other=0.0,
            eviction_policy=KV_EVICTION,
        )
        v_tile = tl.load(
            v_head + row[:, None] + offs_d[None, :],
            is_token[:, None],
            other=0.0,
            eviction_policy=KV_EVICTION,
        )
        if SWAP_AB:
            x = tl.dot(k_tile, tl.trans(q_tile)) * scale_log2
            x = tl.where(is_token[:, None], x, -float("inf"))
            m_new = tl.maximum(m, tl.max(x, 0))
            p = tl.exp2(x - m_new[None, :])
            rescale = tl.exp2(m - m_new)
            den = den * rescale + tl.sum(p, 0)
            acc = tl.dot(tl.trans(v_tile), p.to(v_tile.dtype), acc * rescale[None, :])
        else:
            x = tl.dot(q_tile, tl.trans(k_tile)) * scale_log2
            x = tl.where(is_token[None, :], x, -float("inf"))
            m_new = tl.maximum(m, tl.max(x, 1))
            p = tl.exp2(x - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            den = den * rescale + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None])
        m = m_new

    if SWAP_AB:
        acc = tl.trans(acc)
    # No token: acc and den are 0, m is -inf; the result is 0 with LSE -inf.
    acc = acc / tl.where(den > 0, den, 1.0)[:, None]
    run_lse = m + tl.log2(den)
    if count == 1:
        out_rows = out + request.to(tl.int64) * out_stride_b + head * out_stride_h
        result = acc.to(out.dtype.element_ty)
        tl.store(out_rows[:, None] + offs_d[None, :], result, is_head[:, None])
        if STORE_LSE:
            tl.store(lse + request * NUM_QO_HEADS + head, run_lse, is_head)
    else:
        part = work_item.to(tl.int64) * NUM_QO_HEADS + head
        tl.store(partial_out + part[:, None] * HEAD_DIM + offs_d[None, :], acc, is_head[:, None])
        tl.store(partial_lse + part, run_lse, is_head)
        if MERGE == "last_block":
            # All threads' stores come before the one atomic, which publishes them.
            tl.debug_barrier()
            arrival = arrivals + request * HEAD_TILES + head_tile
            if tl.atomic_add(arrival, 1, sem="acq_rel") == count - 1:
                tl.store(arrival, 0)  # ready for the next launch
                first_head = kv_head * GROUP_SIZE + (head_tile % TILES_PER_KV_HEAD) * BLOCK_H
                for i in range(tl.minimum(BLOCK_H, (kv_head + 1) * GROUP_SIZE - first_head)):
                    merged, merged_lse = _merged_head(
                        partial_out,
                        partial_lse,
                        first_item,
                        count,
                        first_head + i,
                        NUM_QO_HEADS,
                        HEAD_DIM,
                        BLOCK_S,
                    )
                    row = (
                        out + request.to(tl.int64) * out_stride_b + (first_head + i) * out_stride_h
                    )
                    tl.store(row + offs_d, merged.to(out.dtype.element_ty))
                    if STORE_LSE:
                        tl.store(lse + request * NUM_QO_HEADS + first_head + i, merged_lse)


@triton.jit
def merge_kernel(
    kv_indptr,
    kv_last_page_len,
    out,
    lse,
    partial_out,
    partial_lse,
    out_stride_b,
    out_stride_h,
    batch,
    num_splits,
    split_tokens,
    NUM_QO_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT_RULE: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """Merges the partial results of one head of one request; grid (query heads, requests)."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    length = _kv_len(kv_indptr, kv_last_page_len, request, True, PAGE_SIZE)
    if SPLIT_RULE == "size":
        index = tl.arange(0, BLOCK_B)
        lengths = _kv_len(kv_indptr, kv_last_page_len, index, index < request, PAGE_SIZE)
        before = tl.where(index < request, tl.maximum(tl.cdiv(lengths, split_tokens), 1), 0)
        first_item = tl.sum(before, 0)
        run = split_tokens
    else:
        first_item = request * num_splits
        run = tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N), 1) * BLOCK_N
    count = tl.cdiv(length, run)
    if count <= 1:
        return  # the only run wrote the result itself
    merged, merged_lse = _merged_head(
        partial_out, partial_lse, first_item, count, head, NUM_QO_HEADS, HEAD_DIM, BLOCK_S
    )
    row = out + request.to(tl.int64) * out_stride_b + head * out_stride_h
    tl.store(row + tl.arange(0, HEAD_DIM), merged.to(out.dtype.element_ty))
    if STORE_LSE:
        tl.store(lse + request * NUM_QO_HEADS + head, merged_lse)
