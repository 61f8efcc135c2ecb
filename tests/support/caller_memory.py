"""Whose memory is alive: what a thread allocated, as a pool sees it, and storages of tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class CallersPool(TorchDispatchMode):
    """Stands in for the pool that inductor's CUDA graphs and ``use_mem_pool`` route a thread to.

    Like torch's allocator it takes what this thread allocates while it is in force, no other's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._allocated: list[StorageWeakRef] = []
        self.num_allocations = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = {ref.cdata for ref in storages_of((args, kwargs or {}))}
        if func is torch.ops.aten.lift_fresh.default:
            given = set()  # how torch.tensor hands over what it has just allocated
        result = func(*args, **(kwargs or {}))
        made = [ref for ref in storages_of(result) if ref.cdata not in given]
        self._allocated += made
        self.num_allocations += len(made)
        return result

    def num_untracked(self, outputs: Any) -> int:
        """Allocations that are alive and belong to none of the outputs, as inductor counts them."""
        tracked = {ref.cdata for ref in storages_of(outputs)}
        if not self._alive() <= tracked:
            gc.collect()
        return len(self._alive() - tracked)

    def _alive(self) -> set[int]:
        return {ref.cdata for ref in self._allocated if not ref.expired()}


def storages_of(value: Any) -> list[StorageWeakRef]:
    """The storages of all tensors that a value holds."""
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors_of(value)]


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_of(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors_of(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_of(tuple(getattr(value, known.name) for known in fields(value)))
