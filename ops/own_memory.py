"""Memory that outlives a call, allocated where no pool of the caller's can own it.

Inductor's CUDA graphs and ``torch.cuda.use_mem_pool`` send what a thread allocates to a pool of
theirs. What is to serve later calls must not lie there: a graph would write over it, or fail for
want of its owner. torch routes allocations by thread, so here another thread allocates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["kept_copy", "own_memory"]

_HAND_OVER = torch.ops.aten.lift_fresh.default
"""How ``torch.tensor`` gives a tensor away, after it has allocated it past every mode."""


@contextmanager
def own_memory(device: torch.device) -> Iterator[None]:
    """What torch allocates inside is in no pool that this thread allocates from.

    It belongs to the current stream of ``device`` like what the thread allocates itself, and
    filling it is enqueued there. Not for use while a CUDA graph is captured on that stream.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(1, "tilescout-memory", _enter, (stream,)) as thread, _Elsewhere(thread):
        yield


def kept_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in such memory, of the same strides where these leave no gap."""
    with own_memory(tensor.device):
        return tensor.detach().clone()


def _enter(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.set_stream(stream)  # and its device


class _Elsewhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations of torch that make tensors in the thread that is given."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._thread = thread

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is _HAND_OVER:
            func = torch.ops.aten.clone.default
        elif (
            func.is_view
        ):  # has no memory of its own, and autograd wants its views from this thread
            return func(*args, **(kwargs or {}))
        return self._thread.submit(func, *args, **(kwargs or {})).result()
