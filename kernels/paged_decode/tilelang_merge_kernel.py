"""TileLang device code of paged decode: the merge of partial results.

No ``from __future__ import annotations`` here: TileLang reads the annotations of its programs.
"""

from typing import Any

import tilelang.language as T

from .tilelang_kernel import ELEMENTS_PER_STRIDE, LOG2_E

__all__ = ["merge_program"]


def merge_program(
    *,
    arch: int,
    dtype: str,
    head_dim: int,
    group_size: int,
    block_s: int,
    threads: int,
    has_window: bool,
    has_sinks: bool,
    stores_lse: bool,
) -> Any:
    """The sum over the runs s of one head of a request of 2^(lse_s - lse) times their outputs.

    Grid: pieces of the head dimension of query heads, requests. ``block_s`` runs are read at once,
    in their order whatever the batch is. A request without tokens gives 0. Pages and tiles are
    run-time arguments: they cost two divisions a block, and many configs share a merge.
    """
    del arch
    accum = "float32"
    unit = ELEMENTS_PER_STRIDE
    # Threads reduce in pairs of pairs: a piece is a power of two.
    block_d = head_dim & -head_dim
    pieces = head_dim // block_d

    @T.prim_func
    def paged_decode_merge(
        kv_indptr: T.ptr("int32"),
        kv_last_page_len: T.ptr("int32"),
        sinks: T.ptr(accum),
        out: T.ptr(dtype),
        lse: T.ptr(accum),
        partial_out: T.ptr(accum),
        partial_lse: T.ptr(accum),
        lse_factor: T.float32,
        out_stride_b: T.int64,
        out_stride_h: T.int64,
        batch: T.int32,
        num_kv_heads: T.int32,
        num_splits: T.int32,
        window_left: T.int32,
        page_size: T.int32,
        block_n: T.int32,
    ):
        num_heads = num_kv_heads * group_size
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
        last_page_len = T.make_tensor(kv_last_page_len, (batch,), "int32")
        with T.Kernel(num_heads * pieces, batch, threads=threads) as (piece, request):
            head = T.truncdiv(piece, pieces)
            first_d = T.truncmod(piece, pieces) * block_d
            run_lse = T.alloc_shared((block_s,), accum)
            part = T.alloc_fragment((block_s, block_d), accum)
            acc = T.alloc_fragment((block_s, block_d), accum)
            merged = T.alloc_fragment((block_d,), accum)

            pages = indptr[request + 1] - indptr[request]
            length = T.alloc_var(
                "int32",
                init=T.if_then_else(pages > 0, (pages - 1) * page_size + last_page_len[request], 0),
            )
            low = T.alloc_var("int32", init=0)
            if has_window:
                low = T.max(length - 1 - window_left, 0)
            tiles = T.alloc_var(
                "int32",
                init=T.truncdiv(length + block_n - 1, block_n) - T.truncdiv(low, block_n),
            )
            tiles_a_run = T.alloc_var(
                "int32", init=T.max(T.truncdiv(tiles + num_splits - 1, num_splits), 1)
            )
            runs = T.alloc_var("int32", init=T.truncdiv(tiles + tiles_a_run - 1, tiles_a_run))
            m = T.alloc_var(accum, init=-T.infinity(accum))
            m_old = T.alloc_var(accum, init=-T.infinity(accum))
            total = T.alloc_var(accum, init=0.0)
            T.fill(acc, 0)
            for chunk in T.serial(T.truncdiv(runs + block_s - 1, block_s)):
                for s, d in T.Parallel(block_s, block_d):
                    part[s, d] = T.if_then_else(
                        chunk * block_s + s < runs,
                        Partial[request, T.min(chunk * block_s + s, runs - 1), head, first_d + d],
                        T.cast(0, accum),
                    )
                for s in T.Parallel(block_s):
                    run_lse[s] = T.if_then_else(
                        chunk * block_s + s < runs,
                        PartialLse[request, T.min(chunk * block_s + s, runs - 1), head],
                        -T.infinity(accum),
                    )
                T.sync_threads()
                m_old = m
                for s in T.serial(block_s):
                    m = T.max(m, run_lse[s])
                total = total * T.exp2(m_old - m)
                for s in T.serial(block_s):
                    total = total + T.exp2(run_lse[s] - m)
                for s, d in T.Parallel(block_s, block_d):
                    acc[s, d] = acc[s, d] * T.exp2(m_old - m) + part[s, d] * T.exp2(run_lse[s] - m)
                T.sync_threads()
            T.reduce_sum(acc, merged, dim=0, batch=min(4, block_s * block_d // threads))
            m_old = m
            if has_sinks:
                m = T.max(m, Sinks[head] * LOG2_E)
                total = total * T.exp2(m_old - m) + T.exp2(Sinks[head] * LOG2_E - m)
            for d in T.Parallel(block_d):
                Out[request, head, first_d + d] = T.cast(
                    T.if_then_else(
                        runs > 0, merged[d] * T.exp2(m_old - m) / total, T.cast(0, accum)
                    ),
                    dtype,
                )
            if stores_lse:
                if T.And(T.get_thread_binding() == 0, first_d == 0):
                    Lse[request, head] = (m + T.log2(total)) * lse_factor

    return paged_decode_merge
