"""Bounds of packed sequences on the host, where libraries plan, and on the device, by value.

Libraries keep what they plan by the identity of the tensor of bounds: equal bounds get the same
tensor here, so that a layer's plan serves the next one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .inputs import GdnChunkInputs

__all__ = ["Bounds", "bounds_of", "chunk_numbers", "on_device"]

_MAX_KEPT = 256


@dataclass(frozen=True)
class Bounds:
    """Where the sequences that have tokens begin and end; hashable."""

    values: tuple[int, ...]
    """Rising, from 0."""
    with_tokens: tuple[int, ...] | None
    """Numbers of the sequences that have tokens; None: all of them."""

    @property
    def end(self) -> int:
        """Rows that belong to a sequence."""
        return self.values[-1]


def bounds_of(inputs: GdnChunkInputs) -> Bounds:
    """The bounds of a call; a dense batch has equal lengths.

    Waits for the device where there is no ``cu_seqlens_cpu`` and the tensor was not read before.
    """
    if inputs.cu_seqlens is None:
        batch, tokens = inputs.q.shape[:2]
        return _without_empty(tuple(tokens * i for i in range(batch + 1)))
    if inputs.cu_seqlens_cpu is not None:
        return _without_empty(tuple(inputs.cu_seqlens_cpu.tolist()))
    return _without_empty(_read(inputs.cu_seqlens))


_values: Any = WeakTensorKeyDictionary()  # torch leaves its calls untyped


def _read(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """The values of a tensor, read again where torch saw it change."""
    known = _values.get(cu_seqlens)
    if known is None or known[0] != cu_seqlens._version:
        known = (cu_seqlens._version, tuple(cu_seqlens.tolist()))
        _values[cu_seqlens] = known
    values: tuple[int, ...] = known[1]
    return values


@lru_cache(maxsize=_MAX_KEPT)
def _without_empty(values: tuple[int, ...]) -> Bounds:
    with_tokens = tuple(i for i, (a, b) in enumerate(itertools.pairwise(values)) if b > a)
    kept = (values[0], *(values[i + 1] for i in with_tokens))
    return Bounds(kept, None if len(with_tokens) == len(values) - 1 else with_tokens)


@lru_cache(maxsize=_MAX_KEPT)
def on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values as a tensor: the same one for equal values."""
    return torch.tensor(values, dtype=dtype).to(device)


@lru_cache(maxsize=_MAX_KEPT)
def chunk_numbers(values: tuple[int, ...], chunk: int, device: torch.device) -> torch.Tensor:
    """(sequence, chunk in it) of every chunk, int64 ``[chunks, 2]``: FLA's ``chunk_indices``."""
    lengths = (b - a for a, b in itertools.pairwise(values))
    pairs = [(i, c) for i, n in enumerate(lengths) for c in range(-(-n // chunk))]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(device)
