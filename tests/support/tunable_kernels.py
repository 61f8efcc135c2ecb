"""Small kernels for the interpreter, with a timer that knows which config runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

TIMES_MS = {16: 3.0, 32: 1.0, 64: 2.0, 128: 0.5}
"""Made-up time of a block size."""


def made_up_timer(kernel_call: Callable[[], None], quantiles: Any) -> list[float]:
    """In the place of ``do_bench``: runs the call three times; its time is that of its block."""
    for _ in range(3):
        kernel_call()
    config = inspect.getclosurevars(kernel_call).nonlocals["config"]
    time_ms = TIMES_MS[config.kwargs["BLOCK"]]
    return [time_ms, 0.9 * time_ms, 1.1 * time_ms]


def configs(*blocks: int, **options: Any) -> list[Any]:
    return [triton.Config({"BLOCK": block}, **options) for block in blocks]


def double(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, 2 * tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


def double_wrongly_at_128(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = 3 if BLOCK == 128 else 2
    tl.store(y + offsets, factor * tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


def increase(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < n) + 1, mask=offsets < n)


def accumulate(x, total, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n, other=0.0)
    tl.atomic_add(total + offsets % 1, values, mask=offsets < n)
