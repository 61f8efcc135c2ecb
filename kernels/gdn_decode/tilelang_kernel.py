"""TileLang device code of gated-delta-net decode: state tiles stream through a block.

A block owns a run of tiles, each ``block_v`` columns of the state of one value head of one
sequence, whole along K. Tiles reach registers by one of the ways in ``LOADS`` and leave them by one
of ``STORES``; while a tile is computed, the next ones of the run are under way. ``lanes`` threads
of a warp share a column, so that sums along K are shuffles and no block-wide barrier is part of a
step.

No ``from __future__ import annotations`` here: TileLang reads the annotations of its programs.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_linear_layout

__all__ = ["LOADS", "STORES", "VECTOR", "decode_program", "load_lead"]

LOADS = ("direct", "cp_async", "tma")
"""``direct``: global memory to registers, at the tile's turn. ``cp_async``, ``tma``: through a ring
in shared memory, ahead of the tile's turn."""
STORES = ("direct", "tma")
"""``direct``: registers to global memory. ``tma``: back into the ring, and from there by TMA."""

L2NORM_EPS = 1e-6

VECTOR = 4
"""Elements that a thread moves at once; strides of q, k, v and the output are passed in units of as
many where their rows are so aligned."""

_WARP = 32

# cp.async without the wait that TileLang would add: the ring waits for itself.
_IN_FLIGHT = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}


def load_lead(num_stages: int, store: str) -> int:
    """Tiles that are loaded ahead. A tile that TMA still stores keeps its place in the ring."""
    return num_stages - (2 if store == "tma" else 1)


def decode_program(
    *,
    arch: int,
    dtype: str,
    state_dtype: str,
    gate_dtype: str,
    beta_dtype: str,
    slot_dtype: str,
    seqlen_dtype: str,
    num_heads: int,
    num_v_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    is_v_first: bool,
    is_gate_fused: bool,
    has_beta_sigmoid: bool,
    beta_scale: float,
    use_l2norm: bool,
    has_slots: bool,
    has_state_in: bool,
    has_state_out: bool,
    is_varlen: bool,
    is_aligned: bool,
    block_v: int,
    threads: int,
    lanes: int,
    num_stages: int,
    load: str,
    store: str,
    state_eviction: str,
) -> Any:
    """S <- e^g S; e = beta (v - S^T k); S <- S + k e^T; o = scale S^T q, token by token.

    Both sums over the old state are taken at once: o = scale (e^g S^T q + e (k . q)). A negative
    slot leaves every state alone and gives 0. States read and written may be the same memory: a
    tile is read before it is written, and no other block touches it.

    Grid: runs of ``block_tiles`` tiles, in the order of sequences, value heads, columns.
    """
    del arch
    accum = "float32"
    v_tiles = head_dim_v // block_v
    groups = threads // lanes
    columns = block_v // groups
    rows = head_dim_k // lanes
    # Of a thread: rows along K in vectors, then columns; KV states have vectors along V.
    per_warp = _WARP // lanes
    lane_step = 1 if is_v_first else per_warp
    reaches = [lane_step << i for i in range(lanes.bit_length() - 1)]
    has_ring = load != "direct" and has_state_in
    # Of the next tile; how many tokens a packed sequence has is known at its turn.
    fetches_ahead = has_ring and not is_varlen
    lead = load_lead(num_stages, store)
    stores_by_tma = store == "tma" and has_ring and has_state_out
    tile_shape = (block_v, head_dim_k) if is_v_first else (head_dim_k, block_v)
    state_shape = (head_dim_v, head_dim_k) if is_v_first else (head_dim_k, head_dim_v)
    unit = VECTOR if is_aligned else 1
    group_size = num_v_heads // num_heads

    def lane_of(thread: Any) -> Any:
        """Which of the threads of a column."""
        return thread % lanes if is_v_first else thread % _WARP // per_warp

    def group_of(thread: Any) -> Any:
        """Which column of those that the block takes at once."""
        if is_v_first:
            return thread // lanes
        return thread // _WARP * per_warp + thread % per_warp

    def head_of(item: Any) -> Any:
        return T.truncmod(T.truncdiv(item, v_tiles), num_v_heads)

    def slot_of(slots: Any, sequence: Any) -> Any:
        return T.cast(slots[sequence], "int32") if has_slots else sequence

    def row_of(i: Any, lane: Any) -> Any:
        """Place along K of a thread's row i: vectors, those of the lanes in turn."""
        return (i // VECTOR * lanes + lane) * VECTOR + i % VECTOR

    def column_of(c: Any, group: Any) -> Any:
        """Place along V, inside the tile, of a thread's column c."""
        if is_v_first:
            return c * groups + group
        return (c // VECTOR * groups + group) * VECTOR + c % VECTOR

    def at(c: Any, i: Any) -> Any:
        """Place in a thread's registers of row i of column c: vectors lie together."""
        return c * rows + i if is_v_first else i * columns + c

    @T.macro
    def load_vector(source, target, token, head, lane):
        """A thread's rows of one token's q or k."""
        for i in T.unroll(rows // VECTOR):
            for j in T.vectorized(VECTOR):
                target[i * VECTOR + j] = source[token, head, (i * lanes + lane) * VECTOR + j]

    @T.macro
    def fetch(
        Q, K, V, Gate, Beta, ALog, DtBias, q_raw, k_raw, v_raw, gate_raw, beta_raw, head_raw,
        token, head, v_tile, lane, group,
    ):  # fmt: skip
        """What a token brings, into registers; whoever uses it waits for it."""
        load_vector(Q, q_raw, token, T.truncdiv(head, group_size), lane)
        load_vector(K, k_raw, token, T.truncdiv(head, group_size), lane)
        for c in T.unroll(columns):
            v_raw[c] = V[token, head, v_tile * block_v + column_of(c, group)]
        gate_raw[0] = Gate[token, head]
        beta_raw[0] = Beta[token, head]
        if is_gate_fused:
            head_raw[0] = ALog[head]
            head_raw[1] = DtBias[head]

    @T.macro
    def load_tile(State, ring, ready, place, row, v_tile):
        if load == "tma":
            if is_v_first:
                T.tma_copy(
                    State[row, v_tile * block_v : (v_tile + 1) * block_v, 0:head_dim_k],
                    ring[place, 0:block_v, 0:head_dim_k],
                    barrier=ready[place],
                    eviction_policy=state_eviction,
                )
            else:
                T.tma_copy(
                    State[row, 0:head_dim_k, v_tile * block_v : (v_tile + 1) * block_v],
                    ring[place, 0:head_dim_k, 0:block_v],
                    barrier=ready[place],
                    eviction_policy=state_eviction,
                )
        elif is_v_first:
            for a, b in T.Parallel(*tile_shape, annotations=_IN_FLIGHT):
                ring[place, a, b] = State[row, v_tile * block_v + a, b]
        else:
            for a, b in T.Parallel(*tile_shape, annotations=_IN_FLIGHT):
                ring[place, a, b] = State[row, a, v_tile * block_v + b]

    @T.macro
    def store_tile(ring, State, place, row, v_tile):
        if is_v_first:
            T.tma_copy(
                ring[place, 0:block_v, 0:head_dim_k],
                State[row, v_tile * block_v : (v_tile + 1) * block_v, 0:head_dim_k],
            )
        else:
            T.tma_copy(
                ring[place, 0:head_dim_k, 0:block_v],
                State[row, 0:head_dim_k, v_tile * block_v : (v_tile + 1) * block_v],
            )

    @T.macro
    def take(source, state, row, v_tile, lane, group):
        """A tile of the ring or of the pool to registers, in fp32."""
        if is_v_first:
            for c in T.unroll(columns):
                for i in T.unroll(rows // VECTOR):
                    for j in T.vectorized(VECTOR):
                        state[c * rows + i * VECTOR + j] = T.cast(
                            source[
                                row,
                                v_tile * block_v + c * groups + group,
                                (i * lanes + lane) * VECTOR + j,
                            ],
                            accum,
                        )
        else:
            for i in T.unroll(rows):
                for c in T.unroll(columns // VECTOR):
                    for j in T.vectorized(VECTOR):
                        state[i * columns + c * VECTOR + j] = T.cast(
                            source[
                                row,
                                row_of(i, lane),
                                v_tile * block_v + (c * groups + group) * VECTOR + j,
                            ],
                            accum,
                        )

    @T.macro
    def put(state, target, row, v_tile, lane, group):
        """Registers to a tile of the ring or of the pool."""
        if is_v_first:
            for c in T.unroll(columns):
                for i in T.unroll(rows // VECTOR):
                    for j in T.vectorized(VECTOR):
                        target[
                            row,
                            v_tile * block_v + c * groups + group,
                            (i * lanes + lane) * VECTOR + j,
                        ] = T.cast(state[c * rows + i * VECTOR + j], state_dtype)
        else:
            for i in T.unroll(rows):
                for c in T.unroll(columns // VECTOR):
                    for j in T.vectorized(VECTOR):
                        target[
                            row,
                            row_of(i, lane),
                            v_tile * block_v + (c * groups + group) * VECTOR + j,
                        ] = T.cast(state[i * columns + c * VECTOR + j], state_dtype)

    @T.macro
    def unpack(q_raw, k_raw, q_t, k_t, sums, scale):
        """Scaled q and k in fp32, normalised if asked for; sums[2] = k . q."""
        for i in T.unroll(rows):
            q_t[i] = T.cast(q_raw[i], accum)
            k_t[i] = T.cast(k_raw[i], accum)
        for n in T.unroll(3):
            sums[n] = 0
        for i in T.unroll(rows):
            sums[2] += q_t[i] * k_t[i]
            if use_l2norm:
                sums[0] += q_t[i] * q_t[i]
                sums[1] += k_t[i] * k_t[i]
        for r in reaches:
            sums[2] += T.shfl_xor(sums[2], r)
            if use_l2norm:
                sums[0] += T.shfl_xor(sums[0], r)
                sums[1] += T.shfl_xor(sums[1], r)
        if use_l2norm:
            sums[0] = T.rsqrt(sums[0] + L2NORM_EPS)
            sums[1] = T.rsqrt(sums[1] + L2NORM_EPS)
            sums[2] = sums[2] * sums[0] * sums[1]
            for i in T.unroll(rows):
                q_t[i] *= sums[0]
                k_t[i] *= sums[1]
        sums[2] *= scale
        for i in T.unroll(rows):
            q_t[i] *= scale

    @T.macro
    def gates(gate_raw, beta_raw, head_raw, gate):
        """gate[0] = e^g, gate[1] = beta; softplus is linear above 20, as torch has it."""
        gate[0] = T.cast(gate_raw[0], accum)
        if is_gate_fused:
            gate[0] += head_raw[1]
            gate[0] = -T.exp(head_raw[0]) * T.if_then_else(
                gate[0] > 20.0, gate[0], T.log(1.0 + T.exp(T.min(gate[0], 20.0)))
            )
        gate[0] = T.exp(gate[0])
        gate[1] = T.cast(beta_raw[0], accum)
        if has_beta_sigmoid:
            gate[1] = beta_scale / (1.0 + T.exp(-gate[1]))

    @T.macro
    def step(
        state, q_t, k_t, v_raw, sums, gate, known, read, Out, token, head, v_tile, lane, group,
        is_live,
    ):  # fmt: skip
        """One token: the state moves on, the first lane of a column writes its output."""
        for c in T.unroll(columns):
            known[c] = 0
            read[c] = 0
            for i in T.unroll(rows):
                known[c] += state[at(c, i)] * k_t[i]
                read[c] += state[at(c, i)] * q_t[i]
        for r in reaches:
            for c in T.unroll(columns):
                known[c] += T.shfl_xor(known[c], r)
                read[c] += T.shfl_xor(read[c], r)
        for c in T.unroll(columns):
            known[c] = gate[1] * (T.cast(v_raw[c], accum) - gate[0] * known[c])
            read[c] = gate[0] * read[c] + known[c] * sums[2]
            for i in T.unroll(rows):
                state[at(c, i)] = gate[0] * state[at(c, i)] + known[c] * k_t[i]
        if lane == 0:
            for c in T.unroll(columns):
                Out[token, head, v_tile * block_v + column_of(c, group)] = T.cast(
                    T.if_then_else(is_live, read[c], T.cast(0, accum)), dtype
                )

    @T.prim_func
    def gdn_decode_tilelang(
        q: T.ptr(dtype),
        k: T.ptr(dtype),
        v: T.ptr(dtype),
        gate: T.ptr(gate_dtype),
        beta: T.ptr(beta_dtype),
        a_log: T.ptr(accum),
        dt_bias: T.ptr(accum),
        state_in: T.ptr(state_dtype),
        state_out: T.ptr(state_dtype),
        slots: T.ptr(slot_dtype),
        cu_seqlens: T.ptr(seqlen_dtype),
        out: T.ptr(dtype),
        scale: T.float32,
        q_stride_t: T.int64,
        q_stride_h: T.int64,
        k_stride_t: T.int64,
        k_stride_h: T.int64,
        v_stride_t: T.int64,
        v_stride_h: T.int64,
        out_stride_t: T.int64,
        out_stride_h: T.int64,
        batch: T.int32,
        num_steps: T.int32,
        num_tokens: T.int32,
        num_slots: T.int32,
        block_tiles: T.int32,
        num_blocks: T.int32,
    ):
        qk_shape = (num_tokens, num_heads, head_dim_k)
        v_shape = (num_tokens, num_v_heads, head_dim_v)
        pool_shape = (num_slots * num_v_heads, *state_shape)
        pool_strides = (T.int64(head_dim_k * head_dim_v), state_shape[1], 1)
        Q = T.make_tensor(q, qk_shape, dtype, strides=(q_stride_t * unit, q_stride_h * unit, 1))
        K = T.make_tensor(k, qk_shape, dtype, strides=(k_stride_t * unit, k_stride_h * unit, 1))
        V = T.make_tensor(v, v_shape, dtype, strides=(v_stride_t * unit, v_stride_h * unit, 1))
        Out = T.make_tensor(
            out, v_shape, dtype, strides=(out_stride_t * unit, out_stride_h * unit, 1)
        )
        Gate = T.make_tensor(gate, (num_tokens, num_v_heads), gate_dtype)
        Beta = T.make_tensor(beta, (num_tokens, num_v_heads), beta_dtype)
        ALog = T.make_tensor(a_log, (num_v_heads,), accum)
        DtBias = T.make_tensor(dt_bias, (num_v_heads,), accum)
        StateIn = T.make_tensor(state_in, pool_shape, state_dtype, strides=pool_strides)
        StateOut = T.make_tensor(state_out, pool_shape, state_dtype, strides=pool_strides)
        Slots = T.make_tensor(slots, (batch,), slot_dtype)
        Bounds = T.make_tensor(cu_seqlens, (batch + 1,), seqlen_dtype)
        with T.Kernel(num_blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            lane = T.alloc_var("int32", init=lane_of(thread))
            group = T.alloc_var("int32", init=group_of(thread))
            state = T.alloc_local((rows * columns,), accum)
            q_raw = T.alloc_local((rows,), dtype)
            k_raw = T.alloc_local((rows,), dtype)
            v_raw = T.alloc_local((columns,), dtype)
            gate_raw = T.alloc_local((1,), gate_dtype)
            beta_raw = T.alloc_local((1,), beta_dtype)
            head_raw = T.alloc_local((2,), accum)
            q_t = T.alloc_local((rows,), accum)
            k_t = T.alloc_local((rows,), accum)
            v_t = T.alloc_local((columns,), accum)
            sums = T.alloc_local((3,), accum)
            gate_t = T.alloc_local((2,), accum)
            known = T.alloc_local((columns,), accum)
            read = T.alloc_local((columns,), accum)
            if has_ring:
                ring = T.alloc_shared((num_stages, *tile_shape), state_dtype)
                T.annotate_layout({ring: make_linear_layout(ring)})
                ready = ring
                if load == "tma":
                    ready = T.alloc_barrier([threads] * num_stages)
            first_item = T.alloc_var("int32", init=block * block_tiles)
            count = T.alloc_var(
                "int32", init=T.min(block_tiles, batch * (num_v_heads * v_tiles) - first_item)
            )
            head = T.alloc_var("int32", init=0)
            sequence = T.alloc_var("int32", init=0)
            slot = T.alloc_var("int32", init=0)
            v_tile = T.alloc_var("int32", init=0)
            first = T.alloc_var("int32", init=0)
            num_here = T.alloc_var("int32", init=num_steps)
            item = T.alloc_var("int32", init=first_item)
            ahead = T.alloc_var("int32", init=0)
            ahead_slot = T.alloc_var("int32", init=0)

            if has_ring:
                for s in T.unroll(lead):
                    if s < count:
                        ahead = first_item + s
                        ahead_slot = slot_of(Slots, T.truncdiv(ahead, num_v_heads * v_tiles))
                        if ahead_slot >= 0:
                            load_tile(
                                StateIn, ring, ready, s, ahead_slot * num_v_heads + head_of(ahead),
                                T.truncmod(ahead, v_tiles),
                            )  # fmt: skip
                        if load == "tma":
                            T.barrier_arrive(ready[s])
                    if load == "cp_async":
                        T.ptx_commit_group()
            if fetches_ahead:
                fetch(
                    Q, K, V, Gate, Beta, ALog, DtBias, q_raw, k_raw, v_raw, gate_raw,
                    beta_raw, head_raw,
                    T.truncdiv(first_item, num_v_heads * v_tiles) * num_steps, head_of(first_item),
                    T.truncmod(first_item, v_tiles), lane, group,
                )  # fmt: skip
            for t in T.serial(count):
                place = T.truncmod(t, num_stages)
                item = first_item + t
                head = head_of(item)
                sequence = T.truncdiv(item, num_v_heads * v_tiles)
                v_tile = T.truncmod(item, v_tiles)
                slot = slot_of(Slots, sequence)
                if is_varlen:
                    first = T.cast(Bounds[sequence], "int32")
                    num_here = T.cast(Bounds[sequence + 1], "int32") - first
                else:
                    first = sequence * num_steps
                if not fetches_ahead:
                    if num_here > 0:
                        fetch(
                            Q, K, V, Gate, Beta, ALog, DtBias, q_raw, k_raw, v_raw, gate_raw,
                            beta_raw, head_raw,
                            first, head, v_tile, lane, group,
                        )  # fmt: skip
                if has_ring:
                    ahead = item + lead
                    if load == "tma":
                        T.barrier_wait(ready[place], T.truncmod(T.truncdiv(t, num_stages), 2))
                    else:
                        T.ptx_wait_group(lead - 1)
                    if stores_by_tma:
                        # Of the stores under way, the oldest has the place that is filled next.
                        T.tma_store_wait(1)
                    T.sync_threads()
                    if t + lead < count:
                        ahead_slot = slot_of(Slots, T.truncdiv(ahead, num_v_heads * v_tiles))
                        if ahead_slot >= 0:
                            load_tile(
                                StateIn, ring, ready, T.truncmod(t + lead, num_stages),
                                ahead_slot * num_v_heads + head_of(ahead),
                                T.truncmod(ahead, v_tiles),
                            )  # fmt: skip
                        if load == "tma":
                            T.barrier_arrive(ready[T.truncmod(t + lead, num_stages)])
                    if load == "cp_async":
                        T.ptx_commit_group()
                for i in T.unroll(rows * columns):
                    state[i] = 0
                if has_state_in:
                    if slot >= 0:
                        if has_ring:
                            take(ring, state, place, 0, lane, group)
                        else:
                            take(StateIn, state, slot * num_v_heads + head, v_tile, lane, group)
                for n in T.serial(num_here):
                    unpack(q_raw, k_raw, q_t, k_t, sums, scale)
                    gates(gate_raw, beta_raw, head_raw, gate_t)
                    for c in T.unroll(columns):
                        v_t[c] = T.cast(v_raw[c], accum)
                    if n + 1 < num_here:
                        fetch(
                            Q, K, V, Gate, Beta, ALog, DtBias, q_raw, k_raw, v_raw, gate_raw,
                            beta_raw, head_raw,
                            first + n + 1, head, v_tile, lane, group,
                        )  # fmt: skip
                    elif fetches_ahead and t + 1 < count:
                        fetch(
                            Q, K, V, Gate, Beta, ALog, DtBias, q_raw, k_raw, v_raw, gate_raw,
                            beta_raw, head_raw,
                            T.truncdiv(item + 1, num_v_heads * v_tiles) * num_steps,
                            head_of(item + 1), T.truncmod(item + 1, v_tiles), lane, group,
                        )  # fmt: skip
                    step(
                        state, q_t, k_t, v_t, sums, gate_t, known, read, Out, first + n, head,
                        v_tile,
                        lane, group, slot >= 0,
                    )  # fmt: skip
                if has_state_out:
                    if stores_by_tma:
                        if slot >= 0:
                            put(state, ring, place, 0, lane, group)
                            T.fence_proxy_async()
                            T.sync_threads()
                            store_tile(ring, StateOut, place, slot * num_v_heads + head, v_tile)
                        else:
                            T.tma_store_arrive()
                    elif slot >= 0:
                        put(state, StateOut, slot * num_v_heads + head, v_tile, lane, group)
            if stores_by_tma:
                T.tma_store_wait(0)

    return gdn_decode_tilelang
