"""TileLang device code of paged decode: split-KV attention over pages.

One block owns a tile of query heads of one KV head and a run of tokens of one request. Tiles of K
and V pass through a ring in shared memory, filled ahead by one of the ways in ``LOADS``. The
softmax is online, in base 2, with fp32 accumulators. What lies past the run or before the window is
not read, or overwritten with zeros before it is used: NaN there never reaches the output.

No ``from __future__ import annotations`` here: TileLang reads the annotations of its programs.
"""

from typing import Any

import tilelang.language as T

__all__ = ["ELEMENTS_PER_STRIDE", "LOADS", "LOG2_E", "attention_program"]

LOADS = ("rows", "page", "tma", "tma_ws")
"""``rows``: cp.async row by row, each with a page id of its own. ``page``: cp.async with one page
id for the tile. ``tma``: one or more TMA boxes a tile. ``tma_ws``: TMA boxes issued by warps that
do nothing else."""

ELEMENTS_PER_STRIDE = 8
"""Strides of q, K, V and the output are passed in units of this many elements (16 bytes), which
proves to the compiler that every row is aligned."""

BOX_COLUMNS = 64
"""128 bytes: the widest box that the layout of the matrix units takes in one piece."""

LOG2_E = 1.4426950408889634

# cp.async without the wait that TileLang would add: the ring waits for itself. T.Pipelined cannot
# make this pipeline in 0.1.15 where the trip count is known on the device only: its wait count
# becomes an expression (https://github.com/tile-ai/TileOPs/issues/1852).
_IN_FLIGHT = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}


def attention_program(
    *,
    arch: int,
    dtype: str,
    head_dim: int,
    group_size: int,
    page_size: int,
    block_n: int,
    block_h: int,
    rows: int,
    threads: int,
    num_stages: int,
    load: str,
    kv_eviction: str,
    swap_ab: bool,
    uses_wgmma: bool,
    is_split: bool,
    has_window: bool,
    has_soft_cap: bool,
    has_sinks: bool,
    stores_lse: bool,
) -> Any:
    """softmax2(q k^T) v over one run of tokens for ``block_h`` query heads of one KV head.

    The matrix tile has ``rows`` of heads (columns when swapped), of which ``block_h`` are real.

    Grid: head tiles of all KV heads, runs, requests. A request's tokens from the first one in the
    window on are cut into ``num_splits`` runs of whole tiles, the last of which may be empty. A run
    of a split request leaves its partial result; an unsplit one writes the output.
    """
    accum = "float32"
    head_tiles = -(-group_size // block_h)
    # Rows of a thread's registers: reduced together, they share one pair of barriers. After Hopper,
    # 0.1.15 leaves a variable of such a maximum undefined.
    sums_a_thread = rows // 4 if swap_ab else 2 if uses_wgmma else rows // 8
    maxima_a_thread = sums_a_thread if arch < 100 else 1
    num_boxes = max(1, block_n // page_size)
    box_rows = block_n // num_boxes
    num_columns = head_dim // BOX_COLUMNS
    x_shape = (block_n, rows) if swap_ab else (rows, block_n)
    o_shape = (head_dim, rows) if swap_ab else (rows, head_dim)
    slots = (num_stages,) if load != "tma_ws" else ()
    unit = ELEMENTS_PER_STRIDE

    def clamped(token: Any, low: Any, end: Any) -> Any:
        """A token of the run: the reads past its ends repeat its first or last row."""
        token = T.min(token, end - 1)
        return T.max(token, low) if has_window else token

    @T.macro
    def load_rows(pool, ring, slot, indices, first, start, low, end, kv_head):
        if load == "page":
            for i, d in T.Parallel(block_n, head_dim, annotations=_IN_FLIGHT):
                ring[slot, i, d] = pool[
                    indices[first + T.truncdiv(start, page_size)],
                    clamped(start + i, low, end) - T.truncdiv(start, page_size) * page_size,
                    kv_head,
                    d,
                ]
        else:
            for i, d in T.Parallel(block_n, head_dim, annotations=_IN_FLIGHT):
                ring[slot, i, d] = pool[
                    indices[first + T.truncdiv(clamped(start + i, low, end), page_size)],
                    T.truncmod(clamped(start + i, low, end), page_size),
                    kv_head,
                    d,
                ]

    @T.macro
    def load_boxes(pool, ring, slot, barrier, indices, first, start, end, kv_head):
        for j, c in T.grid(num_boxes, num_columns):
            T.tma_copy(
                pool[
                    indices[first + T.truncdiv(T.min(start + j * box_rows, end - 1), page_size)],
                    T.truncmod(start, page_size) : T.truncmod(start, page_size) + box_rows,
                    kv_head,
                    c * BOX_COLUMNS : (c + 1) * BOX_COLUMNS,
                ],
                ring[
                    slot,
                    j * box_rows : (j + 1) * box_rows,
                    c * BOX_COLUMNS : (c + 1) * BOX_COLUMNS,
                ],
                barrier=barrier[slot],
                eviction_policy=kv_eviction,
            )
        # The boxes count as bytes, not as an arrival; every thread's own arrival comes after them.
        T.barrier_arrive(barrier[slot])

    @T.macro
    def load_edge(pool, tile, indices, first, start, end, kv_head):
        """A tile that the run does not fill, at once: its last row is repeated."""
        for i, d in T.Parallel(block_n, head_dim, prefer_async=False):
            tile[i, d] = pool[
                indices[first + T.truncdiv(start, page_size)],
                T.min(start + i, end - 1) - T.truncdiv(start, page_size) * page_size,
                kv_head,
                d,
            ]

    @T.macro
    def softmax(x, m, m_old, rescale, den, o, p, scale, cap_log2, start, low, end, is_edge):
        """From products x to probabilities p in shared memory; rescales what is accumulated."""
        T.copy(m, m_old)
        for a, c in T.Parallel(*x_shape):
            if has_soft_cap:
                x[a, c] = cap_log2 * T.tanh(x[a, c] * scale)
            else:
                x[a, c] = x[a, c] * scale
        if is_edge:
            for a, c in T.Parallel(*x_shape):
                token = start + (a if swap_ab else c)
                if has_window:
                    x[a, c] = T.if_then_else(
                        T.And(token < end, token >= low), x[a, c], -T.infinity(accum)
                    )
                else:
                    x[a, c] = T.if_then_else(token < end, x[a, c], -T.infinity(accum))
        T.reduce_max(x, m, dim=0 if swap_ab else 1, clear=False, batch=maxima_a_thread)
        for i in T.Parallel(rows):
            rescale[i] = T.exp2(m_old[i] - m[i])
        for a, c in T.Parallel(*x_shape):
            x[a, c] = T.exp2(x[a, c] - m[c if swap_ab else a])
        for a, c in T.Parallel(*x_shape):
            # Summed over tokens once, after the loop.
            den[a, c] = den[a, c] * rescale[c if swap_ab else a] + x[a, c]
        for a, c in T.Parallel(*o_shape):
            o[a, c] *= rescale[c if swap_ab else a]
        T.copy(x, p)

    @T.macro
    def scores(q_tile, k_tile, x):
        T.clear(x)
        if swap_ab:
            T.gemm(k_tile, q_tile, x, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
        else:
            T.gemm(q_tile, k_tile, x, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)

    @T.macro
    def values(p, v_tile, o):
        if swap_ab:
            T.gemm(v_tile, p, o, transpose_A=True, policy=T.GemmWarpPolicy.FullRow)
        else:
            T.gemm(p, v_tile, o, policy=T.GemmWarpPolicy.FullCol)

    @T.macro
    def load_queries(Q, q_tile, request, head, real_rows):
        for i, d in T.Parallel(rows, head_dim):
            # Rows behind the last head repeat it, and nobody reads what comes of them. Zeros would
            # take a branch, with which ptxas of CUDA 12.9 to 13.1 reads q through the pointer that
            # follows the ring where one warp has 3, 5 or 6 stages (SASS for sm_90a; wrong results
            # and faults on an H200, 2026-11-30).
            q_tile[i, d] = Q[request, head + T.min(i, real_rows - 1), d]

    @T.macro
    def stream_rows(
        K, V, k_ring, v_ring, q_tile, x, m, m_old, rescale, den, o, p, scale, cap_log2, indices,
        first, kv_head, begin, low, end, count,
    ):  # fmt: skip
        for t in T.serial(count):
            slot = T.truncmod(t, num_stages)
            ahead = t + num_stages - 1
            free = T.truncmod(ahead, num_stages)
            start = begin + t * block_n
            ahead_start = begin + ahead * block_n
            # Of the groups under way, the oldest is the one that is needed next.
            T.ptx_wait_group(2 * num_stages - 3)
            if uses_wgmma:
                T.fence_proxy_async()
            T.sync_threads()
            if ahead < count:
                load_rows(K, k_ring, free, indices, first, ahead_start, low, end, kv_head)
            T.ptx_commit_group()
            scores(q_tile, k_ring[slot, 0:block_n, 0:head_dim], x)
            softmax(x, m, m_old, rescale, den, o, p, scale, cap_log2, start, low, end, True)
            T.ptx_wait_group(2 * num_stages - 3)
            if uses_wgmma:
                T.fence_proxy_async()
            T.sync_threads()
            if ahead < count:
                load_rows(V, v_ring, free, indices, first, ahead_start, low, end, kv_head)
            T.ptx_commit_group()
            values(p, v_ring[slot, 0:block_n, 0:head_dim], o)

    @T.macro
    def stream_boxes(
        K, V, k_ring, v_ring, k_ready, v_ready, q_tile, x, m, m_old, rescale, den, o, p, scale,
        cap_log2, indices, first, kv_head, begin, low, end, count,
    ):  # fmt: skip
        for t in T.serial(count):
            slot = T.truncmod(t, num_stages)
            ahead = t + num_stages - 1
            free = T.truncmod(ahead, num_stages)
            start = begin + t * block_n
            ahead_start = begin + ahead * block_n
            T.barrier_wait(k_ready[slot], T.truncmod(T.truncdiv(t, num_stages), 2))
            T.sync_threads()
            if ahead < count:
                load_boxes(K, k_ring, free, k_ready, indices, first, ahead_start, end, kv_head)
            scores(q_tile, k_ring[slot, 0:block_n, 0:head_dim], x)
            softmax(x, m, m_old, rescale, den, o, p, scale, cap_log2, start, low, end, True)
            T.barrier_wait(v_ready[slot], T.truncmod(T.truncdiv(t, num_stages), 2))
            if T.Or(start + block_n > end, start < low):
                # Probabilities there are 0, but 0 times NaN is NaN.
                for i, d in T.Parallel(block_n, head_dim):
                    if T.Or(start + i >= end, start + i < low):
                        v_ring[slot, i, d] = T.cast(0, dtype)
            if uses_wgmma:
                T.fence_proxy_async()
            T.sync_threads()
            if ahead < count:
                load_boxes(V, v_ring, free, v_ready, indices, first, ahead_start, end, kv_head)
            values(p, v_ring[slot, 0:block_n, 0:head_dim], o)

    @T.macro
    def stream_warp_specialised(
        K, V, k_ring, v_ring, edge, q_tile, x, m, m_old, rescale, den, o, p, scale, cap_log2,
        indices, first, kv_head, begin, low, end, count, whole,
    ):  # fmt: skip
        for t in T.Pipelined(whole, num_stages=num_stages):
            page = T.truncdiv(begin + t * block_n, page_size)
            row = T.truncmod(begin + t * block_n, page_size)
            T.copy(
                K[indices[first + page], row : row + block_n, kv_head, 0:head_dim],
                k_ring,
                eviction_policy=kv_eviction,
            )
            scores(q_tile, k_ring, x)
            softmax(x, m, m_old, rescale, den, o, p, scale, cap_log2, 0, low, end, False)
            T.copy(
                V[indices[first + page], row : row + block_n, kv_head, 0:head_dim],
                v_ring,
                eviction_policy=kv_eviction,
            )
            values(p, v_ring, o)
        if whole < count:
            start = begin + whole * block_n
            load_edge(K, edge, indices, first, start, end, kv_head)
            if uses_wgmma:
                T.fence_proxy_async()
            T.sync_threads()
            scores(q_tile, edge, x)
            softmax(x, m, m_old, rescale, den, o, p, scale, cap_log2, start, low, end, True)
            load_edge(V, edge, indices, first, start, end, kv_head)
            if uses_wgmma:
                T.fence_proxy_async()
            T.sync_threads()
            values(p, edge, o)

    @T.prim_func
    def paged_decode_attention(
        q: T.ptr(dtype),
        k: T.ptr(dtype),
        v: T.ptr(dtype),
        kv_indptr: T.ptr("int32"),
        kv_indices: T.ptr("int32"),
        kv_last_page_len: T.ptr("int32"),
        sinks: T.ptr(accum),
        out: T.ptr(dtype),
        lse: T.ptr(accum),
        partial_out: T.ptr(accum),
        partial_lse: T.ptr(accum),
        scale: T.float32,
        cap_log2: T.float32,
        lse_factor: T.float32,
        q_stride_b: T.int64,
        q_stride_h: T.int64,
        kv_stride_page: T.int64,
        kv_stride_token: T.int64,
        kv_stride_head: T.int64,
        out_stride_b: T.int64,
        out_stride_h: T.int64,
        batch: T.int32,
        num_kv_heads: T.int32,
        num_pages: T.int32,
        num_indices: T.int32,
        num_splits: T.int32,
        window_left: T.int32,
    ):
        num_heads = num_kv_heads * group_size
        pool_shape = (num_pages, page_size, num_kv_heads, head_dim)
        pool_strides = (kv_stride_page * unit, kv_stride_token * unit, kv_stride_head * unit, 1)
        K = T.make_tensor(k, pool_shape, dtype, strides=pool_strides)
        V = T.make_tensor(v, pool_shape, dtype, strides=pool_strides)
        Q = T.make_tensor(
            q,
            (batch, num_heads, head_dim),
            dtype,
            strides=(q_stride_b * unit, q_stride_h * unit, 1),
        )
        Out = T.make_tensor(
            out,
            (batch, num_heads, head_dim),
            dtype,
            strides=(out_stride_b * unit, out_stride_h * unit, 1),
        )
        Lse = T.make_tensor(lse, (batch, num_heads), accum)
        Sinks = T.make_tensor(sinks, (num_heads,), accum)
        Partial = T.make_tensor(
            partial_out, (batch, num_splits, num_heads, T.int64(head_dim)), accum
        )
        PartialLse = T.make_tensor(partial_lse, (batch, num_splits, num_heads), accum)
        indptr = T.make_tensor(kv_indptr, (batch + 1,), "int32")
        indices = T.make_tensor(kv_indices, (num_indices,), "int32")
        last_page_len = T.make_tensor(kv_last_page_len, (batch,), "int32")
        with T.Kernel(num_kv_heads * head_tiles, num_splits, batch, threads=threads) as (
            head_tile,
            split,
            request,
        ):
            kv_head = T.truncdiv(head_tile, head_tiles)
            head_in_group = T.truncmod(head_tile, head_tiles) * block_h
            head = kv_head * group_size + head_in_group
            real_rows = T.min(block_h, group_size - head_in_group)

            q_tile = T.alloc_shared((rows, head_dim), dtype)
            k_ring = T.alloc_shared((*slots, block_n, head_dim), dtype)
            v_ring = T.alloc_shared((*slots, block_n, head_dim), dtype)
            p = T.alloc_shared(x_shape, dtype)
            x = T.alloc_fragment(x_shape, accum)
            den = T.alloc_fragment(x_shape, accum)
            o = T.alloc_fragment(o_shape, accum)
            m = T.alloc_fragment((rows,), accum)
            m_old = T.alloc_fragment((rows,), accum)
            rescale = T.alloc_fragment((rows,), accum)
            total = T.alloc_fragment((rows,), accum)

            first = indptr[request]
            pages = indptr[request + 1] - first
            length = T.alloc_var(
                "int32",
                init=T.if_then_else(pages > 0, (pages - 1) * page_size + last_page_len[request], 0),
            )
            low = T.alloc_var("int32", init=0)
            if has_window:
                low = T.max(length - 1 - window_left, 0)
            first_tile = T.alloc_var("int32", init=T.truncdiv(low, block_n))
            tiles = T.alloc_var("int32", init=T.truncdiv(length + block_n - 1, block_n))
            tiles_a_run = T.alloc_var(
                "int32", init=T.truncdiv(tiles - first_tile + num_splits - 1, num_splits)
            )
            begin = T.alloc_var("int32", init=(first_tile + split * tiles_a_run) * block_n)
            end = T.alloc_var("int32", init=T.min(begin + tiles_a_run * block_n, length))
            count = T.alloc_var(
                "int32", init=T.max(T.truncdiv(end - begin + block_n - 1, block_n), 0)
            )

            if load == "tma_ws":
                edge = T.alloc_shared((block_n, head_dim), dtype)
                whole = T.alloc_var("int32", init=T.truncdiv(T.max(end - begin, 0), block_n))
            if load == "tma":
                k_ready = T.alloc_barrier([threads] * num_stages)
                v_ready = T.alloc_barrier([threads] * num_stages)
            T.fill(o, 0)
            T.fill(den, 0)
            T.fill(m, -T.infinity(accum))
            if load == "tma_ws":
                # No condition around this: what warp specialisation moves ahead of the lengths
                # would be decided before they are read.
                load_queries(Q, q_tile, request, head, real_rows)
                stream_warp_specialised(
                    K, V, k_ring, v_ring, edge, q_tile, x, m, m_old, rescale, den, o, p, scale,
                    cap_log2, indices, first, kv_head, begin, low, end, count, whole,
                )  # fmt: skip
            elif load == "tma":
                if count > 0:
                    for s in T.unroll(num_stages - 1):
                        if s < count:
                            start = begin + s * block_n
                            load_boxes(K, k_ring, s, k_ready, indices, first, start, end, kv_head)
                            load_boxes(V, v_ring, s, v_ready, indices, first, start, end, kv_head)
                    load_queries(Q, q_tile, request, head, real_rows)
                    stream_boxes(
                        K, V, k_ring, v_ring, k_ready, v_ready, q_tile, x, m, m_old, rescale, den,
                        o, p, scale, cap_log2, indices, first, kv_head, begin, low, end, count,
                    )  # fmt: skip
            else:
                if count > 0:
                    for s in T.unroll(num_stages - 1):
                        if s < count:
                            start = begin + s * block_n
                            load_rows(K, k_ring, s, indices, first, start, low, end, kv_head)
                            T.ptx_commit_group()
                            load_rows(V, v_ring, s, indices, first, start, low, end, kv_head)
                            T.ptx_commit_group()
                        else:
                            T.ptx_commit_group()
                            T.ptx_commit_group()
                    load_queries(Q, q_tile, request, head, real_rows)
                    stream_rows(
                        K, V, k_ring, v_ring, q_tile, x, m, m_old, rescale, den, o, p, scale,
                        cap_log2, indices, first, kv_head, begin, low, end, count,
                    )  # fmt: skip

            T.reduce_sum(den, total, dim=0 if swap_ab else 1, batch=sums_a_thread)
            if is_split:
                if count > 0:
                    for a, c in T.Parallel(*o_shape):
                        i = c if swap_ab else a
                        d = a if swap_ab else c
                        if i < real_rows:
                            Partial[request, split, head + i, d] = o[a, c] / total[i]
                    for i in T.Parallel(rows):
                        if i < real_rows:
                            PartialLse[request, split, head + i] = m[i] + T.log2(total[i])
            else:
                for i in T.Parallel(rows):
                    m_old[i] = m[i]
                    if has_sinks:
                        if i < real_rows:
                            m[i] = T.max(m[i], Sinks[head + i] * LOG2_E)
                            total[i] = total[i] * T.exp2(m_old[i] - m[i]) + T.exp2(
                                Sinks[head + i] * LOG2_E - m[i]
                            )
                for i in T.Parallel(rows):
                    rescale[i] = T.if_then_else(
                        m_old[i] > -T.infinity(accum), T.exp2(m_old[i] - m[i]) / total[i], 0
                    )
                for a, c in T.Parallel(*o_shape):
                    i = c if swap_ab else a
                    d = a if swap_ab else c
                    if i < real_rows:
                        Out[request, head + i, d] = T.cast(o[a, c] * rescale[i], dtype)
                if stores_lse:
                    for i in T.Parallel(rows):
                        if i < real_rows:
                            Lse[request, head + i] = (m[i] + T.log2(total[i])) * lse_factor

    return paged_decode_attention
