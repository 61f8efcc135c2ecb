"""Two small Triton kernels, cross-compiled for a named architecture without a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from tilescout.kernels.triton_spec import TritonKernelSpec


@triton.jit
def dot_kernel(a, b, c, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c = a b; one program owns BLOCK_M rows."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(a + rows[:, None] * K + (start + inner)[None, :])
        y = tl.load(b + (start + inner)[:, None] * BLOCK_N + columns[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + rows[:, None] * BLOCK_N + columns[None, :], acc.to(tl.bfloat16))


@triton.jit
def copy_kernel(a, b, BLOCK: tl.constexpr):
    """b = 2 a."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(b + offsets, tl.load(a + offsets) * 2.0)


def dot_spec(block_m: int, block_n: int, *, num_warps: int = 4, maxnreg: int | None = None):
    return TritonKernelSpec(
        module=__name__,
        name="dot_kernel",
        signature={"a": "*bf16", "b": "*bf16", "c": "*bf16", "K": "i32"},
        constexprs={"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64},
        aligned=frozenset(("a", "b", "c", "K")),
        num_warps=num_warps,
        num_stages=3,
        maxnreg=maxnreg,
    )


def copy_spec(block: int = 1024):
    return TritonKernelSpec(
        module=__name__,
        name="copy_kernel",
        signature={"a": "*fp32", "b": "*fp32"},
        constexprs={"BLOCK": block},
        aligned=frozenset(("a", "b")),
        num_warps=4,
        num_stages=1,
    )
