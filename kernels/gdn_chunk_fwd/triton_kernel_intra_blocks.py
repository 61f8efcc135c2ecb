"""Triton device code of what needs one chunk alone, in blocks of 16 rows that one warp can hold.

Nothing above the diagonal is computed. Every product is ``a b^T`` or ``a b`` of tiles that lie in
registers as the result of a product does, and a transposed result in 16 bits is a right operand as
it stands: no element of an inverse passes through shared memory or another lane.
"""

import triton
import triton.language as tl


@triton.jit
def _lower_products(
    x,
    k,
    x_stride,
    k_stride,
    length,
    BLOCKS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Blocks of x k^T on and below the diagonal, row by row, as a tuple; rows from length on: 0."""
    rows = tl.arange(0, 16)
    offs_k = tl.arange(0, BLOCK_K)
    x_start = x + rows[:, None] * x_stride + offs_k[None, :]
    k_start = k + rows[:, None] * k_stride + offs_k[None, :]
    products = ()
    for _ in tl.static_range(BLOCKS * (BLOCKS + 1) // 2):
        products = products + (tl.zeros([16, 16], tl.float32),)  # noqa: RUF005
    for k0 in range(0, HEAD_DIM_K, BLOCK_K):
        is_column = (k0 + offs_k < HEAD_DIM_K)[None, :]
        columns = ()
        for c in tl.static_range(BLOCKS):
            is_inside = (rows < length - 16 * c)[:, None] & is_column
            tile = tl.load(k_start + (16 * c * k_stride + k0), is_inside, other=0.0)
            columns = columns + (tl.trans(tile),)  # noqa: RUF005
        summed = ()
        for b in tl.static_range(BLOCKS):
            is_inside = (rows < length - 16 * b)[:, None] & is_column
            tile = tl.load(x_start + (16 * b * x_stride + k0), is_inside, other=0.0)
            for c in tl.static_range(b + 1):
                product = tl.dot(tile, columns[c], products[b * (b + 1) // 2 + c])
                summed = summed + (product,)  # noqa: RUF005
        products = summed
    return products


@triton.jit
def _row_values(start, length, BLOCK: tl.constexpr):
    """A value of each row of a block."""
    rows = tl.arange(0, 16)
    return tl.load(start + 16 * BLOCK + rows, rows < length - 16 * BLOCK, other=0.0)


@triton.jit
def _decay(total, earlier):
    """Gamma of two blocks of rows, the first not before the second.

    The bound makes rows behind the end harmless, and what of a diagonal block is not wanted.
    """
    return tl.exp2(tl.minimum(total[:, None] - earlier[None, :], 0.0))


@triton.jit
def _operand(x, ELEMENT: tl.constexpr, INVERSE_PRECISION: tl.constexpr):
    """An operand of a product inside the inverse, in its dtype."""
    if INVERSE_PRECISION == "as_input":
        result = x.to(ELEMENT)
    elif INVERSE_PRECISION == "fp16":
        result = x.to(tl.float16)
    else:
        result = x
    return result


@triton.jit
def _accumulated(a, b, c, INVERSE_PRECISION: tl.constexpr):
    """C + a b in fp32."""
    if (INVERSE_PRECISION == "as_input") | (INVERSE_PRECISION == "fp16"):
        result = tl.dot(a, b, c)
    else:
        result = tl.dot(a, b, c, input_precision=INVERSE_PRECISION)
    return result


@triton.jit
def _block_inverse(minus, minus_t, ELEMENT: tl.constexpr, INVERSE_PRECISION: tl.constexpr):
    """(I - minus)^-1 of a block and its transpose, for a strictly lower triangular ``minus``.

    Blocks of two are known and merged, two at a time: X + X E X, E what of ``minus`` is new. The
    transpose goes along because a product's right operand is the transpose of a result.
    """
    offs = tl.arange(0, 16)
    row, column = offs[:, None], offs[None, :]
    unit = tl.where(row == column, 1.0, 0.0)
    is_pair = (row // 2) == (column // 2)
    x = unit + tl.where(is_pair, minus, 0.0)
    x_t = unit + tl.where(is_pair, minus_t, 0.0)
    for level in tl.static_range(1, 4):
        is_new = ((row >> level) % 2 == 1) & ((column >> level) == (row >> level) - 1)
        new_t = _operand(tl.trans(tl.where(is_new, minus, 0.0)), ELEMENT, INVERSE_PRECISION)
        left = _operand(x, ELEMENT, INVERSE_PRECISION)
        right_t = _operand(tl.trans(x), ELEMENT, INVERSE_PRECISION)
        left_t = _operand(x_t, ELEMENT, INVERSE_PRECISION)
        nothing = tl.zeros([16, 16], tl.float32)
        product_t = _accumulated(left_t, new_t, nothing, INVERSE_PRECISION)
        product = _operand(tl.trans(product_t), ELEMENT, INVERSE_PRECISION)
        x = _accumulated(left, product, x, INVERSE_PRECISION)
        product_left = _operand(product_t, ELEMENT, INVERSE_PRECISION)
        x_t = _accumulated(product_left, right_t, x_t, INVERSE_PRECISION)
    return x, x_t


@triton.jit
def _inverse_blocks(
    products,
    total_row,
    beta_row,
    start,
    length,
    BLOCKS: tl.constexpr,
    FORM: tl.constexpr,
    ELEMENT: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    """A beta, row by row, as a tuple; FORM "inverse": stores it instead.

    A = Gamma (I + strict_tril(beta_i products_ij))^-1. Row b of the inverse from those above:
    X_bc = D_b sum_m (-L_bm) X_mc, D_b the inverse of the diagonal block.
    """
    rows = tl.arange(0, 16)
    is_below = rows[:, None] > rows[None, :]
    is_above = rows[:, None] < rows[None, :]
    nothing = tl.zeros([16, 16], tl.float32)
    below_t = ()
    for b in tl.static_range(BLOCKS):
        beta = _row_values(beta_row, length, b)
        for c in tl.static_range(b):
            minus = products[b * (b + 1) // 2 + c] * -beta[:, None]
            below_t = below_t + (_operand(tl.trans(minus), ELEMENT, INVERSE_PRECISION),)  # noqa: RUF005
    blocks_t, results = (), ()
    for b in tl.static_range(BLOCKS):
        # Values of rows are read again, not kept: registers are for what the inverse holds.
        tl.debug_barrier()
        beta = _row_values(beta_row, length, b)
        total = _row_values(total_row, length, b)
        is_row = (rows < length - 16 * b)[:, None]
        # k k^T is its own transpose.
        square = products[b * (b + 1) // 2 + b]
        minus = tl.where(is_below, square * -beta[:, None], 0.0)
        minus_t = tl.where(is_above, square * -beta[None, :], 0.0)
        d, d_t = _block_inverse(minus, minus_t, ELEMENT, INVERSE_PRECISION)
        left = _operand(d, ELEMENT, INVERSE_PRECISION)
        right_t = _operand(tl.trans(d), ELEMENT, INVERSE_PRECISION)
        for c in tl.static_range(BLOCKS):
            block, block_t = d, d_t
            if c < b:
                sum_t = nothing
                for m in tl.static_range(c, b):
                    sum_t = _accumulated(
                        blocks_t[m * (m + 1) // 2 + c],
                        below_t[b * (b - 1) // 2 + m],
                        sum_t,
                        INVERSE_PRECISION,
                    )
                right = _operand(tl.trans(sum_t), ELEMENT, INVERSE_PRECISION)
                block = _accumulated(left, right, nothing, INVERSE_PRECISION)
                left_t = _operand(sum_t, ELEMENT, INVERSE_PRECISION)
                block_t = _accumulated(left_t, right_t, nothing, INVERSE_PRECISION)
            value = tl.zeros([16, 16], ELEMENT)
            if c <= b:
                blocks_t = blocks_t + (_operand(block_t, ELEMENT, INVERSE_PRECISION),)  # noqa: RUF005
                earlier = _row_values(total_row, length, c)
                scaled = block * _decay(total, earlier)
                scaled *= _row_values(beta_row, length, c)[None, :]
                value = scaled.to(ELEMENT)
                if FORM == "wy":
                    results = results + (value,)  # noqa: RUF005
            if FORM == "inverse":
                tl.store(start + (256 * BLOCKS * b + 16 * c), value, is_row)
    return results


@triton.jit
def _store_rows(
    left,
    source,
    target,
    source_stride,
    length,
    BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Stores lower triangular blocks times the rows of a chunk."""
    rows = tl.arange(0, 16)
    offs = tl.arange(0, BLOCK_D)
    start = source + rows[:, None] * source_stride + offs[None, :]
    stored = target + rows[:, None] * HEAD_DIM + offs[None, :]
    for d0 in range(0, HEAD_DIM, BLOCK_D):
        is_column = (d0 + offs < HEAD_DIM)[None, :]
        tiles = ()
        for c in tl.static_range(BLOCKS):
            is_inside = (rows < length - 16 * c)[:, None] & is_column
            tile = tl.load(start + (16 * c * source_stride + d0), is_inside, other=0.0)
            tiles = tiles + (tile,)  # noqa: RUF005
        for b in tl.static_range(BLOCKS):
            result = tl.zeros([16, BLOCK_D], tl.float32)
            for c in tl.static_range(b + 1):
                result = tl.dot(left[b * (b + 1) // 2 + c], tiles[c], result)
            is_inside = (rows < length - 16 * b)[:, None] & is_column
            place = stored + (16 * b * HEAD_DIM + d0)
            tl.store(place, result.to(target.dtype.element_ty), is_inside)


@triton.jit
def _store_scores(
    q,
    k,
    total_row,
    scores,
    scale,
    q_stride,
    k_stride,
    length,
    scratch_tokens,
    BLOCKS: tl.constexpr,
    group,
    HEAD_DIM_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Stores tril(q k^T Gamma) scale for all value heads of a head."""
    CHUNK: tl.constexpr = 16 * BLOCKS
    products = _lower_products(q, k, q_stride, k_stride, length, BLOCKS, HEAD_DIM_K, BLOCK_K)
    rows = tl.arange(0, 16)
    element = k.dtype.element_ty
    start = scores + rows[:, None] * CHUNK + rows[None, :]
    for _ in range(group):
        for b in tl.static_range(BLOCKS):
            total = _row_values(total_row, length, b)
            is_row = (rows < length - 16 * b)[:, None]
            for c in tl.static_range(BLOCKS):
                value = tl.zeros([16, 16], element)
                if c <= b:
                    decay = _decay(total, _row_values(total_row, length, c)) * scale
                    if c == b:
                        decay = tl.where(rows[:, None] >= rows[None, :], decay, 0.0)
                    value = (products[b * (b + 1) // 2 + c] * decay).to(element)
                tl.store(start + (16 * b * CHUNK + 16 * c), value, is_row)
        total_row += scratch_tokens
        start += scratch_tokens * CHUNK


@triton.jit
def _store_inverse(
    products,
    v,
    k,
    total_row,
    beta_row,
    inverse,
    w,
    u,
    v_stride,
    k_stride,
    length,
    BLOCKS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FORM: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    """Stores A beta, or what it makes of k and v, for one value head."""
    rows = tl.arange(0, 16)
    results = _inverse_blocks(
        products,
        total_row,
        beta_row,
        inverse + rows[:, None] * (16 * BLOCKS) + rows[None, :],
        length,
        BLOCKS,
        FORM,
        k.dtype.element_ty,
        INVERSE_PRECISION,
    )
    if FORM == "wy":
        _store_rows(results, v, u, v_stride, length, BLOCKS, HEAD_DIM_V, BLOCK_V)
        tl.debug_barrier()
        # Rounded twice, which costs less than registers for both left operands.
        decayed = ()
        for b in tl.static_range(BLOCKS):
            for c in tl.static_range(b + 1):
                factor = tl.exp2(_row_values(total_row, length, c))[None, :]
                value = results[b * (b + 1) // 2 + c].to(tl.float32) * factor
                decayed = decayed + (value.to(k.dtype.element_ty),)  # noqa: RUF005
        _store_rows(decayed, k, w, k_stride, length, BLOCKS, HEAD_DIM_K, BLOCK_K)


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
):
    """What the kernel of the same name for whole chunks does, Gamma multiplied to the inverse.

    Grid: of each chunk first the inverses, a value head a program, then the scores, a head of q a
    program, where they are stored. Rows behind the chunk's end are 0 in k and are not stored.
    """
    group = num_v_heads // num_heads
    programs = num_v_heads + (num_heads if HAS_SCORES else 0)
    BLOCKS: tl.constexpr = CHUNK // 16
    chunk = tl.program_id(0) // programs
    place = tl.program_id(0) % programs
    first = tl.load(table + 2 * chunk).to(tl.int64)
    length = tl.load(table + 2 * chunk + 1)
    if length > 0:
        is_inverse = place < num_v_heads
        head = tl.where(is_inverse, place, (place - num_v_heads) * group).to(tl.int64)
        row = head * scratch_tokens + first
        k_start = k + first * k_stride_t + head // group * k_stride_h
        if is_inverse:
            products = _lower_products(
                k_start, k_start, k_stride_t, k_stride_t, length, BLOCKS, HEAD_DIM_K, BLOCK_K
            )
            _store_inverse(
                products,
                v + first * v_stride_t + head * v_stride_h,
                k_start,
                total_decay + row,
                beta_rows + row,
                inverse + row * CHUNK,
                w + row * HEAD_DIM_K,
                u + row * HEAD_DIM_V,
                v_stride_t,
                k_stride_t,
                length,
                BLOCKS,
                HEAD_DIM_K,
                HEAD_DIM_V,
                BLOCK_K,
                BLOCK_V,
                FORM,
                INVERSE_PRECISION,
            )
        elif HAS_SCORES:
            _store_scores(
                q + first * q_stride_t + head // group * q_stride_h,
                k_start,
                total_decay + row,
                scores + row * CHUNK,
                scale,
                q_stride_t,
                k_stride_t,
                length,
                scratch_tokens,
                BLOCKS,
                group,
                HEAD_DIM_K,
                BLOCK_K,
            )
