"""When a search asks for no further config."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["StopReason", "StoppingRule"]


class StopReason(StrEnum):
    """Why a search ended."""

    TRIALS = "all trials done"
    DEADLINE = "time budget used up"
    EXHAUSTED = "every config of the space tried"


@dataclass(frozen=True)
class StoppingRule:
    """The limits of one search; what is in flight when one is met is still waited for."""

    num_trials: int
    """Trials of the study in all, those of earlier runs included."""
    deadline: float | None
    """In seconds of ``time.monotonic``; None for no limit."""
    space_size: int

    def reason(self, num_started: int, now: float) -> StopReason | None:
        """None as long as another trial may start after ``num_started`` of them."""
        if num_started >= self.space_size:
            return StopReason.EXHAUSTED
        if num_started >= self.num_trials:
            return StopReason.TRIALS
        # The default at least is tried, however little time is left.
        if num_started and self.deadline is not None and now >= self.deadline:
            return StopReason.DEADLINE
        return None
