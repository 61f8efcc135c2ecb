"""Device code of the backward products: dK and dV by blocks of keys, dQ by blocks of queries.

P is 2^(score + 8 - lse) in e4m3, 256 times the probability. dS = P (dP - sum(O dO)) in fp32 gets
a power of two for each row of a tile before it becomes e4m3, so that its codes, subnormals apart,
depend on no tile. Each tile's FP8 product has a sum of its own: Hopper's keep few bits of what they
add to. No program adds to another's result.
"""

import triton
import triton.language as tl

_TOP_BITS = tl.constexpr(261)
"""127 + 7 + 127: the largest of a row gets the exponent 7, 128 to 256."""
_LEAST_BITS = tl.constexpr(27)
"""Rows below 2^-100 are left there: their power of two would overflow."""


@triton.jit
def _to_e4m3(ds):
    """(ds times a power of two a row in e4m3, its reciprocals)."""
    amax = tl.max(tl.abs(ds), 1)
    exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) & 0xFF, _LEAST_BITS)
    exponent = tl.minimum(exponent, 254)
    power = ((-exponent + _TOP_BITS) << 23).to(tl.float32, bitcast=True)
    reciprocal = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    return (ds * power[:, None]).to(tl.float8e4nv), reciprocal


@triton.jit
def _scores(a, a_scales, b, b_scales, NATIVE: tl.constexpr):
    """Scores ``[rows of a, rows of b]`` without their factor."""
    if NATIVE:
        scores = tl.dot_scaled(a, a_scales, "e2m1", tl.trans(b), b_scales, "e2m1")
    else:
        scores = tl.dot(a, tl.trans(b))
    return scores


@triton.jit
def _load_operand(
    values, scales, matrix, tokens, num_tokens, padded, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr
):
    """(Q or K of these tokens, block scales): codes and scales, or bf16 values and nothing."""
    if NATIVE:
        is_token = (tokens < num_tokens)[:, None]
        rows = (matrix * num_tokens + tokens)[:, None]
        half = tl.arange(0, HEAD_DIM // 2)[None, :]
        blocks = tl.arange(0, HEAD_DIM // 16)[None, :]
        loaded = tl.load(values + rows * (HEAD_DIM // 2) + half, is_token, other=0)
        stored = tl.load(scales + rows * (HEAD_DIM // 16) + blocks, is_token, other=0.0)
    else:
        rows = (matrix * padded + tokens)[:, None]
        loaded = tl.load(values + rows * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :])
        stored = 0
    return loaded, stored


@triton.jit
def _keys_tile(
    dk,
    dv,
    k,
    k_stored,
    v,
    keys,
    first_row,
    matrix,
    q,
    q_scales,
    q_t,
    do,
    do_t,
    shift,
    dot_rows,
    factor,
    query_len,
    padded_rows,
    offset,
    WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
    MASKED: tl.constexpr,
    NATIVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Takes one tile of query rows in; MASKED: a row's last key is its index plus offset."""
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    padded = matrix * padded_rows
    turned = (matrix * HEAD_DIM + dims)[:, None] * padded_rows + rows[None, :]
    tile, stored = _load_operand(
        q, q_scales, matrix, rows, query_len, padded_rows, HEAD_DIM, NATIVE
    )
    scores = _scores(k, k_stored, tile, stored, NATIVE)
    p = tl.exp2(scores * factor + tl.load(shift + padded + rows)[None, :])
    if MASKED:
        p = tl.where(keys[:, None] <= (rows + offset)[None, :], p, 0.0)
    if WITH_DV:
        dv += tl.dot(p.to(tl.float8e4nv), tl.trans(tl.load(do_t + turned)))
    if WITH_DK:
        do_tile = tl.load(do + (padded + rows)[:, None] * HEAD_DIM + dims[None, :])
        dp = tl.dot(v, tl.trans(do_tile))
        ds, reciprocal = _to_e4m3(p * (dp - tl.load(dot_rows + padded + rows)[None, :]))
        dk += tl.dot(ds, tl.trans(tl.load(q_t + turned))) * reciprocal[:, None]
    return dk, dv


@triton.jit
def _row_of(step, tiles, first, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """(head of the group, first row) of a step over the tiles of all heads."""
    if GROUP_SIZE == 1:
        member = 0
        row = first + step * BLOCK_M
    else:
        member = step // tiles
        row = first + step % tiles * BLOCK_M
    return member, row


@triton.jit
def _keys_pass(
    q,
    q_scales,
    q_t,
    q_tensor_scale,
    k,
    k_scales,
    k_tensor_scale,
    v,
    do,
    do_t,
    shift,
    dot_rows,
    logit_scale,
    query_len,
    kv_len,
    padded_rows,
    padded_keys,
    num_kv_heads,
    GROUP_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
    NATIVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(dK, dV) of one block of keys without their factors, summed over the heads of its group.

    Under a causal mask the first keys have the most rows: the longest programs start first.
    """
    key_tiles = tl.cdiv(kv_len, BLOCK_N)
    kv_matrix = (tl.program_id(0) // key_tiles).to(tl.int64)
    first_key = tl.program_id(0) % key_tiles * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    k_tile, k_stored = _load_operand(
        k, k_scales, kv_matrix, keys, kv_len, padded_keys, HEAD_DIM, NATIVE
    )
    v_tile = k_tile
    if WITH_DK:
        v_rows = (kv_matrix * padded_keys + keys)[:, None]
        v_tile = tl.load(v + v_rows * HEAD_DIM + dims[None, :])
    factor = tl.load(q_tensor_scale) * tl.load(k_tensor_scale) * logit_scale

    offset = kv_len - query_len
    first, whole = 0, 0
    if IS_CAUSAL:
        first = tl.maximum(first_key - offset, 0) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(first_key + BLOCK_N - 1 - offset, 0), BLOCK_M) * BLOCK_M
        whole = tl.minimum(whole, tl.cdiv(query_len, BLOCK_M) * BLOCK_M)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    # One loop over the rows of all heads of the group: nested ones cost registers.
    if IS_CAUSAL:
        tiles = tl.maximum(whole - first, 0) // BLOCK_M
        for step in range(0, GROUP_SIZE * tiles):
            member, row = _row_of(step, tiles, first, GROUP_SIZE, BLOCK_M)
            dk, dv = _keys_tile(
                *(dk, dv, k_tile, k_stored, v_tile, keys, row, kv_matrix * GROUP_SIZE + member),
                *(q, q_scales, q_t, do, do_t, shift, dot_rows, factor, query_len, padded_rows),
                *(offset, WITH_DK, WITH_DV, True, NATIVE, HEAD_DIM, BLOCK_M),
            )
    tiles = tl.cdiv(tl.maximum(query_len - whole, 0), BLOCK_M)
    for step in range(0, GROUP_SIZE * tiles):
        member, row = _row_of(step, tiles, whole, GROUP_SIZE, BLOCK_M)
        dk, dv = _keys_tile(
            *(dk, dv, k_tile, k_stored, v_tile, keys, row, kv_matrix * GROUP_SIZE + member),
            *(q, q_scales, q_t, do, do_t, shift, dot_rows, factor, query_len, padded_rows),
            *(offset, WITH_DK, WITH_DV, False, NATIVE, HEAD_DIM, BLOCK_M),
        )
    return dk, dv, keys, kv_matrix


@triton.jit
def _store_rows(
    pointer,
    stride_b,
    stride_h,
    stride_s,
    values,
    tokens,
    num_tokens,
    matrix,
    num_heads,
    HEAD_DIM: tl.constexpr,
):
    """Writes the rows of a tile that exist, of one head."""
    start = pointer + matrix // num_heads * stride_b + matrix % num_heads * stride_h
    pointers = start + tokens.to(tl.int64)[:, None] * stride_s + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(pointers, values.to(pointer.dtype.element_ty), (tokens < num_tokens)[:, None])


@triton.jit
def _k_factor(acc, kv_matrix, v_scale, do_power, tensor_scale, sm_scale):
    """DK or dQ from its sum: 256 of P, an eighth of the other operand, the scales of dO and V."""
    undone = tl.load(v_scale + kv_matrix) / tl.load(do_power + kv_matrix)
    return acc * undone * (tl.load(tensor_scale) * sm_scale * 0.03125)


@triton.jit
def fp4_attention_bwd_dkdv_kernel(
    q,
    q_scales,
    q_t,
    q_tensor_scale,
    k,
    k_scales,
    k_tensor_scale,
    v,
    v_scale,
    do,
    do_t,
    do_power,
    shift,
    dot_rows,
    dk,
    dv,
    logit_scale,
    sm_scale,
    dk_stride_b,
    dk_stride_h,
    dk_stride_s,
    dv_stride_b,
    dv_stride_h,
    dv_stride_s,
    query_len,
    kv_len,
    padded_rows,
    padded_keys,
    num_kv_heads,
    GROUP_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    NATIVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """DK = dS^T Q and dV = P^T dO of BLOCK_N keys of one KV head."""
    dk_sum, dv_sum, keys, kv_matrix = _keys_pass(
        *(q, q_scales, q_t, q_tensor_scale, k, k_scales, k_tensor_scale, v, do, do_t, shift),
        *(dot_rows, logit_scale, query_len, kv_len, padded_rows, padded_keys, num_kv_heads),
        *(GROUP_SIZE, IS_CAUSAL, True, True, NATIVE, HEAD_DIM, BLOCK_M, BLOCK_N),
    )
    dk_values = _k_factor(dk_sum, kv_matrix, v_scale, do_power, q_tensor_scale, sm_scale)
    _store_rows(
        *(dk, dk_stride_b, dk_stride_h, dk_stride_s, dk_values, keys, kv_len, kv_matrix),
        *(num_kv_heads, HEAD_DIM),
    )
    dv_values = dv_sum * (0.00390625 / tl.load(do_power + kv_matrix))
    _store_rows(
        *(dv, dv_stride_b, dv_stride_h, dv_stride_s, dv_values, keys, kv_len, kv_matrix),
        *(num_kv_heads, HEAD_DIM),
    )


@triton.jit
def fp4_attention_bwd_dk_kernel(
    q,
    q_scales,
    q_t,
    q_tensor_scale,
    k,
    k_scales,
    k_tensor_scale,
    v,
    v_scale,
    do,
    do_power,
    shift,
    dot_rows,
    dk,
    logit_scale,
    sm_scale,
    dk_stride_b,
    dk_stride_h,
    dk_stride_s,
    query_len,
    kv_len,
    padded_rows,
    padded_keys,
    num_kv_heads,
    GROUP_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    NATIVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """DK = dS^T Q of BLOCK_N keys of one KV head."""
    dk_sum, _, keys, kv_matrix = _keys_pass(
        *(q, q_scales, q_t, q_tensor_scale, k, k_scales, k_tensor_scale, v, do, do, shift),
        *(dot_rows, logit_scale, query_len, kv_len, padded_rows, padded_keys, num_kv_heads),
        *(GROUP_SIZE, IS_CAUSAL, True, False, NATIVE, HEAD_DIM, BLOCK_M, BLOCK_N),
    )
    dk_values = _k_factor(dk_sum, kv_matrix, v_scale, do_power, q_tensor_scale, sm_scale)
    _store_rows(
        *(dk, dk_stride_b, dk_stride_h, dk_stride_s, dk_values, keys, kv_len, kv_matrix),
        *(num_kv_heads, HEAD_DIM),
    )


@triton.jit
def fp4_attention_bwd_dv_kernel(
    q,
    q_scales,
    q_tensor_scale,
    k,
    k_scales,
    k_tensor_scale,
    do_t,
    do_power,
    shift,
    dv,
    logit_scale,
    dv_stride_b,
    dv_stride_h,
    dv_stride_s,
    query_len,
    kv_len,
    padded_rows,
    padded_keys,
    num_kv_heads,
    GROUP_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    NATIVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """DV = P^T dO of BLOCK_N keys of one KV head."""
    _, dv_sum, keys, kv_matrix = _keys_pass(
        *(q, q_scales, q, q_tensor_scale, k, k_scales, k_tensor_scale, do_t, do_t, do_t, shift),
        *(shift, logit_scale, query_len, kv_len, padded_rows, padded_keys, num_kv_heads),
        *(GROUP_SIZE, IS_CAUSAL, False, True, NATIVE, HEAD_DIM, BLOCK_M, BLOCK_N),
    )
    dv_values = dv_sum * (0.00390625 / tl.load(do_power + kv_matrix))
    _store_rows(
        *(dv, dv_stride_b, dv_stride_h, dv_stride_s, dv_values, keys, kv_len, kv_matrix),
        *(num_kv_heads, HEAD_DIM),
    )


@triton.jit
def _queries_tile(
    dq,
    q_tile,
    q_stored,
    do_tile,
    shifts,
    sums,
    last_key,
    first_key,
    kv_matrix,
    k,
    k_scales,
    k_t,
    v,
    factor,
    kv_len,
    padded_keys,
    MASKED: tl.constexpr,
    NATIVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Takes one tile of keys in; MASKED: keys past a row's last count nothing."""
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    k_tile, k_stored = _load_operand(
        k, k_scales, kv_matrix, keys, kv_len, padded_keys, HEAD_DIM, NATIVE
    )
    p = tl.exp2(_scores(q_tile, q_stored, k_tile, k_stored, NATIVE) * factor + shifts[:, None])
    if MASKED:
        p = tl.where(keys[None, :] <= last_key[:, None], p, 0.0)
    v_tile = tl.load(v + (kv_matrix * padded_keys + keys)[:, None] * HEAD_DIM + dims[None, :])
    dp = tl.dot(do_tile, tl.trans(v_tile))
    ds, reciprocal = _to_e4m3(p * (dp - sums[:, None]))
    columns = (kv_matrix * HEAD_DIM + dims)[:, None] * padded_keys
    turned = tl.load(k_t + columns + keys[None, :])
    return dq + tl.dot(ds, tl.trans(turned)) * reciprocal[:, None]


@triton.jit
def fp4_attention_bwd_dq_kernel(
    q,
    q_scales,
    q_tensor_scale,
    k,
    k_scales,
    k_t,
    k_tensor_scale,
    v,
    v_scale,
    do,
    do_power,
    shift,
    dot_rows,
    dq,
    logit_scale,
    sm_scale,
    dq_stride_b,
    dq_stride_h,
    dq_stride_s,
    query_len,
    kv_len,
    padded_rows,
    padded_keys,
    num_heads,
    GROUP_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    NATIVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """DQ = dS K of BLOCK_M query rows of one head; under a causal mask the longest start first."""
    row_tiles = tl.cdiv(query_len, BLOCK_M)
    tile = tl.program_id(0) % row_tiles
    if IS_CAUSAL:
        tile = row_tiles - 1 - tile
    matrix = (tl.program_id(0) // row_tiles).to(tl.int64)
    kv_matrix = matrix // GROUP_SIZE
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q_tile, q_stored = _load_operand(
        q, q_scales, matrix, rows, query_len, padded_rows, HEAD_DIM, NATIVE
    )
    padded = matrix * padded_rows + rows
    do_tile = tl.load(do + padded[:, None] * HEAD_DIM + dims[None, :])
    shifts, sums = tl.load(shift + padded), tl.load(dot_rows + padded)
    factor = tl.load(q_tensor_scale) * tl.load(k_tensor_scale) * logit_scale

    last_key = tl.full([BLOCK_M], 0, tl.int32) + (kv_len - 1)
    end, whole = kv_len, kv_len
    if IS_CAUSAL:
        offset = kv_len - query_len
        last_key = tl.minimum(last_key, rows + offset)
        end = tl.minimum(kv_len, tl.maximum(first_row + BLOCK_M + offset, 0))
        whole = tl.minimum(kv_len, tl.maximum(first_row + 1 + offset, 0))
    whole = whole // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first_key in range(0, whole, BLOCK_N):
        acc = _queries_tile(
            *(acc, q_tile, q_stored, do_tile, shifts, sums, last_key, first_key, kv_matrix),
            *(k, k_scales, k_t, v, factor, kv_len, padded_keys),
            *(False, NATIVE, HEAD_DIM, BLOCK_N),
        )
    for first_key in range(whole, end, BLOCK_N):
        acc = _queries_tile(
            *(acc, q_tile, q_stored, do_tile, shifts, sums, last_key, first_key, kv_matrix),
            *(k, k_scales, k_t, v, factor, kv_len, padded_keys),
            *(True, NATIVE, HEAD_DIM, BLOCK_N),
        )
    values = _k_factor(acc, kv_matrix, v_scale, do_power, k_tensor_scale, sm_scale)
    _store_rows(
        *(dq, dq_stride_b, dq_stride_h, dq_stride_s, values, rows, query_len, matrix),
        *(num_heads, HEAD_DIM),
    )
