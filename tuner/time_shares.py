"""Shares a run's time budget between its studies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

__all__ = ["TimeShares"]


class TimeShares:
    """Deadlines of studies that follow one another, each an even share of the time that is left.

    A study ends after its deadline: what is being compiled and measured is finished, and finalists
    are timed again. The median of what earlier studies took beyond theirs is kept back from each
    share, so that the last studies get as long as the first; half a share at most, so that a slow
    start leaves nobody without time.
    """

    def __init__(
        self, budget_s: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts the budget, in seconds; None: no study has a deadline."""
        self._clock = clock
        self._end = None if budget_s is None else clock() + budget_s
        self._deadline: float | None = None
        self._late_s: list[float] = []

    def next_deadline(self, num_left: int) -> float | None:
        """Deadline, on the clock, of the study that begins now; the one before has ended.

        Args:
            num_left: studies still to do, this one included.
        """
        if self._end is None:
            return None
        now = self._clock()
        if self._deadline is not None:
            self._late_s.append(max(0.0, now - self._deadline))
        share_s = max(0.0, self._end - now) / num_left
        late_s = statistics.median(self._late_s) if self._late_s else 0.0
        self._deadline = now + share_s - min(late_s, share_s / 2)
        return self._deadline
