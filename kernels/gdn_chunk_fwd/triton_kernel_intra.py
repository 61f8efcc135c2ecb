"""Triton device code of what needs one chunk alone: the inverse and what is made with it."""

import triton
import triton.language as tl


@triton.jit
def _diagonal_inverse(lower, CHUNK: tl.constexpr, BASE: tl.constexpr):
    """(I + lower)^-1 of the diagonal blocks of BASE rows by substitution, 0 elsewhere.

    All blocks at once, a row of each a step.
    """
    BLOCKS: tl.constexpr = CHUNK // BASE
    block = tl.arange(0, BLOCKS)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    tiles = tl.reshape(lower, [BLOCKS, BASE, BLOCKS, BASE])
    inverse = -tl.sum(tl.where(is_diagonal, tiles, 0.0), 2)
    rows = tl.arange(0, BASE)
    for i in range(2, BASE):
        is_row = (rows == i)[None, :, None]
        # Row i of -lower, whose entries from column i on are 0.
        row = tl.sum(tl.where(is_row, inverse, 0.0), 1)
        row += tl.sum(row[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, row[:, None, :], inverse)
    inverse += (rows[:, None] == rows[None, :]).to(tl.float32)[None, :, :]
    spread = tl.where(is_diagonal, inverse[:, :, None, :], 0.0)
    return tl.reshape(spread, [CHUNK, CHUNK])


@triton.jit
def _product(a, b, ELEMENT: tl.constexpr, INVERSE_PRECISION: tl.constexpr):
    """The product in fp32 of operands in fp32, fp16 or, "as_input", in the dtype of q."""
    if INVERSE_PRECISION == "as_input":
        result = tl.dot(a.to(ELEMENT), b.to(ELEMENT))
    elif INVERSE_PRECISION == "fp16":
        result = tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        result = tl.dot(a, b, input_precision=INVERSE_PRECISION)
    return result


@triton.jit
def _merged(
    x,
    lower,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    ELEMENT: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    """From the inverses of diagonal blocks of SIZE rows those of twice the size: X - X E X.

    X is their block diagonal, E what of ``lower`` lies in the blocks that are new.
    """
    offs = tl.arange(0, CHUNK)
    row, column = offs[:, None] // SIZE, offs[None, :] // SIZE
    is_new = (row % 2 == 1) & (column == row - 1)
    new = tl.where(is_new, lower, 0.0)
    product = _product(new, x, ELEMENT, INVERSE_PRECISION)
    return x - _product(x, product, ELEMENT, INVERSE_PRECISION)


@triton.jit
def _inverse(
    lower,
    CHUNK: tl.constexpr,
    INVERSE: tl.constexpr,
    INVERSE_BASE: tl.constexpr,
    ELEMENT: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    """(I + lower)^-1 of a strictly lower triangular tile in fp32.

    Diagonal blocks are inverted and merged, two at a time: "doubling" starts at blocks of two,
    whose inverse is known, "substitution" at blocks of INVERSE_BASE.
    """
    offs = tl.arange(0, CHUNK)
    if INVERSE == "substitution":
        x = _diagonal_inverse(lower, CHUNK, INVERSE_BASE)
    else:
        # Blocks of two: 1 on the diagonal, minus the element below it.
        is_pair = (offs[:, None] // 2) == (offs[None, :] // 2)
        x = tl.where(is_pair, -lower, 0.0)
        x += (offs[:, None] == offs[None, :]).to(tl.float32)
    START: tl.constexpr = INVERSE_BASE if INVERSE == "substitution" else 2
    for level in tl.static_range(0, 6):
        if START << level < CHUNK:
            x = _merged(x, lower, CHUNK, START << level, ELEMENT, INVERSE_PRECISION)
    return x


@triton.jit
def gdn_chunk_intra_kernel(
    q,
    k,
    v,
    table,
    total_decay,
    beta_rows,
    inverse,
    w,
    u,
    scores,
    scale,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    scratch_tokens,
    num_heads,
    num_v_heads,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FORM: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
    INVERSE_GATE: tl.constexpr,
    INVERSE: tl.constexpr,
    INVERSE_BASE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A = (I + strict_tril(beta_i (k_i . k_j) Gamma_ij))^-1, Gamma_ij = 2^(G_i - G_j) for i >= j.

    FORM "wy": w = A (beta 2^G k), u = A (beta v); "inverse": A beta itself. HAS_SCORES: also
    tril(q k^T Gamma) scale. INVERSE_GATE "free" inverts without Gamma, which then multiplies the
    inverse: the same matrix. Grid: value heads fastest, then chunks. Rows behind the chunk's end
    are 0 in k, so that they change nothing, and are not stored.
    """
    head = tl.program_id(0) % num_v_heads
    chunk = tl.program_id(0) // num_v_heads
    qk_head = head // (num_v_heads // num_heads)
    first = tl.load(table + 2 * chunk).to(tl.int64)
    count = tl.load(table + 2 * chunk + 1)
    if count > 0:
        offs_c = tl.arange(0, CHUNK)
        is_c = offs_c < count
        row = head.to(tl.int64) * scratch_tokens + first + offs_c
        total = tl.load(total_decay + row, is_c, other=0.0)
        beta = tl.load(beta_rows + row, is_c, other=0.0)
        offs_k = tl.arange(0, BLOCK_K)
        token = first + offs_c
        k_rows = k + (token * k_stride_t + qk_head.to(tl.int64) * k_stride_h)[:, None]
        q_rows = q + (token * q_stride_t + qk_head.to(tl.int64) * q_stride_h)[:, None]
        kk = tl.zeros([CHUNK, CHUNK], tl.float32)
        qk = tl.zeros([CHUNK, CHUNK], tl.float32)
        # Where one block has all of k, it is read once and kept.
        IS_ONE_BLOCK: tl.constexpr = BLOCK_K >= HEAD_DIM_K
        mask = is_c[:, None] & (offs_k < HEAD_DIM_K)[None, :]
        if IS_ONE_BLOCK:
            k_tile = tl.load(k_rows + offs_k[None, :], mask, other=0.0)
            kk = tl.dot(k_tile, tl.trans(k_tile), input_precision=PRECISION)
            if HAS_SCORES:
                q_tile = tl.load(q_rows + offs_k[None, :], mask, other=0.0)
                qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        else:
            for k0 in range(0, HEAD_DIM_K, BLOCK_K):
                inside = is_c[:, None] & (k0 + offs_k < HEAD_DIM_K)[None, :]
                k_part = tl.load(k_rows + (k0 + offs_k)[None, :], inside, other=0.0)
                kk = tl.dot(k_part, tl.trans(k_part), kk, input_precision=PRECISION)
                if HAS_SCORES:
                    q_part = tl.load(q_rows + (k0 + offs_k)[None, :], inside, other=0.0)
                    qk = tl.dot(q_part, tl.trans(k_part), qk, input_precision=PRECISION)
        is_lower = (offs_c[:, None] >= offs_c[None, :]) & is_c[:, None]
        is_strict = (offs_c[:, None] > offs_c[None, :]) & is_c[:, None]
        decay = tl.exp2(tl.where(is_lower, total[:, None] - total[None, :], float("-inf")))
        element = k.dtype.element_ty
        columns = row[:, None] * CHUNK + offs_c[None, :]
        if HAS_SCORES:
            tl.store(scores + columns, (qk * decay * scale).to(element), is_c[:, None])
        lower = tl.where(is_strict, kk * beta[:, None], 0.0)
        if INVERSE_GATE == "gated":
            lower = lower * decay
        a = _inverse(lower, CHUNK, INVERSE, INVERSE_BASE, element, INVERSE_PRECISION)
        if INVERSE_GATE == "free":
            a = a * decay
        a = a * beta[None, :]
        if FORM == "inverse":
            tl.store(inverse + columns, a.to(element), is_c[:, None])
        else:
            a_k = (a * tl.exp2(total)[None, :]).to(element)
            w_rows = w + row[:, None] * HEAD_DIM_K
            if IS_ONE_BLOCK:
                w_tile = tl.dot(a_k, k_tile, input_precision=PRECISION)
                tl.store(w_rows + offs_k[None, :], w_tile.to(element), mask)
            else:
                for k0 in range(0, HEAD_DIM_K, BLOCK_K):
                    inside = is_c[:, None] & (k0 + offs_k < HEAD_DIM_K)[None, :]
                    k_part = tl.load(k_rows + (k0 + offs_k)[None, :], inside, other=0.0)
                    w_part = tl.dot(a_k, k_part, input_precision=PRECISION)
                    tl.store(w_rows + (k0 + offs_k)[None, :], w_part.to(element), inside)
            offs_v = tl.arange(0, BLOCK_V)
            v_rows = v + (token * v_stride_t + head.to(tl.int64) * v_stride_h)[:, None]
            a_v = a.to(element)
            for v0 in range(0, HEAD_DIM_V, BLOCK_V):
                inside = is_c[:, None] & (v0 + offs_v < HEAD_DIM_V)[None, :]
                v_tile = tl.load(v_rows + (v0 + offs_v)[None, :], inside, other=0.0)
                u_tile = tl.dot(a_v, v_tile, input_precision=PRECISION)
                target = u + row[:, None] * HEAD_DIM_V + (v0 + offs_v)[None, :]
                tl.store(target, u_tile.to(element), inside)
