"""A timer that reads times from functions instead of a clock, and counts what it ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilescout.tuner.timers import Call, Run


class FakeTimer:
    """Times each launch as what its ``Call`` returned when asked for its time.

    Args:
        time_of: microseconds of one launch of a call.
        eager_overhead_us: what an eager launch takes on top.
    """

    def __init__(self, time_of: Callable[[Call], float], eager_overhead_us: float = 0.0) -> None:
        self._time_of = time_of
        self._eager_overhead_us = eager_overhead_us
        self._calls: dict[int, Call] = {}
        self.num_timed_launches = 0
        self.orders: list[list[int]] = []

    def prepare(self, calls: Sequence[Call], num_launches: int) -> Run:
        run = Run(calls[0], num_launches)
        self._calls[id(run)] = calls[0]
        self._keep = [*getattr(self, "_keep", []), run]
        return run

    def rough_us(self, call: Call) -> float:
        self.num_timed_launches += 1
        return self._time_of(call) + self._eager_overhead_us

    def time_us(self, runs: Sequence[Run]) -> list[float]:
        self.orders.append([id(run) for run in runs])
        self.num_timed_launches += sum(run.num_launches for run in runs)
        return [self._time_of(self._calls[id(run)]) for run in runs]
