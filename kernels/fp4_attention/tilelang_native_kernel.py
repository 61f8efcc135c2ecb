"""TileLang device code of FP4 attention on the FP4 tensor cores of sm_120: NVFP4 twice.

One block owns a tile of query rows of one head, each warp all keys of its own rows. Codes of K and
V pass through a ring in shared memory that TMA fills ahead, by waits written out here: TileLang's
pipeline gives codes one slot where its barriers count several. Scales are too narrow for TMA; they
are read ahead into registers and put into the ring when the tile before them is done. P goes
through shared memory, codes and scales, to the warp that made it.

No ``from __future__ import annotations`` here: TileLang reads the annotations of its programs.
"""

from typing import Any

import tilelang.language as T

__all__ = ["native_attention_program"]

ELEMENTS_PER_STRIDE = 8
"""Strides of the output are passed in units of so many elements: its rows are aligned."""
ROWS_PER_MEAN = 128
"""Query rows that share a mean."""
BLOCK = 16
"""Codes that share a scale."""
WORD = 64
"""Codes whose four scales are one word of the instruction."""

_LOG2_2688 = 11.392317422778761
_LN_2 = 0.6931471805599453
# exp2f, without its care for results below 2^-126: P is nothing there.
_EXP2 = """
static __device__ __forceinline__ float tilescout_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""


def native_attention_program(
    *,
    arch: int,
    is_causal: bool,
    has_means: bool,
    head_dim: int,
    group_size: int,
    out_dtype: str,
    stores_lse: bool,
    block_m: int,
    block_n: int,
    threads: int,
    num_stages: int,
) -> Any:
    """Out = softmax(Q K^T) V with P in NVFP4 on two levels; lse = ln of the exact sum.

    The numerics of ``numerics.py``: the row reference is an integer, so that codes depend on no
    tile. Operands are bytes of two codes, low nibble first, and words of four e4m3 scales; V is
    transposed.

    Grid: row tiles, query heads, batch entries; under a causal mask the longest rows start first.
    """
    accum, codes, byte, word = "float32", "float4_e2m1fn", "uint8", "uint32"
    num_blocks = block_n // BLOCK
    unit = ELEMENTS_PER_STRIDE
    products = {
        "transpose_B": True,
        "policy": T.GemmWarpPolicy.FullRow,
        "k_start": 0,
        "sf_a_granularity_k": BLOCK,
        "sf_b_granularity_k": BLOCK,
    }

    def exp2(x: Any) -> Any:
        return T.call_extern(accum, "tilescout_exp2", x)

    def keys_seen(kv_len: Any, last_key: Any) -> Any:
        """Keys that a row sees whose last key, without an end of keys, is this."""
        return T.min(kv_len, last_key + 1) if is_causal else kv_len

    @T.macro
    def load_codes(K, V, k_ring, v_ring, ready, slot, entry, kv_head, first_key):
        T.tma_copy(
            K[entry, kv_head, first_key : first_key + block_n, 0 : head_dim // 2],
            k_ring[slot * block_n : (slot + 1) * block_n, 0 : head_dim // 2],
            barrier=ready[slot],
        )
        T.tma_copy(
            V[entry, kv_head, 0:head_dim, first_key // 2 : first_key // 2 + block_n // 2],
            v_ring[slot * head_dim : (slot + 1) * head_dim, 0 : block_n // 2],
            barrier=ready[slot],
        )
        # The boxes count as bytes, not as an arrival; every thread's own comes after them.
        T.barrier_arrive(ready[slot])

    @T.macro
    def read_scales(KWords, VWords, k_next, v_next, entry, kv_head, first_key, kv_len):
        for i, w in T.Parallel(block_n, head_dim // WORD):
            # Keys past the last are masked, but their scales must not be read.
            k_next[i, w] = KWords[entry, kv_head, T.min(first_key + i, kv_len - 1), w]
        for i, w in T.Parallel(head_dim, block_n // WORD):
            v_next[i, w] = VWords[entry, kv_head, i, first_key // WORD + w]

    @T.macro
    def keep_scales(k_next, v_next, k_words, v_words, slot):
        for i, w in T.Parallel(block_n, head_dim // WORD):
            k_words[slot, i, w] = k_next[i, w]
        for i, w in T.Parallel(head_dim, block_n // WORD):
            v_words[slot, i, w] = v_next[i, w]

    @T.macro
    def add_means(x, Delta, entry, head, first_row, num_means, first_key, kv_len, scales):
        """Scores with the product of K and the mean that was taken off Q."""
        mean = T.min(T.truncdiv(first_row, ROWS_PER_MEAN), num_means - 1)
        for i, j in T.Parallel(block_m, block_n):
            key = T.min(first_key + j, kv_len - 1)
            x[i, j] = x[i, j] * scales[0] + Delta[entry, head, mean, key] * scales[1]

    @T.macro
    def hide_keys(x, first_row, first_key, kv_len, offset):
        if first_key + block_n > keys_seen(kv_len, first_row + offset):
            for i, j in T.Parallel(block_m, block_n):
                x[i, j] = T.if_then_else(
                    first_key + j < keys_seen(kv_len, first_row + i + offset),
                    x[i, j],
                    -T.infinity(accum),
                )

    @T.macro
    def row_references(m, shift, rescale, row_top, factor):
        for i in T.Parallel(block_m):
            rescale[i] = m[i]
            m[i] = T.max(m[i], T.ceil(row_top[i] * factor))
            # A row that has seen no key must not subtract infinity from infinity.
            base = T.if_then_else(m[i] == -T.infinity(accum), 0.0, m[i])
            rescale[i] = exp2(rescale[i] - base)
            shift[i] = _LOG2_2688 - base

    @T.macro
    def quantize(
        x, x_blocks, m, shift, rescale, row_top, top, part, total, p_tile, p_scales, factor
    ):
        """Codes and scales of P to shared memory; m, the sum and what rescales both move on."""
        T.reduce_max(x_blocks, top, dim=2)
        T.reduce_max(top, row_top, dim=1)
        row_references(m, shift, rescale, row_top, factor)
        for i, j in T.Parallel(block_m, block_n):
            x[i, j] = exp2(x[i, j] * factor + shift[i])
        T.reduce_sum(x, part, dim=1)
        for i in T.Parallel(block_m):
            total[i] = total[i] * rescale[i] + part[i]
        for i, b in T.Parallel(block_m, num_blocks):
            wanted = exp2(top[i, b] * factor + shift[i]) * (1.0 / 6.0)
            stored = T.cast(T.min(wanted, 448.0), "float8_e4m3fn")
            p_scales[i, b] = T.reinterpret(stored, byte)
            # Half the least scale: where the scale is 0, so is what comes of any code.
            top[i, b] = T.fast_rcp(T.max(T.cast(stored, accum), 0.0009765625))
        for i, b, j in T.Parallel(block_m, num_blocks, BLOCK):
            x_blocks[i, b, j] = x_blocks[i, b, j] * top[i, b]
        for i, j in T.Parallel(block_m, block_n):
            p_tile[i, j] = T.cast(x[i, j], codes)

    @T.macro
    def rescale_sums(o, rescale):
        # References are integers and rarely move: a warp whose rows stay has nothing to do.
        has_moved = T.alloc_var("bool", init=False)
        for i in T.Parallel(block_m):
            has_moved = T.Or(has_moved, rescale[i] != 1.0)
        if T.any_sync(has_moved) != 0:
            for i, d in T.Parallel(block_m, head_dim):
                o[i, d] *= rescale[i]

    @T.prim_func
    def fp4_attention_tilelang_native(
        q: T.ptr(byte),
        q_scales: T.ptr(word),
        k: T.ptr(byte),
        k_scales: T.ptr(word),
        v: T.ptr(byte),
        v_scales: T.ptr(word),
        q_tensor_scale: T.ptr(accum),
        k_tensor_scale: T.ptr(accum),
        v_tensor_scale: T.ptr(accum),
        delta: T.ptr(accum),
        out: T.ptr(out_dtype),
        lse: T.ptr(accum),
        logit_scale: T.float32,
        out_stride_b: T.int64,
        out_stride_h: T.int64,
        out_stride_s: T.int64,
        batch: T.int32,
        num_heads: T.int32,
        query_len: T.int32,
        kv_len: T.int32,
        padded_words: T.int32,
        num_means: T.int32,
    ):
        num_kv_heads = T.truncdiv(num_heads, group_size)
        words = head_dim // WORD
        Q = T.make_tensor(q, (batch, num_heads, query_len, head_dim // 2), byte)
        QWords = T.make_tensor(q_scales, (batch, num_heads, query_len, words), word)
        K = T.make_tensor(k, (batch, num_kv_heads, kv_len, head_dim // 2), byte)
        KWords = T.make_tensor(k_scales, (batch, num_kv_heads, kv_len, words), word)
        V = T.make_tensor(v, (batch, num_kv_heads, head_dim, padded_words * (WORD // 2)), byte)
        VWords = T.make_tensor(v_scales, (batch, num_kv_heads, head_dim, padded_words), word)
        QScale = T.make_tensor(q_tensor_scale, (1,), accum)
        KScale = T.make_tensor(k_tensor_scale, (1,), accum)
        VScale = T.make_tensor(v_tensor_scale, (1,), accum)
        Delta = T.make_tensor(delta, (batch, num_heads, num_means, kv_len), accum)
        Out = T.make_tensor(
            out,
            (batch, num_heads, query_len, head_dim),
            out_dtype,
            strides=(out_stride_b * unit, out_stride_h * unit, out_stride_s * unit, 1),
        )
        Lse = T.make_tensor(lse, (batch, num_heads, query_len), accum)
        row_tiles = T.truncdiv(query_len + block_m - 1, block_m)
        with T.Kernel(row_tiles, num_heads, batch, threads=threads) as (tile, head, entry):
            T.import_source(_EXP2)
            q_bytes = T.alloc_shared((block_m, head_dim // 2), byte)
            k_ring = T.alloc_shared((num_stages * block_n, head_dim // 2), byte)
            v_ring = T.alloc_shared((num_stages * head_dim, block_n // 2), byte)
            p_tile = T.alloc_shared((block_m, block_n), codes)
            q_tile = T.view(q_bytes, (block_m, head_dim), codes)
            k_tiles = T.view(k_ring, (num_stages * block_n, head_dim), codes)
            v_tiles = T.view(v_ring, (num_stages * head_dim, block_n), codes)
            q_words = T.alloc_shared((block_m, words), word)
            k_words = T.alloc_shared((num_stages, block_n, words), word)
            v_words = T.alloc_shared((num_stages, head_dim, block_n // WORD), word)
            p_scales = T.alloc_shared((block_m, num_blocks), byte)
            p_words = T.view(p_scales, (block_m, block_n // WORD), word)
            k_next = T.alloc_fragment((block_n, words), word)
            v_next = T.alloc_fragment((head_dim, block_n // WORD), word)
            x = T.alloc_fragment((block_m, block_n), accum)
            x_blocks = T.reshape(x, (block_m, num_blocks, BLOCK))
            o = T.alloc_fragment((block_m, head_dim), accum)
            top = T.alloc_fragment((block_m, num_blocks), accum)
            row_top = T.alloc_fragment((block_m,), accum)
            m = T.alloc_fragment((block_m,), accum)
            shift = T.alloc_fragment((block_m,), accum)
            rescale = T.alloc_fragment((block_m,), accum)
            part = T.alloc_fragment((block_m,), accum)
            total = T.alloc_fragment((block_m,), accum)
            ready = T.alloc_barrier([threads] * num_stages)

            first_row = (row_tiles - 1 - tile if is_causal else tile) * block_m
            kv_head = T.truncdiv(head, group_size)
            offset = kv_len - query_len
            product_scale = QScale[0] * KScale[0] * logit_scale
            scales = (product_scale, logit_scale)
            factor = 1.0 if has_means else product_scale
            end = T.max(keys_seen(kv_len, first_row + block_m - 1 + offset), 0)
            count = T.truncdiv(end + block_n - 1, block_n)

            T.copy(Q[entry, head, first_row : first_row + block_m, 0 : head_dim // 2], q_bytes)
            for i, w in T.Parallel(block_m, words):
                # Rows past the last are computed and not stored.
                q_words[i, w] = QWords[entry, head, T.min(first_row + i, query_len - 1), w]
            T.fill(o, 0)
            T.fill(total, 0)
            T.fill(m, -T.infinity(accum))
            for s in T.unroll(num_stages - 1):
                if s < count:
                    load_codes(K, V, k_ring, v_ring, ready, s, entry, kv_head, s * block_n)
                    read_scales(KWords, VWords, k_next, v_next, entry, kv_head, s * block_n, kv_len)
                    keep_scales(k_next, v_next, k_words, v_words, s)
            for t in T.serial(count):
                first_key = t * block_n
                slot = T.truncmod(t, num_stages)
                ahead = t + num_stages - 1
                next_slot = T.truncmod(ahead, num_stages)
                T.barrier_wait(ready[slot], T.truncmod(T.truncdiv(t, num_stages), 2))
                # Everyone is through with the tile before, whose slot is filled again.
                T.sync_threads()
                if ahead < count:
                    load_codes(
                        K, V, k_ring, v_ring, ready, next_slot, entry, kv_head, ahead * block_n
                    )
                    read_scales(
                        KWords, VWords, k_next, v_next, entry, kv_head, ahead * block_n, kv_len
                    )
                T.gemm_blockscaled(
                    q_tile, k_tiles[slot * block_n : (slot + 1) * block_n, 0:head_dim], x,
                    q_words, k_words[slot, 0:block_n, 0:words],
                    clear_accum=True, **products,
                )  # fmt: skip
                if has_means:
                    add_means(
                        x, Delta, entry, head, first_row, num_means, first_key, kv_len, scales
                    )
                hide_keys(x, first_row, first_key, kv_len, offset)
                quantize(
                    x, x_blocks, m, shift, rescale, row_top, top, part, total, p_tile, p_scales,
                    factor,
                )  # fmt: skip
                rescale_sums(o, rescale)
                T.gemm_blockscaled(
                    p_tile, v_tiles[slot * head_dim : (slot + 1) * head_dim, 0:block_n], o,
                    p_words, v_words[slot, 0:head_dim, 0 : block_n // WORD],
                    **products,
                )  # fmt: skip
                if ahead < count:
                    keep_scales(k_next, v_next, k_words, v_words, next_slot)

            for i in T.Parallel(block_m):
                rescale[i] = T.if_then_else(total[i] == 0.0, 0.0, VScale[0] / total[i])
            for i, d in T.Parallel(block_m, head_dim):
                if first_row + i < query_len:
                    Out[entry, head, first_row + i, d] = T.cast(o[i, d] * rescale[i], out_dtype)
            if stores_lse:
                for i in T.Parallel(block_m):
                    if first_row + i < query_len:
                        Lse[entry, head, first_row + i] = T.if_then_else(
                            total[i] == 0.0,
                            -T.infinity(accum),
                            (m[i] + (T.log2(total[i]) - _LOG2_2688)) * _LN_2,
                        )

    return fp4_attention_tilelang_native
