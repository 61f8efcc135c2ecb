"""Device code that dequantises K to memory: head by head, padded, in the order wanted."""

import triton
import triton.language as tl

from ..quantization.triton_kernel import dequantize_tile


@triton.jit
def dequantize_keys_kernel(
    codes,
    scales,
    out,
    kv_len,
    padded_keys,
    PERMUTED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Writes NVFP4 values without tensor scale, exact in bf16.

    A program owns BLOCK_M rows of ``out``, ``[heads, padded_keys, HEAD_DIM]``; rows past the last
    key are zeros. PERMUTED: of each 16 keys, in the order of ``tilelang_kernel.key_of_column``.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (tl.program_id(0) * BLOCK_M // padded_keys).to(tl.int64)
    keys = rows % padded_keys
    if PERMUTED:
        keys = keys // 16 * 16 + keys % 8 // 2 * 4 + keys // 8 % 2 * 2 + keys % 2
    is_key = (keys < kv_len)[:, None]
    source = (head * kv_len + keys)[:, None]
    half, blocks = tl.arange(0, HEAD_DIM // 2), tl.arange(0, HEAD_DIM // 16)
    packed = tl.load(codes + source * (HEAD_DIM // 2) + half[None, :], is_key, other=0)
    stored = tl.load(scales + source * (HEAD_DIM // 16) + blocks[None, :], is_key, other=0)
    values = dequantize_tile(packed, stored, "nvfp4", BLOCK_M, HEAD_DIM, tl.bfloat16)
    place = rows.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out + place, values)
