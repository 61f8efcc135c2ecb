"""TileLang device code of the fused scan: the state along segments in registers, output in passing.

Everything is transposed: a warp owns 16 columns of the state as rows of its matrix tiles, and what
one product leaves in its registers is the left operand of the next. So state, errors and output
never pass through shared memory between products, and warps do not wait for one another; the tiles
of q, k and of what the preparation left come through a ring in shared memory, filled by TMA. Here
are what a block owns and the loops of its roles; loads and chunks are macros of other modules.

No ``from __future__ import annotations`` here: TileLang reads the annotations of its programs.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from .tilelang_config import (
    CONSUMER_ROWS,
    DECAY_PADDING,
    DECAY_STEP,
    OUTPUT_THREADS,
    PRODUCER_THREADS,
    group_registers,
)
from .tilelang_joint_kernel import joint_macro
from .tilelang_roles_kernel import role_macros
from .tilelang_tiles_kernel import tile_macros

__all__ = ["ELEMENTS_PER_STRIDE", "scan_program"]

ELEMENTS_PER_STRIDE = 8
"""Strides of q, k, v and the output are passed in units of this many elements (16 bytes), which
proves to the compiler that every row is aligned."""

_WARP = 32


def scan_program(
    *,
    arch: int,
    dtype: str,
    seqlen_dtype: str,
    head_dim_k: int,
    head_dim_v: int,
    chunk: int,
    is_cut: bool,
    is_wy: bool,
    has_scores: bool,
    is_v_first: bool,
    is_varlen: bool,
    has_initial_state: bool,
    has_final_state: bool,
    block_v: int,
    num_stages: int,
    producer: str,
    roles: str,
    num_turns: int,
    uses_wgmma: bool,
) -> Any:
    """S <- 2^G_last S + k^T (2^(G_last - G) e), o = scale 2^G (q S) + P e, chunk by chunk.

    Errors e = u - w S, or A (v - 2^G (k S)) where the inverse A went through memory (``is_wy``
    false). P went through memory too, or, with split roles only, is made of q and k here
    (``has_scores`` false). G and its exponentials are fp32, and only differences of at most 0 and G
    itself are exponentiated. Tokens behind a sequence's end have e = 0, and their rows of k become
    0, so that nothing of what lies there counts.

    ``roles`` "split": the output is a warp group's own, which gets rounded states and errors in
    ``num_turns`` buffers (``tilelang_roles_kernel``). "joint": whoever has the state writes it.

    Grid: blocks of ``block_v`` columns fastest, then value heads, then segments of
    ``segment_chunks`` chunks (sequences, where they are not cut). A segment behind a sequence's
    first starts from ``entry_state``.
    """
    del arch
    accum = "float32"
    v_blocks = head_dim_v // block_v
    consumers = block_v // CONSUMER_ROWS * _WARP
    producers = PRODUCER_THREADS[producer]
    has_roles = roles == "split"
    writers = OUTPUT_THREADS[roles]
    threads = consumers + writers + producers
    arrivals = producers or threads
    moves_registers = producer == "own_group"
    state_registers, output_registers, producer_registers = group_registers(block_v, roles)
    start_registers = 65536 // threads // 8 * 8
    unit = ELEMENTS_PER_STRIDE
    inner = head_dim_k if is_wy else chunk
    state_shape = (head_dim_v, head_dim_k) if is_v_first else (head_dim_k, head_dim_v)

    def num_pieces(bounds: Any, sequence: Any, span: Any) -> Any:
        """Segments of a sequence."""
        length = T.cast(bounds[sequence + 1] - bounds[sequence], "int32")
        return T.max(T.truncdiv(length + span - 1, span), 1)

    load_chunk, spread_decay, clear_rows = tile_macros(
        dtype=dtype,
        chunk=chunk,
        head_dim_k=head_dim_k,
        block_v=block_v,
        inner=inner,
        is_wy=is_wy,
        has_scores=has_scores,
    )
    advance = joint_macro(
        dtype=dtype,
        chunk=chunk,
        head_dim_k=head_dim_k,
        block_v=block_v,
        inner=inner,
        is_wy=is_wy,
        uses_wgmma=uses_wgmma,
    )
    advance_state, make_scores, write_chunk = role_macros(
        dtype=dtype,
        chunk=chunk,
        head_dim_k=head_dim_k,
        block_v=block_v,
        inner=inner,
        is_wy=is_wy,
        output_threads=writers,
    )

    @T.prim_func
    def gdn_chunk_tilelang_scan(
        q: T.ptr(dtype),
        k: T.ptr(dtype),
        v: T.ptr(dtype),
        cu_seqlens: T.ptr(seqlen_dtype),
        total_decay: T.ptr(accum),
        left_operand: T.ptr(dtype),
        scores: T.ptr(dtype),
        initial_state: T.ptr(accum),
        entry_state: T.ptr(accum),
        out: T.ptr(dtype),
        final_state: T.ptr(accum),
        scale: T.float32,
        q_stride_t: T.int64,
        q_stride_h: T.int64,
        k_stride_t: T.int64,
        k_stride_h: T.int64,
        v_stride_t: T.int64,
        v_stride_h: T.int64,
        out_stride_t: T.int64,
        out_stride_h: T.int64,
        num_tokens: T.int32,
        scratch_tokens: T.int32,
        num_sequences: T.int32,
        tokens_each: T.int32,
        segment_chunks: T.int32,
        num_segments: T.int32,
        num_heads: T.int32,
        num_v_heads: T.int32,
    ):
        """``v`` is u, head by head as it lies in scratch memory, where ``is_wy``."""
        qk_shape = (num_tokens, num_heads, head_dim_k)
        token_shape = (num_tokens, num_v_heads, head_dim_v)
        v_shape = (num_v_heads, scratch_tokens, head_dim_v) if is_wy else token_shape
        state_size = T.int64(head_dim_k * head_dim_v)
        Q = T.make_tensor(q, qk_shape, dtype, strides=(q_stride_t * unit, q_stride_h * unit, 1))
        K = T.make_tensor(k, qk_shape, dtype, strides=(k_stride_t * unit, k_stride_h * unit, 1))
        V = T.make_tensor(v, v_shape, dtype, strides=(v_stride_t * unit, v_stride_h * unit, 1))
        Out = T.make_tensor(
            out, token_shape, dtype, strides=(out_stride_t * unit, out_stride_h * unit, 1)
        )
        Bounds = T.make_tensor(cu_seqlens, (num_sequences + 1,), seqlen_dtype)
        Decay = T.make_tensor(
            total_decay, (num_v_heads, scratch_tokens), accum, strides=(T.int64(scratch_tokens), 1)
        )
        Left = T.make_tensor(
            left_operand,
            (num_v_heads, scratch_tokens, inner),
            dtype,
            strides=(T.int64(scratch_tokens) * inner, inner, 1),
        )
        Scores = T.make_tensor(
            scores,
            (num_v_heads, scratch_tokens, chunk),
            dtype,
            strides=(T.int64(scratch_tokens) * chunk, chunk, 1),
        )
        Initial = T.make_tensor(
            initial_state,
            (num_sequences * num_v_heads, *state_shape),
            accum,
            strides=(state_size, state_shape[1], 1),
        )
        Entry = T.make_tensor(
            entry_state,
            (num_segments * num_v_heads, head_dim_k, head_dim_v),
            accum,
            strides=(state_size, head_dim_v, 1),
        )
        Final = T.make_tensor(
            final_state,
            (num_sequences * num_v_heads, *state_shape),
            accum,
            strides=(state_size, state_shape[1], 1),
        )
        with T.Kernel(num_segments * (num_v_heads * v_blocks), threads=threads) as block:
            thread = T.get_thread_binding()
            q_ring = T.alloc_shared((num_stages, chunk, head_dim_k), dtype)
            k_ring = T.alloc_shared((num_stages, chunk, head_dim_k), dtype)
            v_ring = T.alloc_shared((num_stages, chunk, block_v), dtype)
            left_ring = T.alloc_shared((num_stages, chunk, inner), dtype)
            # Scores that are made here have one tile: their maker is done with one before the next.
            score_tiles = num_stages if has_scores else 1
            score_ring = T.alloc_shared((score_tiles, chunk, chunk), dtype)
            # Decay comes with the tiles: a load of its own would be under way at the fences before
            # products, which wait for all that a thread has begun to load.
            decay_ring = T.alloc_shared((num_stages, chunk + DECAY_PADDING), accum)
            out_tile = T.alloc_shared((chunk, block_v), dtype)
            growth = T.alloc_shared((2, chunk), accum)
            left = T.alloc_shared((2, chunk), accum)
            counts = T.alloc_shared((threads,), "int32")
            if has_roles:
                # What goes from the role of the state to that of the output.
                state_tile = T.alloc_shared((num_turns, block_v, head_dim_k), dtype)
                error_tile = T.alloc_shared((num_turns, block_v, chunk), dtype)
                output_growth = T.alloc_shared((2, chunk), accum)
                state_filled = T.alloc_barrier([consumers] * num_turns)
                error_filled = T.alloc_barrier([consumers] * num_turns)
                drained = T.alloc_barrier([writers] * num_turns)
            T.annotate_layout(
                {
                    v_ring: make_swizzled_layout(v_ring),
                    out_tile: make_swizzled_layout(out_tile),
                }
            )
            ready = T.alloc_barrier([arrivals] * num_stages)
            free = T.alloc_barrier([consumers + writers] * num_stages)
            state = T.alloc_fragment((block_v, head_dim_k), accum)
            rounded = T.alloc_fragment((block_v, head_dim_k), dtype)
            known = T.alloc_fragment((block_v, chunk), accum)
            result = T.alloc_fragment((chunk, block_v) if has_roles else (block_v, chunk), accum)
            values = T.alloc_fragment((block_v, chunk), accum)
            products = T.alloc_fragment((chunk, chunk), accum)
            errors = T.alloc_fragment((block_v, chunk), dtype)
            decayed = T.alloc_fragment((block_v, chunk), dtype)

            vb = T.alloc_var("int32", init=T.truncmod(block, v_blocks))
            head = T.alloc_var("int32", init=T.truncmod(T.truncdiv(block, v_blocks), num_v_heads))
            segment = T.alloc_var("int32", init=T.truncdiv(block, v_blocks * num_v_heads))
            group = T.alloc_var("int32", init=T.truncdiv(num_v_heads, num_heads))
            sequence = T.alloc_var("int32", init=segment)
            place = T.alloc_var("int32", init=0)
            span = T.alloc_var("int32", init=segment_chunks * chunk)
            first = T.alloc_var("int32", init=0)
            length = T.alloc_var("int32", init=tokens_each)
            each = T.alloc_var("int32", init=T.truncdiv(num_sequences + threads - 1, threads))
            total = T.alloc_var("int32", init=0)
            seen = T.alloc_var("int32", init=0)
            if is_cut and is_varlen:
                # Segments of a few sequences each are counted by a thread, an empty sequence has
                # one; then every thread walks over the sums.
                for i in T.serial(each):
                    if thread * each + i < num_sequences:
                        total += num_pieces(Bounds, thread * each + i, span)
                counts[thread] = total
                T.sync_threads()
                total = 0
                sequence = 0
                for i in T.serial(T.truncdiv(num_sequences + each - 1, each)):
                    total += counts[i]
                    if total <= segment:
                        seen = total
                        sequence = (i + 1) * each
                total = seen
                first = sequence
                for i in T.serial(each):
                    if first + i < num_sequences:
                        total += num_pieces(Bounds, first + i, span)
                        if total <= segment:
                            seen = total
                            sequence = first + i + 1
                place = segment - seen
            elif is_cut:
                each = T.max(T.truncdiv(tokens_each + span - 1, span), 1)
                sequence = T.truncdiv(segment, each)
                place = segment - sequence * each
            if is_varlen:
                length = 0
                if sequence < num_sequences:
                    first = T.cast(Bounds[sequence], "int32")
                    length = T.cast(Bounds[sequence + 1], "int32") - first
            else:
                first = sequence * tokens_each
                if sequence >= num_sequences:
                    length = 0
            begin = T.alloc_var("int32", init=0)
            end = T.alloc_var("int32", init=length)
            if is_cut:
                begin = place * span
                end = T.min(length, begin + span)
            num_chunks = T.alloc_var(
                "int32", init=T.max(T.truncdiv(end - begin + chunk - 1, chunk), 0)
            )

            if thread < consumers:
                if moves_registers:
                    T.set_max_nreg(state_registers, 1)
                own = T.alloc_var("int32", init=sequence * num_v_heads + head)
                T.clear(state)
                if has_initial_state:
                    if place == 0 and sequence < num_sequences:
                        for i, d in T.Parallel(block_v, head_dim_k):
                            if is_v_first:
                                state[i, d] = Initial[own, vb * block_v + i, d]
                            else:
                                state[i, d] = Initial[own, d, vb * block_v + i]
                if is_cut:
                    if place > 0 and sequence < num_sequences:
                        for i, d in T.Parallel(block_v, head_dim_k):
                            state[i, d] = Entry[segment * num_v_heads + head, d, vb * block_v + i]
                if producers == 0:
                    for s in T.unroll(num_stages - 1):
                        if s < num_chunks:
                            load_chunk(
                                Q, K, V, Left, Scores, Decay, q_ring, k_ring, v_ring, left_ring,
                                score_ring, decay_ring, ready, s, first + begin + s * chunk,
                                first + begin + s * chunk, head, group, vb,
                            )  # fmt: skip
                for t in T.serial(num_chunks):
                    slot = T.truncmod(t, num_stages)
                    num_left = end - begin - t * chunk
                    at = first + begin + t * chunk
                    T.barrier_wait(ready[slot], T.truncmod(T.truncdiv(t, num_stages), 2))
                    skipped = T.truncmod(at, DECAY_STEP)
                    spread_decay(
                        decay_ring, growth, left, slot, skipped, T.truncmod(t, 2), num_left, thread
                    )  # fmt: skip
                    last = T.exp2(decay_ring[slot, skipped + T.min(num_left, chunk) - 1])
                    if num_left < chunk:
                        clear_rows(k_ring, slot, num_left)
                        if uses_wgmma:
                            T.fence_proxy_async()
                    T.sync_threads(1, consumers)
                    if producers == 0:
                        if t + num_stages - 1 < num_chunks:
                            load_chunk(
                                Q, K, V, Left, Scores, Decay, q_ring, k_ring, v_ring, left_ring,
                                score_ring, decay_ring, ready,
                                T.truncmod(t + num_stages - 1, num_stages),
                                at + (num_stages - 1) * chunk, at + (num_stages - 1) * chunk, head,
                                group, vb,
                            )  # fmt: skip
                    if has_roles:
                        advance_state(
                            state, rounded, known, values, errors, decayed, k_ring, v_ring,
                            left_ring, state_tile, error_tile, growth, left, last, state_filled,
                            error_filled, drained, slot, T.truncmod(t, 2),
                            T.truncmod(t, num_turns),
                            T.truncmod(T.truncdiv(t, num_turns) + 1, 2), num_left,
                        )  # fmt: skip
                    else:
                        advance(
                            state, rounded, known, result, values, errors, decayed, k_ring, v_ring,
                            q_ring, left_ring, score_ring, out_tile, growth, left, last, Out, slot,
                            T.truncmod(t, 2), at, head, vb, num_left, scale, thread,
                        )  # fmt: skip
                    if producers > 0:
                        T.barrier_arrive(free[slot])
                if has_final_state:
                    if end == length and sequence < num_sequences:
                        for i, d in T.Parallel(block_v, head_dim_k):
                            if is_v_first:
                                Final[own, vb * block_v + i, d] = state[i, d]
                            else:
                                Final[own, d, vb * block_v + i] = state[i, d]
            elif thread < consumers + writers:
                if has_roles:
                    T.set_max_nreg(output_registers, int(output_registers > start_registers))
                    for t in T.serial(num_chunks):
                        slot = T.truncmod(t, num_stages)
                        num_left = end - begin - t * chunk
                        at = first + begin + t * chunk
                        T.barrier_wait(ready[slot], T.truncmod(T.truncdiv(t, num_stages), 2))
                        if thread - consumers < chunk:
                            output_growth[T.truncmod(t, 2), thread - consumers] = T.exp2(
                                decay_ring[slot, T.truncmod(at, DECAY_STEP) + thread - consumers]
                            )
                        # Also the end of the reads of the last chunk's tiles.
                        T.sync_threads(2, writers)
                        if not has_scores:
                            make_scores(
                                products, q_ring, k_ring, decay_ring, score_ring, slot,
                                T.truncmod(at, DECAY_STEP), scale,
                            )  # fmt: skip
                        write_chunk(
                            result, q_ring, score_ring, state_tile, error_tile, out_tile,
                            output_growth, state_filled, error_filled, drained, free, Out, slot,
                            slot if has_scores else 0, T.truncmod(t, 2), T.truncmod(t, num_turns),
                            T.truncmod(T.truncdiv(t, num_turns), 2), at, head, vb, num_left, scale,
                            thread - consumers,
                        )  # fmt: skip
            elif producers > 0:
                if moves_registers:
                    T.set_max_nreg(producer_registers, 0)
                for t in T.serial(num_chunks):
                    slot = T.truncmod(t, num_stages)
                    T.barrier_wait(free[slot], T.truncmod(T.truncdiv(t, num_stages) + 1, 2))
                    load_chunk(
                        Q, K, V, Left, Scores, Decay, q_ring, k_ring, v_ring, left_ring,
                        score_ring, decay_ring, ready, slot, first + begin + t * chunk,
                        first + begin + t * chunk, head, group, vb,
                    )  # fmt: skip

    return gdn_chunk_tilelang_scan
