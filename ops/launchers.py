"""Keeps built launchers, one for a shape, a config and a stream, so that scratch is never shared.

A launcher owns scratch memory, which two streams must not use at once; a captured CUDA graph keeps
using the scratch of the launcher it was captured with for as long as it lives. That memory is in no
pool of a graph or of the caller.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from ..errors import UsageError
from ..kernels.base import Launcher
from .own_memory import own_memory

__all__ = ["LauncherCache", "OwnedLauncher", "keeping_launchers", "keeps_launchers"]

MAX_LAUNCHERS = 64
"""Launchers kept for eager calls; beyond it the least recently used frees its scratch memory."""


_keeps: ContextVar[bool] = ContextVar("tilescout_keeps_launchers", default=False)
keeps_launchers = _keeps.get
"""Whether ``keeping_launchers`` is in force in this thread or task."""


@contextmanager
def keeping_launchers() -> Iterator[None]:
    """Launchers that are built or used inside are never dropped for others."""
    token = _keeps.set(True)
    try:
        yield
    finally:
        _keeps.reset(token)


class _Call(Protocol):
    """A prepared call, which launches without asking the cache."""

    def release(self) -> None:
        """Told when the launcher is no longer for eager calls of its stream."""


class OwnedLauncher:
    """A launcher that serves one stream."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.lock = threading.Lock()
        """Held while launching: two threads must not interleave the kernels of one launcher."""
        self.was_used = False
        """Whether a prepared call has launched since the cache last looked."""
        self._is_released = False
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()

    def serves(self, call: _Call) -> None:
        """The call is released with the launcher; at once, where that has happened already."""
        with self.lock:
            if not self._is_released:
                self._calls.add(call)
                return
        call.release()

    def release(self) -> None:
        """It goes to a graph or out of the cache: no call may keep it."""
        with self.lock:
            self._is_released = True
            calls = list(self._calls)
        for call in calls:
            call.release()


class LauncherCache:
    """Launchers by (what they were built for, stream)."""

    def __init__(self, max_launchers: int = MAX_LAUNCHERS) -> None:
        self._max_launchers = max_launchers
        self._lock = threading.Lock()
        self._eager: OrderedDict[tuple[Hashable, int], OwnedLauncher] = OrderedDict()
        self._kept: dict[tuple[Hashable, int], OwnedLauncher] = {}
        self._captured: dict[tuple[Hashable, int], OwnedLauncher] = {}

    def __len__(self) -> int:
        return len(self._eager) + len(self._kept) + len(self._captured)

    def get(
        self, key: Hashable, device: torch.device, build: Callable[[], Launcher]
    ) -> OwnedLauncher:
        """The launcher for ``key`` on the current stream of ``device``, built if it is not there.

        Nothing is built while a CUDA graph is captured: a launcher that an earlier call made
        becomes the graph's own and is kept for good. Graphs captured on one stream share it, so
        they must not be replayed at the same time.

        Raises:
            UsageError: a graph is being captured and no earlier call has built the launcher.
        """
        stream, is_capturing = _stream_of(device)
        with self._lock:
            if is_capturing:
                return self._for_capture(key, stream)
            found = self._eager.get((key, stream)) or self._kept.get((key, stream))
            if found is not None:
                return self._used(key, stream, found)
        with own_memory(device):
            owned = OwnedLauncher(build())
        with self._lock:
            # Another thread on this stream may have built it meanwhile.
            owned = self._used(key, stream, self._eager.setdefault((key, stream), owned))
            while len(self._eager) > self._max_launchers:
                self._drop_one(newest=(key, stream))
        return owned

    def _drop_one(self, newest: tuple[Hashable, int]) -> None:
        """The least recently used goes; prepared calls use one without moving it to the end."""
        oldest, owned = self._eager.popitem(last=False)
        if owned.was_used:
            owned.was_used = False
            self._eager[oldest] = owned
            self._eager.move_to_end(newest)
        else:
            owned.release()

    def _used(self, key: Hashable, stream: int, owned: OwnedLauncher) -> OwnedLauncher:
        """The launcher, now the one that was used last, or moved to those that are kept."""
        if (key, stream) in self._kept:
            return owned
        if _keeps.get():
            self._kept[key, stream] = self._eager.pop((key, stream))
        else:
            self._eager.move_to_end((key, stream))
        return owned

    def _for_capture(self, key: Hashable, stream: int) -> OwnedLauncher:
        if (key, stream) not in self._captured:
            held = self._eager if any(k[0] == key for k in self._eager) else self._kept
            source = next((k for k in held if k[0] == key), None)
            if source is None:
                raise UsageError(
                    "a CUDA graph is being captured and these shapes were not called before: call "
                    "the function once with the same shapes outside the capture, or "
                    "tilescout.warmup, so that nothing compiles or allocates inside it"
                )
            self._captured[key, stream] = held.pop(source)
            self._captured[key, stream].release()
        return self._captured[key, stream]


def _stream_of(device: torch.device) -> tuple[int, bool]:
    """(handle of the current stream, whether it is being captured); the CPU has one, 0."""
    if device.type != "cuda":
        return 0, False
    return (
        torch.cuda.current_stream(device).cuda_stream,
        torch.cuda.is_current_stream_capturing(),
    )
