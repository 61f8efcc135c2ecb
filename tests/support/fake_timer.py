"""A timer that asks a function instead of a clock, and remembers what it ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilescout.tuner.timers import Call, Run


class FakeTimer:
    """Asks a function for the time of a launch.

    Args:
        time_of: microseconds of one launch of a call.
        eager_overhead_us: what an eager launch takes on top.
    """

    def __init__(self, time_of: Callable[[Call], float], eager_overhead_us: float = 0.0) -> None:
        self._time_of = time_of
        self._eager_overhead_us = eager_overhead_us
        self.num_timed_launches = 0
        self.sequences: list[list[Call]] = []
        """First call of each run, for each time that runs were timed."""

    def prepare(self, calls: Sequence[Call], num_launches: int) -> Run:
        return Run(calls[0], num_launches, tuple(calls))

    def rough_us(self, call: Call) -> float:
        self.num_timed_launches += 1
        return self._time_of(call) + self._eager_overhead_us

    def time_us(self, runs: Sequence[Run], *, is_kept: bool = False) -> list[float]:
        self.sequences.append([run.calls[0] for run in runs])
        self.num_timed_launches += sum(run.num_launches for run in runs)
        return [self._time_of(run.calls[0]) for run in runs]
