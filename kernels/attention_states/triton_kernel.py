"""Triton device code that merges attention states: outputs over disjoint tokens, each with an LSE.

    lse = log sum_s exp(lse_s)        out = sum_s exp(lse_s - lse) out_s

A program owns BLOCK_R rows (a token and a head) and all of HEAD_DIM. The sum is online, in base 2
and fp32. A state whose LSE is infinite saw no token: its weight is 0 and its values, which may be
NaN, are not used. A row is read before it is written, so a result may take the place of a state.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_of(num_rows, num_heads, HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr):
    """(token, head, dimensions, mask of rows, mask of elements) of this program."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    is_row = row < num_rows
    # 64 bits: many states of many tokens pass 2^31 elements.
    token = (row // num_heads).to(tl.int64)
    return token, row % num_heads, offs_d, is_row, is_row[:, None] & (offs_d < HEAD_DIM)[None, :]


@triton.jit
def _added(m, den, acc, lse, value, to_base_2):
    """The online sum (m, den, acc) with one more state."""
    # Plus infinity is how some kernels of others mark a row without tokens.
    is_empty = (lse == -float("inf")) | (lse == float("inf"))
    x = tl.where(is_empty, -float("inf"), lse * to_base_2)
    m_new = tl.maximum(m, x)
    # Only empty states so far: any finite reference avoids -inf - (-inf).
    origin = tl.where(m_new == -float("inf"), 0.0, m_new)
    weight = tl.exp2(x - origin)
    rescale = tl.exp2(m - origin)
    acc = acc * rescale[:, None] + tl.where(is_empty[:, None], 0.0, value) * weight[:, None]
    return m_new, den * rescale + weight, acc


@triton.jit
def _store(
    out,
    lse,
    m,
    den,
    acc,
    to_base_2,
    token,
    head,
    offs_d,
    is_row,
    is_element,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
):
    """Writes the merged rows; 0 and -inf where no state saw a token."""
    total = tl.where(den == 0.0, 1.0, den)
    row = out + token * out_stride_t + head * out_stride_h
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(row[:, None] + offs_d[None, :], result, is_element)
    merged = (m + tl.log2(total)) / to_base_2
    tl.store(lse + token * lse_stride_t + head * lse_stride_h, merged, is_row)


@triton.jit
def merge_state_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    to_base_2,
    a_stride_t,
    a_stride_h,
    b_stride_t,
    b_stride_h,
    out_stride_t,
    out_stride_h,
    lse_a_stride_t,
    lse_a_stride_h,
    lse_b_stride_t,
    lse_b_stride_h,
    lse_stride_t,
    lse_stride_h,
    num_rows,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Merges two states that lie in two places; ``to_base_2`` turns the LSEs into powers of two."""
    token, head, offs_d, is_row, is_element = _rows_of(num_rows, num_heads, HEAD_DIM, BLOCK_R)
    row_a = out_a + token * a_stride_t + head * a_stride_h
    row_b = out_b + token * b_stride_t + head * b_stride_h
    x_a = tl.load(
        lse_a + token * lse_a_stride_t + head * lse_a_stride_h, is_row, other=-float("inf")
    )
    x_b = tl.load(
        lse_b + token * lse_b_stride_t + head * lse_b_stride_h, is_row, other=-float("inf")
    )
    a = tl.load(row_a[:, None] + offs_d[None, :], is_element, other=0.0).to(tl.float32)
    b = tl.load(row_b[:, None] + offs_d[None, :], is_element, other=0.0).to(tl.float32)
    m = tl.full(x_a.shape, -float("inf"), tl.float32)
    den = tl.zeros(x_a.shape, tl.float32)
    m, den, acc = _added(m, den, tl.zeros(a.shape, tl.float32), x_a, a, to_base_2)
    m, den, acc = _added(m, den, acc, x_b, b, to_base_2)
    _store(
        out,
        lse,
        m,
        den,
        acc,
        to_base_2,
        token,
        head,
        offs_d,
        is_row,
        is_element,
        out_stride_t,
        out_stride_h,
        lse_stride_t,
        lse_stride_h,
    )


@triton.jit
def merge_states_kernel(
    outs,
    lses,
    out,
    lse,
    to_base_2,
    outs_stride_t,
    outs_stride_s,
    outs_stride_h,
    lses_stride_t,
    lses_stride_s,
    lses_stride_h,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    num_rows,
    num_heads,
    num_states,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Merges ``num_states`` states that lie a stride apart, in their order."""
    token, head, offs_d, is_row, is_element = _rows_of(num_rows, num_heads, HEAD_DIM, BLOCK_R)
    values = outs + token * outs_stride_t + head * outs_stride_h
    exponents = lses + token * lses_stride_t + head * lses_stride_h
    m = tl.full([BLOCK_R], -float("inf"), tl.float32)
    den = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, triton.next_power_of_2(HEAD_DIM)], tl.float32)
    for _ in range(num_states):
        x = tl.load(exponents, is_row, other=-float("inf"))
        value = tl.load(values[:, None] + offs_d[None, :], is_element, other=0.0).to(tl.float32)
        m, den, acc = _added(m, den, acc, x, value, to_base_2)
        values += outs_stride_s
        exponents += lses_stride_s
    _store(
        out,
        lse,
        m,
        den,
        acc,
        to_base_2,
        token,
        head,
        offs_d,
        is_row,
        is_element,
        out_stride_t,
        out_stride_h,
        lse_stride_t,
        lse_stride_h,
    )
