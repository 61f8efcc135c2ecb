"""Triton device code: merging the partial results of a pair, in a launch of its own or in place.

``result`` is (out, lse, partial_out, partial_lse, lse_factor, out_stride_t, out_stride_h), with
``RESULT`` (NUM_QO_HEADS, GROUP_SIZE, QUERY_LEN, BLOCK_M, HEAD_DIM_V, PADDED_DIM_V, BLOCK_S,
STORE_LSE); ``triton_kernel_partition`` has the other tuples.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_kernel_partition import pieces_of_pair


@triton.jit
def merged_rows(
    result, slot, distance, count, row, is_row, MERGE_ROWS: tl.constexpr, RESULT: tl.constexpr
):
    """(output [MERGE_ROWS, PADDED_DIM_V], base-2 LSE) of rows of a pair from its partial results.

    o = sum_s 2^(lse_s - lse) o_s, in the order of the pieces, so the bits do not depend on which
    block finished last. Pieces that saw no token have LSE -inf and weight 0.
    """
    _, _, partial_out, partial_lse, _, _, _ = result
    offs_d = tl.arange(0, RESULT[5])
    is_dim = offs_d < RESULT[4]
    m = tl.full([MERGE_ROWS], -float("inf"), tl.float32)
    den = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, RESULT[5]], tl.float32)
    for s0 in range(0, count, RESULT[6]):
        piece = s0 + tl.arange(0, RESULT[6])
        index = (slot + piece * distance).to(tl.int64)[None, :] * RESULT[3] + row[:, None]
        is_part = is_row[:, None] & (piece < count)[None, :]
        # .cg: another multiprocessor wrote these, so the first-level cache must not answer.
        lse = tl.load(partial_lse + index, is_part, other=-float("inf"), cache_modifier=".cg")
        part = tl.load(
            partial_out + index[:, :, None] * RESULT[4] + offs_d[None, None, :],
            is_part[:, :, None] & is_dim[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m, tl.max(lse, 1))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(lse - m_safe[:, None])
        rescale = tl.exp2(m - m_safe)
        den = den * rescale + tl.sum(weight, 1)
        acc = acc * rescale[:, None] + tl.sum(part * weight[:, :, None], 1)
        m = m_new
    return acc / tl.where(den > 0, den, 1.0)[:, None], m + tl.log2(den)


@triton.jit
def store_merged_rows(
    result,
    slot,
    distance,
    count,
    request,
    pair,
    first_row,
    MERGE_ROWS: tl.constexpr,
    RESULT: tl.constexpr,
):
    """Merges rows of a pair and writes them where they belong; rows of padding write nothing."""
    out, lse, _, _, lse_factor, out_stride_t, out_stride_h = result
    GROUP_SIZE: tl.constexpr = RESULT[1]
    QUERY_LEN: tl.constexpr = RESULT[2]
    ROW_TILES: tl.constexpr = (GROUP_SIZE * QUERY_LEN + RESULT[3] - 1) // RESULT[3]
    row = first_row + tl.arange(0, MERGE_ROWS)
    row_of_head = (pair % ROW_TILES) * RESULT[3] + row
    is_row = row_of_head < GROUP_SIZE * QUERY_LEN
    merged, merged_lse = merged_rows(result, slot, distance, count, row, is_row, MERGE_ROWS, RESULT)
    token = request * QUERY_LEN + row_of_head // GROUP_SIZE
    head = pair // ROW_TILES * GROUP_SIZE + row_of_head % GROUP_SIZE
    to = out + token.to(tl.int64) * out_stride_t + head * out_stride_h
    offs_d = tl.arange(0, RESULT[5])
    mask = is_row[:, None] & (offs_d < RESULT[4])[None, :]
    tl.store(to[:, None] + offs_d[None, :], merged.to(out.dtype.element_ty), mask)
    if RESULT[7]:
        tl.store(lse + token * RESULT[0] + head, merged_lse * lse_factor, is_row)


@triton.jit
def merge_kernel(
    indptr,
    lengths,
    out,
    lse,
    partial_out,
    partial_lse,
    lse_factor,
    out_stride_t,
    out_stride_h,
    window_left,
    batch,
    num_splits,
    split_tokens,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT_RULE: tl.constexpr,
    DENSE_TABLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    STORE_LSE: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Merges one row of one pair; grid (rows of a tile x pairs of a request, requests).

    WAIT: launched while the attention kernel still runs, to be past its own start by then.
    """
    PAIRS: tl.constexpr = (
        NUM_QO_HEADS // GROUP_SIZE * ((GROUP_SIZE * QUERY_LEN + BLOCK_M - 1) // BLOCK_M)
    )
    TABLE: tl.constexpr = (PAGE_SIZE, DENSE_TABLE, QUERY_LEN, HAS_WINDOW)
    SPLIT: tl.constexpr = (SPLIT_RULE, BLOCK_N, BLOCK_B, PAIRS)
    RESULT: tl.constexpr = (
        NUM_QO_HEADS,
        GROUP_SIZE,
        QUERY_LEN,
        BLOCK_M,
        HEAD_DIM_V,
        PADDED_DIM_V,
        BLOCK_S,
        STORE_LSE,
    )
    table = (indptr, indptr, lengths, 0, window_left)
    splits = (batch, num_splits, split_tokens)
    result = (out, lse, partial_out, partial_lse, lse_factor, out_stride_t, out_stride_h)
    pair = tl.program_id(0) // BLOCK_M
    request = tl.program_id(1)
    slot, distance, count = pieces_of_pair(table, splits, request, pair, TABLE, SPLIT)
    if WAIT:
        gdc_launch_dependents()
        gdc_wait()
    if count <= 1:
        return  # the only piece wrote the result itself
    row = tl.program_id(0) % BLOCK_M
    store_merged_rows(result, slot, distance, count, request, pair, row, 1, RESULT)
