"""A model of how Hopper's tensor cores add, for the CPU, and the interpreter's products by it.

An instruction adds so many products and what was summed before: all are cut to some bits below the
largest exponent, added, and the result is cut again, towards zero. Widths after arXiv 2511.10909
(MMA-Sim), which found this bit for bit on an H100.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fp4_interpreter_shim
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["FP8", "SIXTEEN_BIT", "Sums", "cut_short", "product"]

_NO_EXPONENT = -1000


@dataclass(frozen=True)
class Sums:
    """How one kind of instruction adds."""

    depth: int
    """Products that one instruction adds."""
    bits: int
    """Bits kept below the largest exponent."""
    result_bits: int
    """Bits of the result below its own exponent."""


SIXTEEN_BIT = Sums(depth=16, bits=25, result_bits=23)
FP8 = Sums(depth=32, bits=13, result_bits=13)


def product(
    a: torch.Tensor, b: torch.Tensor, sums: Sums, before: torch.Tensor | None = None
) -> torch.Tensor:
    """``before + a @ b`` in fp32 as the instruction adds; a ``[M, K]``, b ``[K, N]`` by value."""
    a, b = a.double(), b.double()
    total = a.new_zeros(a.shape[0], b.shape[1]) if before is None else before.double()
    for first in range(0, a.shape[1], sums.depth):
        left = a[:, first : first + sums.depth, None]
        right = b[None, first : first + sums.depth]
        terms = left * right
        # The sum of the operands' exponents, not that of their product.
        exponents = (_exponent(left) + _exponent(right)).masked_fill(terms == 0, _NO_EXPONENT)
        top = torch.maximum(exponents.amax(1), _exponent(total))
        step = torch.exp2((top - sums.bits).double())
        total = _cut(terms, step[:, None]).sum(1) + _cut(total, step)
        total = _cut(total, torch.exp2((_exponent(total) - sums.result_bits).double()))
    return total.float()


def _exponent(x: torch.Tensor) -> torch.Tensor:
    return (torch.frexp(x).exponent - 1).masked_fill(x == 0, _NO_EXPONENT)


def _cut(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return torch.where(step > 0, torch.trunc(x / step) * step, torch.zeros_like(x))


def _dot(builder: Any, a: Any, b: Any, acc: Any, precision: Any, max_imprecise: Any) -> Any:
    del builder, precision, max_imprecise
    is_fp8 = a.dtype.scalar in (tl.float8e4nv, tl.float8e5)
    left, right, before = (
        torch.from_numpy(np.ascontiguousarray(x))
        for x in (fp4_interpreter_shim._decoded(a), fp4_interpreter_shim._decoded(b), acc.data)
    )
    summed = product(left, right, FP8 if is_fp8 else SIXTEEN_BIT, before)
    return interpreter.TensorHandle(summed.numpy().astype(acc.data.dtype), acc.dtype.scalar)


@contextmanager
def cut_short() -> Iterator[None]:
    """Makes ``tl.dot`` of the interpreter add as Hopper does inside the block."""
    fp4_interpreter_shim.install()
    before = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = _dot
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_dot = before
