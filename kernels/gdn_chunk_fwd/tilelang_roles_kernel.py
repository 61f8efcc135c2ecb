"""TileLang device code of the scan in two roles: some warp groups carry the state, one the output.

The chain from chunk to chunk is then two products of the state's groups. They leave the rounded
state and the errors in shared memory, where the output's group multiplies them with q and P while
the state moves on.

No ``from __future__ import annotations`` here: TileLang reads the annotations of its programs.
"""

from typing import Any

import tilelang.language as T

__all__ = ["role_macros"]

_PIECE = 8
"""Elements of 16 bytes."""
_OUTPUT_BARRIER = 2
"""Named barrier of the output's group."""


def role_macros(
    *,
    dtype: str,
    chunk: int,
    head_dim_k: int,
    block_v: int,
    inner: int,
    is_wy: bool,
    output_threads: int,
) -> tuple[Any, Any, Any]:
    """(advance of the state by a chunk, its scores, its output), for these static sizes.

    ``filled`` and ``drained`` count the turns of the buffers that go from role to role: index
    ``turn`` of them, a state before an error.
    """
    accum = "float32"
    policy = T.GemmWarpPolicy.FullRow

    @T.macro
    def multiply(a, b, c, is_cleared, transposes):
        T.wgmma_gemm(a, b, c, transpose_B=transposes, policy=policy, clear_accum=is_cleared)

    @T.macro
    def clear_behind(known, num_left):
        """Columns of tokens behind the end become 0; whole chunks have none and pay nothing."""
        if num_left < chunk:
            for i, c in T.Parallel(block_v, chunk):
                known[i, c] = T.if_then_else(c < num_left, known[i, c], T.cast(0, accum))

    @T.macro
    def advance_state(
        state, rounded, known, values, errors, decayed, k_ring, v_ring, left_ring, state_tile,
        error_tile, growth, left, last, state_filled, error_filled, drained, slot, gates, turn,
        parity, num_left,
    ):  # fmt: skip
        """Errors of the chunk and the state behind it."""
        T.copy(state, rounded)
        if is_wy:
            multiply(rounded, left_ring[slot, 0:chunk, 0:inner], known, True, True)
        else:
            multiply(rounded, k_ring[slot, 0:chunk, 0:head_dim_k], known, True, True)
        T.barrier_wait(drained[turn], parity)
        T.copy(rounded, state_tile[turn, 0:block_v, 0:head_dim_k])
        T.fence_proxy_async()
        T.barrier_arrive(state_filled[turn])
        for i, c in T.Parallel(block_v, chunk):
            values[i, c] = T.cast(v_ring[slot, c, i], accum)
        for i, d in T.Parallel(block_v, head_dim_k):
            state[i, d] *= last
        T.wait_wgmma(0)
        for i, c in T.Parallel(block_v, chunk):
            if is_wy:
                known[i, c] = values[i, c] - known[i, c]
            else:
                known[i, c] = values[i, c] - growth[gates, c] * known[i, c]
        clear_behind(known, num_left)
        if not is_wy:
            T.copy(known, errors)
            multiply(errors, left_ring[slot, 0:chunk, 0:inner], known, True, True)
            T.wait_wgmma(0)
            # Rows of A behind the end are whatever the memory held.
            clear_behind(known, num_left)
        T.copy(known, errors)
        for i, c in T.Parallel(block_v, chunk):
            known[i, c] *= left[gates, c]
        T.copy(known, decayed)
        multiply(decayed, k_ring[slot, 0:chunk, 0:head_dim_k], state, False, False)
        T.copy(errors, error_tile[turn, 0:block_v, 0:chunk])
        T.fence_proxy_async()
        T.barrier_arrive(error_filled[turn])
        T.wait_wgmma(0)

    @T.macro
    def make_scores(products, q_ring, k_ring, decay_ring, score_ring, slot, skipped, scale):
        """P = scale tril(q k^T Gamma), rounded, beside the advance of the state.

        What lies behind the end of k or of the decay is above the diagonal of every row that
        counts, and is 0 there whatever it was.
        """
        multiply(
            q_ring[slot, 0:chunk, 0:head_dim_k],
            k_ring[slot, 0:chunk, 0:head_dim_k],
            products,
            True,
            True,
        )
        T.wait_wgmma(0)
        # Two steps: exponentials under a condition would be as many branches, one after the other.
        for c, j in T.Parallel(chunk, chunk):
            products[c, j] *= scale * T.exp2(
                T.min(decay_ring[slot, skipped + c] - decay_ring[slot, skipped + j], 0.0)
            )
        for c, j in T.Parallel(chunk, chunk):
            products[c, j] = T.if_then_else(j <= c, products[c, j], T.cast(0, accum))
        T.copy(products, score_ring[0, 0:chunk, 0:chunk])
        T.fence_proxy_async()
        T.sync_threads(_OUTPUT_BARRIER, output_threads)

    @T.macro
    def write_output(
        result, q_ring, score_ring, state_tile, error_tile, out_tile, growth, state_filled,
        error_filled, drained, free, Out, slot, score_slot, gates, turn, parity, token, head, vb,
        num_left, scale, thread,
    ):  # fmt: skip
        """Output of the chunk; ``thread`` counts from the group's first."""
        T.barrier_wait(state_filled[turn], parity)
        multiply(
            q_ring[slot, 0:chunk, 0:head_dim_k],
            state_tile[turn, 0:block_v, 0:head_dim_k],
            result,
            True,
            True,
        )
        T.wait_wgmma(0)
        for c, i in T.Parallel(chunk, block_v):
            result[c, i] *= growth[gates, c] * scale
        T.barrier_wait(error_filled[turn], parity)
        multiply(
            score_ring[score_slot, 0:chunk, 0:chunk],
            error_tile[turn, 0:block_v, 0:chunk],
            result,
            False,
            True,
        )
        T.wait_wgmma(0)
        T.barrier_arrive(drained[turn])
        T.barrier_arrive(free[slot])
        T.copy(result, out_tile)
        T.sync_threads(_OUTPUT_BARRIER, output_threads)
        for r in T.unroll(chunk * block_v // _PIECE // output_threads):
            piece = r * output_threads + thread
            c = piece // (block_v // _PIECE)
            i = piece % (block_v // _PIECE) * _PIECE
            if c < num_left:
                for j in T.vectorized(_PIECE):
                    Out[token + c, head, vb * block_v + i + j] = out_tile[c, i + j]

    return advance_state, make_scores, write_output
