"""TileLang device code of FP4 attention by exact dequantisation, for Hopper's matrix units.

One block owns a tile of query rows of one head; a warp group owns 64 of them. K and V pass through
a ring in shared memory, filled ahead by one of the ways in ``LOADS``; with ``tma_ws`` the warp
groups that compute never wait for one another, so that one multiplies while another takes
exponentials. P goes from the scores' registers to the second product without leaving them.

No ``from __future__ import annotations`` here: TileLang reads the annotations of its programs.
"""

from typing import Any

import tilelang.language as T

__all__ = ["ELEMENTS_PER_STRIDE", "LOADS", "attention_program", "key_of_column"]

LOADS = ("tma_ws", "tma")
"""``tma_ws``: TMA issued by a warp group of its own; ``tma``: by the warps that compute, of which
blocks are smaller, so that several share a multiprocessor."""
BOX_BYTES = 128
"""The widest box of TMA that the layout of the matrix units takes in one piece."""
ELEMENTS_PER_STRIDE = 8
"""Strides of the output are passed in units of so many elements: its rows are aligned."""
ROWS_PER_MEAN = 128
"""Query rows that share a mean."""

_LOG2_6 = 2.584962500721156
_LOG2_2688 = 11.392317422778761
_LN_2 = 0.6931471805599453
_LEAST_P_EXPONENT = -110.0
_EXPONENT_BITS = 0x7F800000
_ROUNDING = 4194304.0  # 2^22: times a power of two, steps of half of it
# exp2f, without its care for results below 2^-126: P is nothing there.
_EXP2 = """
static __device__ __forceinline__ float tilescout_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""


def key_of_column(column: Any) -> Any:
    """The key, of 16, whose score an FP8 kernel keeps in a column.

    A thread's scores of two neighbouring tiles of eight columns are then, in the order of its
    registers, what an FP8 product wants of it as P, and no value goes to another thread.
    """
    pair, half, odd = column % 8 // 2, column // 8 % 2, column % 2
    return column // 16 * 16 + pair * 4 + half * 2 + odd


def attention_program(
    *,
    arch: int,
    mode: str,
    p_scale: str,
    slope: float,
    intercept: float,
    is_causal: bool,
    has_means: bool,
    head_dim: int,
    group_size: int,
    out_dtype: str,
    stores_lse: bool,
    block_m: int,
    block_n: int,
    num_stages: int,
    load: str,
) -> Any:
    """Out = softmax(Q K^T) V with P rounded as ``mode`` says; lse = ln of the exact sum.

    The numerics of ``numerics.py``: the row reference is an integer, so that codes depend on no
    tile. Q, K and V are bf16 values without tensor scale, V transposed and e4m3 in mode fp8_p, K in
    the order of ``key_of_column`` there. A slope of 0 is the exact map of log2 P.

    Grid: row tiles, query heads, batch entries; under a causal mask the longest rows start first.
    """
    accum, half = "float32", "bfloat16"
    v_dtype = "float8_e4m3fn" if mode == "fp8_p" else half
    threads = 2 * block_m
    p_block = 16 if mode == "nvfp4" else 32
    num_blocks = block_n // p_block
    log2_unit = {"nvfp4": _LOG2_2688, "direct": _LOG2_6, "fp8_p": 8.0}[mode]
    has_exact_total = mode == "direct" and stores_lse
    unit = ELEMENTS_PER_STRIDE
    full_row = T.GemmWarpPolicy.FullRow
    slots = (num_stages,) if load == "tma" else ()
    k_columns = BOX_BYTES // 2
    v_columns = min(block_n, BOX_BYTES if mode == "fp8_p" else BOX_BYTES // 2)

    def exp2(x: Any) -> Any:
        return T.call_extern(accum, "tilescout_exp2", x)

    def power_of(x: Any) -> Any:
        """The power of two at or below a positive number; 0 for less than 2^-126."""
        bits = T.bitwise_and(T.reinterpret(x, "int32"), _EXPONENT_BITS)
        return T.reinterpret(bits, accum)

    def rounded(x: Any, power: Any) -> Any:
        """The nearest multiple of power / 2, ties to even; TIR would cancel + and -."""
        return T.ieee_fmaf(power, -_ROUNDING, T.ieee_fmaf(power, _ROUNDING, x))

    def key_in_tile(column: Any) -> Any:
        return key_of_column(column) if mode == "fp8_p" else column

    def keys_seen(kv_len: Any, last_key: Any) -> Any:
        """Keys that a row sees whose last key, without an end of keys, is this."""
        return T.min(kv_len, last_key + 1) if is_causal else kv_len

    @T.macro
    def add_means(x, Delta, entry, head, first_row, num_means, first_key, kv_len, scales):
        """Scores with the product of K and the mean that was taken off Q."""
        mean = T.min(T.truncdiv(first_row, ROWS_PER_MEAN), num_means - 1)
        for i, j in T.Parallel(block_m, block_n):
            key = T.min(first_key + key_in_tile(j), kv_len - 1)
            x[i, j] = x[i, j] * scales[0] + Delta[entry, head, mean, key] * scales[1]

    @T.macro
    def hide_keys(x, first_row, first_key, kv_len, offset):
        if first_key + block_n > keys_seen(kv_len, first_row + offset):
            for i, j in T.Parallel(block_m, block_n):
                x[i, j] = T.if_then_else(
                    first_key + key_in_tile(j) < keys_seen(kv_len, first_row + i + offset),
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
            shift[i] = log2_unit - base

    @T.macro
    def add_to(total, values, part, rescale):
        T.reduce_sum(values, part, dim=1)
        for i in T.Parallel(block_m):
            total[i] = total[i] * rescale[i] + part[i]

    @T.macro
    def exponentials(x, y, shift, factor):
        for i, j in T.Parallel(block_m, block_n):
            y[i, j] = exp2(x[i, j] * factor + shift[i])

    @T.macro
    def round_to_e2m1(x_blocks, grid):
        """Magnitudes up to 6 to codes, times ``grid``."""
        for i, b, j in T.Parallel(block_m, num_blocks, p_block):
            x_blocks[i, b, j] = (
                rounded(x_blocks[i, b, j], T.max(power_of(x_blocks[i, b, j]), 1.0)) * grid[i, b]
            )

    @T.macro
    def direct_scales(top, grid, shift, factor):
        """Exponents of the blocks' scales in ``top``, the scales in ``grid``."""
        for i, b in T.Parallel(block_m, num_blocks):
            exponent = top[i, b] * factor + (shift[i] - _LOG2_6)
            exponent = T.ceil(exponent) if p_scale == "ceil" else T.floor(exponent)
            top[i, b] = T.max(exponent, _LEAST_P_EXPONENT)
            grid[i, b] = T.reinterpret(T.shift_left(T.cast(top[i, b], "int32") + 127, 23), accum)

    @T.macro
    def round_on_grid(x_blocks, grid):
        """6 P to the grid of its block's scale: without a division by it."""
        for i, b, j in T.Parallel(block_m, num_blocks, p_block):
            if p_scale == "floor":
                x_blocks[i, b, j] = T.min(x_blocks[i, b, j], 6.0 * grid[i, b])
            x_blocks[i, b, j] = rounded(
                x_blocks[i, b, j], T.max(power_of(x_blocks[i, b, j]), grid[i, b])
            )

    @T.macro
    def affine_codes(x_blocks, top, shift, factor):
        for i, b in T.Parallel(block_m, num_blocks):
            top[i, b] = intercept + slope * (shift[i] - top[i, b])
        for i, b, j in T.Parallel(block_m, num_blocks, p_block):
            line = x_blocks[i, b, j] * (slope * factor) + top[i, b]
            x_blocks[i, b, j] = T.min(T.max(line, 0.0), 6.0)

    @T.macro
    def two_level_scales(top, grid, shift, factor):
        """The blocks' scales in ``grid``, their reciprocals in ``top``."""
        for i, b in T.Parallel(block_m, num_blocks):
            wanted = exp2(top[i, b] * factor + shift[i]) * (1.0 / 6.0)
            grid[i, b] = T.cast(T.cast(T.min(wanted, 448.0), "float8_e4m3fn"), accum)
            # Half the least scale: where the scale is 0, so is what comes of any code.
            top[i, b] = T.fast_rcp(T.max(grid[i, b], 0.0009765625))

    @T.macro
    def two_level_codes(x_blocks, top):
        for i, b, j in T.Parallel(block_m, num_blocks, p_block):
            x_blocks[i, b, j] = T.min(x_blocks[i, b, j] * top[i, b], 6.0)

    @T.macro
    def quantize(x, x_blocks, m, shift, rescale, row_top, top, grid, part, total, exact, factor):
        """Represented P in place of scores; m, the sums and what rescales them move on."""
        if mode == "fp8_p":
            T.reduce_max(x, row_top, dim=1)
        else:
            T.reduce_max(x_blocks, top, dim=2)
            T.reduce_max(top, row_top, dim=1)
        row_references(m, shift, rescale, row_top, factor)
        if mode == "direct":
            direct_scales(top, grid, shift, factor)
            if slope == 0.0:
                exponentials(x, x, shift, factor)
                if has_exact_total:
                    add_to(exact, x, part, rescale)
                round_on_grid(x_blocks, grid)
            else:
                if has_exact_total:
                    y = T.alloc_fragment((block_m, block_n), accum)
                    exponentials(x, y, shift, factor)
                    add_to(exact, y, part, rescale)
                affine_codes(x_blocks, top, shift, factor)
                round_to_e2m1(x_blocks, grid)
            add_to(total, x, part, rescale)
        else:
            if mode == "nvfp4":
                two_level_scales(top, grid, shift, factor)
            exponentials(x, x, shift, factor)
            add_to(total, x, part, rescale)
            if mode == "nvfp4":
                two_level_codes(x_blocks, top)
                round_to_e2m1(x_blocks, grid)

    @T.macro
    def to_operand(x, p):
        if mode == "fp8_p":
            for i, j in T.Parallel(block_m, block_n):
                p[i, key_of_column(j)] = T.cast(x[i, j], v_dtype)
        else:
            T.copy(x, p)

    @T.macro
    def add_values(p, v_tile, o, rescale):
        if mode == "fp8_p":
            # A sum of its own: Hopper's FP8 products keep few bits of what they add to.
            tile_sum = T.alloc_fragment((block_m, head_dim), accum)
            T.gemm(p, v_tile, tile_sum, transpose_B=True, policy=full_row, clear_accum=True)
            for i, d in T.Parallel(block_m, head_dim):
                o[i, d] = o[i, d] * rescale[i] + tile_sum[i, d]
        else:
            # References are integers and rarely move: a warp whose rows stay has nothing to do.
            has_moved = T.alloc_var("bool", init=False)
            for i in T.Parallel(block_m):
                has_moved = T.Or(has_moved, rescale[i] != 1.0)
            if T.any_sync(has_moved) != 0:
                for i, d in T.Parallel(block_m, head_dim):
                    o[i, d] *= rescale[i]
            T.gemm(p, v_tile, o, transpose_B=True, policy=full_row)

    @T.macro
    def scores(q_tile, k_tile, x):
        T.gemm(q_tile, k_tile, x, transpose_B=True, policy=full_row, clear_accum=True)

    @T.macro
    def load_boxes(K, V, k_ring, v_ring, ready, slot, entry, kv_head, first_key):
        for c in T.unroll(head_dim // k_columns):
            T.tma_copy(
                K[
                    entry,
                    kv_head,
                    first_key : first_key + block_n,
                    c * k_columns : (c + 1) * k_columns,
                ],
                k_ring[slot, 0:block_n, c * k_columns : (c + 1) * k_columns],
                barrier=ready[slot],
            )
        for c in T.unroll(block_n // v_columns):
            T.tma_copy(
                V[
                    entry,
                    kv_head,
                    0:head_dim,
                    first_key + c * v_columns : first_key + (c + 1) * v_columns,
                ],
                v_ring[slot, 0:head_dim, c * v_columns : (c + 1) * v_columns],
                barrier=ready[slot],
            )
        # The boxes count as bytes, not as an arrival; every thread's own comes after them.
        T.barrier_arrive(ready[slot])

    @T.prim_func
    def fp4_attention_tilelang(
        q: T.ptr(half),
        k: T.ptr(half),
        v: T.ptr(v_dtype),
        q_tensor_scale: T.ptr(accum),
        k_tensor_scale: T.ptr(accum),
        v_scale: T.ptr(accum),
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
        padded_keys: T.int32,
        num_means: T.int32,
    ):
        num_kv_heads = T.truncdiv(num_heads, group_size)
        Q = T.make_tensor(q, (batch, num_heads, query_len, head_dim), half)
        K = T.make_tensor(k, (batch, num_kv_heads, padded_keys, head_dim), half)
        V = T.make_tensor(v, (batch, num_kv_heads, head_dim, padded_keys), v_dtype)
        QScale = T.make_tensor(q_tensor_scale, (1,), accum)
        KScale = T.make_tensor(k_tensor_scale, (1,), accum)
        num_v_scales = batch * num_kv_heads if mode == "fp8_p" else 1
        VScale = T.make_tensor(v_scale, (num_v_scales,), accum)
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
            q_tile = T.alloc_shared((block_m, head_dim), half)
            k_ring = T.alloc_shared((*slots, block_n, head_dim), half)
            v_ring = T.alloc_shared((*slots, head_dim, block_n), v_dtype)
            x = T.alloc_fragment((block_m, block_n), accum)
            p = T.alloc_fragment((block_m, block_n), v_dtype)
            o = T.alloc_fragment((block_m, head_dim), accum)
            row_top = T.alloc_fragment((block_m,), accum)
            m = T.alloc_fragment((block_m,), accum)
            shift = T.alloc_fragment((block_m,), accum)
            rescale = T.alloc_fragment((block_m,), accum)
            part = T.alloc_fragment((block_m,), accum)
            total = T.alloc_fragment((block_m,), accum)
            if mode == "fp8_p":
                blocks, top, grid = x, row_top, row_top
            else:
                blocks = T.reshape(x, (block_m, num_blocks, p_block))
                top = T.alloc_fragment((block_m, num_blocks), accum)
                grid = T.alloc_fragment((block_m, num_blocks), accum)
            exact = T.alloc_fragment((block_m,), accum) if has_exact_total else total

            first_row = (row_tiles - 1 - tile if is_causal else tile) * block_m
            kv_head = T.truncdiv(head, group_size)
            offset = kv_len - query_len
            product_scale = QScale[0] * KScale[0] * logit_scale
            scales = (product_scale, logit_scale)
            factor = 1.0 if has_means else product_scale
            # At least one tile, were all of it masked: Q is then waited for.
            end = keys_seen(kv_len, first_row + block_m - 1 + offset)
            count = T.max(T.truncdiv(end + block_n - 1, block_n), 1)

            T.copy(Q[entry, head, first_row : first_row + block_m, 0:head_dim], q_tile)
            T.fill(o, 0)
            T.fill(total, 0)
            if has_exact_total:
                T.fill(exact, 0)
            T.fill(m, -T.infinity(accum))
            if load == "tma_ws":
                for t in T.Pipelined(count, num_stages=num_stages):
                    first_key = t * block_n
                    T.copy(K[entry, kv_head, first_key : first_key + block_n, 0:head_dim], k_ring)
                    scores(q_tile, k_ring, x)
                    if has_means:
                        add_means(
                            x, Delta, entry, head, first_row, num_means, first_key, kv_len, scales
                        )
                    hide_keys(x, first_row, first_key, kv_len, offset)
                    quantize(
                        x, blocks, m, shift, rescale, row_top, top, grid, part, total, exact, factor
                    )
                    to_operand(x, p)
                    T.copy(V[entry, kv_head, 0:head_dim, first_key : first_key + block_n], v_ring)
                    add_values(p, v_ring, o, rescale)
            else:
                ready = T.alloc_barrier([threads] * num_stages)
                for s in T.unroll(num_stages - 1):
                    if s < count:
                        load_boxes(K, V, k_ring, v_ring, ready, s, entry, kv_head, s * block_n)
                for t in T.serial(count):
                    first_key = t * block_n
                    slot = T.truncmod(t, num_stages)
                    ahead = t + num_stages - 1
                    T.barrier_wait(ready[slot], T.truncmod(T.truncdiv(t, num_stages), 2))
                    # Everyone is through with the tile before, whose slot is filled again.
                    T.sync_threads()
                    if ahead < count:
                        load_boxes(
                            K, V, k_ring, v_ring, ready, T.truncmod(ahead, num_stages), entry,
                            kv_head, ahead * block_n,
                        )  # fmt: skip
                    scores(q_tile, k_ring[slot, 0:block_n, 0:head_dim], x)
                    if has_means:
                        add_means(
                            x, Delta, entry, head, first_row, num_means, first_key, kv_len, scales
                        )
                    hide_keys(x, first_row, first_key, kv_len, offset)
                    quantize(
                        x, blocks, m, shift, rescale, row_top, top, grid, part, total, exact, factor
                    )
                    to_operand(x, p)
                    add_values(p, v_ring[slot, 0:head_dim, 0:block_n], o, rescale)

            v_factor = VScale[entry * num_kv_heads + kv_head if mode == "fp8_p" else 0]
            for i in T.Parallel(block_m):
                rescale[i] = T.if_then_else(total[i] == 0.0, 0.0, v_factor / total[i])
            for i, d in T.Parallel(block_m, head_dim):
                if first_row + i < query_len:
                    Out[entry, head, first_row + i, d] = T.cast(o[i, d] * rescale[i], out_dtype)
            if stores_lse:
                for i in T.Parallel(block_m):
                    if first_row + i < query_len:
                        Lse[entry, head, first_row + i] = T.if_then_else(
                            total[i] == 0.0,
                            -T.infinity(accum),
                            (m[i] + (T.log2(exact[i]) - log2_unit)) * _LN_2,
                        )

    return fp4_attention_tilelang
