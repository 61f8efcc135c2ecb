"""Clocks: how long a sequence of launches takes on the device, and nothing about when to stop.

A timer turns launches into a ``Run`` that can be repeated, and times runs back to back. Three
exist: CUDA events around the replay of a CUDA graph, CUDA events around eager launches, and the
host's clock for devices without events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from .gpu_state import ClockWatch

__all__ = ["Call", "CudaTimer", "Run", "Timer", "WallTimer"]

Call = Callable[[], object]
"""One launch on one private copy of inputs and outputs; what it returns is dropped."""


@dataclass(frozen=True)
class Run:
    """A fixed sequence of launches, ready to be repeated."""

    enqueue: Call
    num_launches: int
    calls: tuple[Call, ...] = ()
    """What is launched: a graph does not keep alive the memory that its launches use."""


class Timer(Protocol):
    """The seam between the protocol of measurement and the device's clock."""

    def prepare(self, calls: Sequence[Call], num_launches: int) -> Run:
        """A run that makes ``num_launches`` launches, going round ``calls``."""

    def rough_us(self, call: Call) -> float:
        """Time of one eager launch after an untimed one: an upper bound, host overhead included."""

    def time_us(self, runs: Sequence[Run], *, is_kept: bool = False) -> list[float]:
        """Microseconds a launch of each run, all run in this order without a pause.

        The last run goes ahead once, untimed: the first of a sequence would otherwise also
        measure how long the host takes to start it.

        Args:
            runs: What is timed.
            is_kept: The times are samples to be kept; if the device is disturbed meanwhile, all
                is repeated a few times at most.
        """


class CudaTimer:
    """CUDA events on the current stream, around graph replays or eager launches."""

    def __init__(self, *, is_graph: bool, watch: ClockWatch | None = None) -> None:
        self._is_graph = is_graph
        self._watch = watch

    def prepare(self, calls: Sequence[Call], num_launches: int) -> Run:
        """Captures the launches in one graph, or keeps them to be launched one by one."""
        if not self._is_graph:
            return _eager_run(calls, num_launches)
        import torch

        # torch.cuda.graph() would also empty the allocator's cache at each capture, and the next
        # config would pay for fresh device allocations.
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                _eager_run(calls, num_launches).enqueue()
            except BaseException:
                with suppress(RuntimeError):  # the first error is the one to report
                    graph.capture_end()
                raise
            graph.capture_end()
        return Run(graph.replay, num_launches, tuple(calls))

    def rough_us(self, call: Call) -> float:
        """Events around one eager launch."""
        return self.time_us([Run(call, 1)])[0]

    def time_us(self, runs: Sequence[Run], *, is_kept: bool = False) -> list[float]:
        """Enqueues all runs with an event before and after each, then waits once."""
        return _undisturbed(partial(_time_on_device, runs), self._watch if is_kept else None)


class WallTimer:
    """The host's clock, for launches that have finished when they return."""

    def __init__(self, *, watch: ClockWatch | None = None) -> None:
        self._watch = watch

    def prepare(self, calls: Sequence[Call], num_launches: int) -> Run:
        """Keeps the launches to be made one by one."""
        return _eager_run(calls, num_launches)

    def rough_us(self, call: Call) -> float:
        """The clock around one launch."""
        return self.time_us([Run(call, 1)])[0]

    def time_us(self, runs: Sequence[Run], *, is_kept: bool = False) -> list[float]:
        """The clock around each run."""
        return _undisturbed(partial(_time_on_host, runs), self._watch if is_kept else None)


_TimeOnce = Callable[[Callable[[], None]], list[float]]
"""Times a block once, and calls its argument while the device works on it."""


def _undisturbed(time_once: _TimeOnce, watch: ClockWatch | None) -> list[float]:
    """Times of a block; of its last repetition where the watch finds the earlier disturbed."""
    if watch is None:
        return time_once(lambda: None)
    for _ in range(1 + watch.max_repeats):
        found: list[str | None] = []
        times_us = time_once(lambda: found.append(watch.disturbance()))  # noqa: B023  (called at once)
        if found == [None]:
            break
    return times_us


def _time_on_device(runs: Sequence[Run], while_busy: Callable[[], None]) -> list[float]:
    import torch

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    marks = [(event(), event()) for _ in runs]
    runs[-1].enqueue()
    for (start, end), run in zip(marks, runs, strict=True):
        start.record()
        run.enqueue()
        end.record()
    while_busy()
    torch.cuda.synchronize()
    return [
        1e3 * start.elapsed_time(end) / run.num_launches
        for (start, end), run in zip(marks, runs, strict=True)
    ]


def _time_on_host(runs: Sequence[Run], while_busy: Callable[[], None]) -> list[float]:
    runs[-1].enqueue()
    times = []
    for run in runs:
        start = time.perf_counter()
        run.enqueue()
        times.append(1e6 * (time.perf_counter() - start) / run.num_launches)
    while_busy()
    return times


def _eager_run(calls: Sequence[Call], num_launches: int) -> Run:
    sequence = [calls[i % len(calls)] for i in range(num_launches)]

    def enqueue() -> None:
        for call in sequence:
            call()

    return Run(enqueue, num_launches, tuple(calls))
