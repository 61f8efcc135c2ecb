"""TileLang device code of one chunk where the warps that carry the state also write the output.

What one product leaves in a warp's registers is the left operand of the next, from the state over
the errors to the output; no warp waits for another.

No ``from __future__ import annotations`` here: TileLang reads the annotations of its programs.
"""

from typing import Any

import tilelang.language as T

from .tilelang_config import CONSUMER_ROWS

__all__ = ["joint_macro"]

_WARP = 32
_PIECE = 8
"""Elements of 16 bytes."""


def joint_macro(
    *,
    dtype: str,
    chunk: int,
    head_dim_k: int,
    block_v: int,
    inner: int,
    is_wy: bool,
    uses_wgmma: bool,
) -> Any:
    """The advance of the state by a chunk with the chunk's output, for these static sizes."""
    accum = "float32"

    @T.macro
    def multiply(a, b, c, is_cleared, transposes):
        """Issues c (+)= a b, or a b^T; ``finish`` waits for it."""
        if uses_wgmma:
            T.wgmma_gemm(
                a, b, c, transpose_B=transposes, policy=T.GemmWarpPolicy.FullRow,
                clear_accum=is_cleared,
            )  # fmt: skip
        else:
            T.gemm(
                a, b, c, transpose_B=transposes, policy=T.GemmWarpPolicy.FullRow,
                clear_accum=is_cleared,
            )  # fmt: skip

    @T.macro
    def finish(num_left):
        """Waits until no more than ``num_left`` products are under way."""
        if uses_wgmma:
            T.wait_wgmma(num_left)

    @T.macro
    def clear_behind(known, num_left):
        """Columns of tokens behind the end become 0; whole chunks have none and pay nothing."""
        if num_left < chunk:
            for i, c in T.Parallel(block_v, chunk):
                known[i, c] = T.if_then_else(c < num_left, known[i, c], T.cast(0, accum))

    @T.macro
    def scale_output(result, growth, gates, scale):
        for i, c in T.Parallel(block_v, chunk):
            result[i, c] *= growth[gates, c] * scale

    @T.macro
    def write_output(result, out_tile, Out, token, head, vb, num_left, thread):
        """A warp turns its 16 columns and writes rows of 32 bytes; no other warp is concerned."""
        for i, c in T.Parallel(block_v, chunk):
            out_tile[c, i] = T.cast(result[i, c], dtype)
        T.sync_warp()
        for r in T.unroll(chunk * CONSUMER_ROWS // _PIECE // _WARP):
            piece = r * _WARP + thread % _WARP
            c = piece // (CONSUMER_ROWS // _PIECE)
            i = thread // _WARP * CONSUMER_ROWS + piece % (CONSUMER_ROWS // _PIECE) * _PIECE
            if c < num_left:
                for j in T.vectorized(_PIECE):
                    Out[token + c, head, vb * block_v + i + j] = out_tile[c, i + j]
        T.sync_warp()

    @T.macro
    def advance(
        state, rounded, known, result, values, errors, decayed, k_ring, v_ring, q_ring, left_ring,
        score_ring, out_tile, growth, left, last, Out, slot, gates, token, head, vb, num_left,
        scale, thread,
    ):  # fmt: skip
        """One chunk: errors, output and the state behind it."""
        T.copy(state, rounded)
        if is_wy:
            multiply(rounded, left_ring[slot, 0:chunk, 0:inner], known, True, True)
        else:
            multiply(rounded, k_ring[slot, 0:chunk, 0:head_dim_k], known, True, True)
        multiply(rounded, q_ring[slot, 0:chunk, 0:head_dim_k], result, True, True)
        for i, c in T.Parallel(block_v, chunk):
            values[i, c] = T.cast(v_ring[slot, c, i], accum)
        finish(1)
        for i, c in T.Parallel(block_v, chunk):
            if is_wy:
                known[i, c] = values[i, c] - known[i, c]
            else:
                known[i, c] = values[i, c] - growth[gates, c] * known[i, c]
        clear_behind(known, num_left)
        if not is_wy:
            T.copy(known, errors)
            multiply(errors, left_ring[slot, 0:chunk, 0:inner], known, True, True)
            finish(1)
            scale_output(result, growth, gates, scale)
        for i, d in T.Parallel(block_v, head_dim_k):
            state[i, d] *= last
        if not is_wy:
            finish(0)
            # Rows of A behind the end are whatever the memory held.
            clear_behind(known, num_left)
        T.copy(known, errors)
        for i, c in T.Parallel(block_v, chunk):
            known[i, c] *= left[gates, c]
        T.copy(known, decayed)
        if is_wy:
            finish(0)
            scale_output(result, growth, gates, scale)
        multiply(errors, score_ring[slot, 0:chunk, 0:chunk], result, False, True)
        multiply(decayed, k_ring[slot, 0:chunk, 0:head_dim_k], state, False, False)
        # The output is written while the state moves on.
        finish(1)
        write_output(result, out_tile, Out, token, head, vb, num_left, thread)
        finish(0)

    return advance
