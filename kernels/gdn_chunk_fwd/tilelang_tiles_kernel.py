"""TileLang device code of the scan's ring: loads of a chunk's tiles, gates, rows behind the end.

No ``from __future__ import annotations`` here: TileLang reads the annotations of its programs.
"""

from typing import Any

import tilelang.language as T

from .tilelang_config import DECAY_STEP

__all__ = ["tile_macros"]


def tile_macros(
    *,
    dtype: str,
    chunk: int,
    head_dim_k: int,
    block_v: int,
    inner: int,
    is_wy: bool,
    has_scores: bool,
) -> tuple[Any, Any, Any]:
    """(loads of a chunk, its decay spread, rows of k cleared), for these static sizes."""
    accum = "float32"

    @T.macro
    def load_chunk(
        Q, K, V, Left, Scores, Decay, q_ring, k_ring, v_ring, left_ring, score_ring, decay_ring,
        ready, slot, token, row, head, group, vb,
    ):  # fmt: skip
        """Tiles of one chunk; rows behind the tensors' ends arrive as zeros."""
        qk_head = T.truncdiv(head, group)
        early = row - T.truncmod(row, DECAY_STEP)
        T.tma_copy(
            Decay[head, early : early + chunk + DECAY_STEP],
            decay_ring[slot, 0 : chunk + DECAY_STEP],
            barrier=ready[slot],
        )
        T.tma_copy(
            K[token : token + chunk, qk_head, 0:head_dim_k],
            k_ring[slot, 0:chunk, 0:head_dim_k],
            barrier=ready[slot],
        )
        T.tma_copy(
            Left[head, row : row + chunk, 0:inner],
            left_ring[slot, 0:chunk, 0:inner],
            barrier=ready[slot],
        )
        if is_wy:
            T.tma_copy(
                V[head, row : row + chunk, vb * block_v : (vb + 1) * block_v],
                v_ring[slot, 0:chunk, 0:block_v],
                barrier=ready[slot],
            )
        else:
            T.tma_copy(
                V[token : token + chunk, head, vb * block_v : (vb + 1) * block_v],
                v_ring[slot, 0:chunk, 0:block_v],
                barrier=ready[slot],
            )
        T.tma_copy(
            Q[token : token + chunk, qk_head, 0:head_dim_k],
            q_ring[slot, 0:chunk, 0:head_dim_k],
            barrier=ready[slot],
        )
        if has_scores:
            T.tma_copy(
                Scores[head, row : row + chunk, 0:chunk],
                score_ring[slot, 0:chunk, 0:chunk],
                barrier=ready[slot],
            )
        # Boxes count as bytes; the arrivals of the threads come after them.
        T.barrier_arrive(ready[slot])

    @T.macro
    def spread_decay(decay_ring, growth, left, slot, skipped, gates, num_left, thread):
        """2^G of each token, and 2^(G_last - G), which is 0 behind the end.

        ``skipped`` values of the ring's slot are of tokens before the chunk.
        """
        if thread < chunk:
            growth[gates, thread] = T.exp2(decay_ring[slot, skipped + thread])
            left[gates, thread] = T.if_then_else(
                thread < num_left,
                T.exp2(
                    T.min(
                        decay_ring[slot, skipped + T.min(num_left, chunk) - 1]
                        - decay_ring[slot, skipped + thread],
                        0.0,
                    )
                ),
                T.cast(0, accum),
            )

    @T.macro
    def clear_rows(k_ring, slot, num_left):
        """Rows of k behind the end, which may hold NaN."""
        for c, d in T.Parallel(chunk, head_dim_k):
            if c >= num_left:
                k_ring[slot, c, d] = T.cast(0, dtype)

    return load_chunk, spread_decay, clear_rows
