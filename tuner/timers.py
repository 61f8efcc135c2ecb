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
from typing import Any, Protocol

__all__ = ["Call", "CudaTimer", "Run", "Timer", "WallTimer"]

Call = Callable[[], None]
"""One launch on one private copy of inputs and outputs."""


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

    def time_us(self, runs: Sequence[Run]) -> list[float]:
        """Microseconds a launch of each run, all run in this order without a pause.

        The last run goes ahead once, untimed: the first of a sequence would otherwise also
        measure how long the host takes to start it.
        """


class CudaTimer:
    """CUDA events on the current stream, around graph replays or eager launches."""

    def __init__(self, *, is_graph: bool) -> None:
        self._is_graph = is_graph

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

    def time_us(self, runs: Sequence[Run]) -> list[float]:
        """Enqueues all runs with an event before and after each, then waits once."""
        import torch

        def event() -> Any:
            return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

        marks = [(event(), event()) for _ in runs]
        runs[-1].enqueue()
        for (start, end), run in zip(marks, runs, strict=True):
            start.record()
            run.enqueue()
            end.record()
        torch.cuda.synchronize()
        return [
            1e3 * start.elapsed_time(end) / run.num_launches
            for (start, end), run in zip(marks, runs, strict=True)
        ]


class WallTimer:
    """The host's clock, for launches that have finished when they return."""

    def prepare(self, calls: Sequence[Call], num_launches: int) -> Run:
        """Keeps the launches to be made one by one."""
        return _eager_run(calls, num_launches)

    def rough_us(self, call: Call) -> float:
        """The clock around one launch."""
        return self.time_us([Run(call, 1)])[0]

    def time_us(self, runs: Sequence[Run]) -> list[float]:
        """The clock around each run."""
        runs[-1].enqueue()
        times = []
        for run in runs:
            start = time.perf_counter()
            run.enqueue()
            times.append(1e6 * (time.perf_counter() - start) / run.num_launches)
        return times


def _eager_run(calls: Sequence[Call], num_launches: int) -> Run:
    sequence = [calls[i % len(calls)] for i in range(num_launches)]

    def enqueue() -> None:
        for call in sequence:
            call()

    return Run(enqueue, num_launches, tuple(calls))
