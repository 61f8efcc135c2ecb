"""When a search asks for no further config."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from ..records import Evaluation, Timing, TrialStatus

__all__ = ["GainRule", "StopReason", "Stopping", "StoppingRule"]


class StopReason(StrEnum):
    """Why a search ended."""

    TRIALS = "all trials done"
    DEADLINE = "time budget used up"
    EXHAUSTED = "every config of the space tried"
    NO_GAIN = "further gain is unlikely to exceed the noise"


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


@dataclass(frozen=True)
class GainRule:
    """Ends a search whose best configs crowd together: what is left to gain is in the noise.

    Where many different configs are as fast as the best within the noise, the lower end of the
    distribution of times has been reached, and one more step would not show. Where the best stands
    alone, the tail is still open and the search goes on, however long nothing better was found.
    """

    min_trials: int = 40
    """Trials that worked before the rule may speak."""
    patience: int = 20
    """Trials since the last gain beyond the noise."""
    num_crowded: int = 8
    """Configs, the best included, that must lie within the tolerance."""
    tolerance: float = 0.01
    """Least relative difference in time that counts as a gain, however quiet the machine."""

    def is_met(self, evaluations: list[Evaluation]) -> bool:
        """Whether a search with these trials, in order, may end."""
        timings = [e.timing for e in evaluations if e.status is TrialStatus.OK and e.timing]
        if len(timings) < self.min_trials:
            return False
        best = min(timings, key=lambda timing: timing.median_us)
        limit = best.median_us * (1.0 + max(self.tolerance, _noise(best)))
        num_crowded = sum(timing.median_us <= limit for timing in timings)
        earlier = [timing.median_us for timing in timings[: -self.patience]]
        return num_crowded >= self.num_crowded and min(earlier, default=math.inf) <= limit


def _noise(timing: Timing) -> float:
    """Half the confidence interval of the median, relative; 0 where the spread is not known."""
    return max(0.0, timing.ci_high_us - timing.ci_low_us) / 2.0 / timing.median_us


@dataclass
class Stopping:
    """The rules of one search with what they need to know of it."""

    rule: StoppingRule
    gain: GainRule | None = None
    """None where the search runs all its trials."""
    num_started: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)

    def started(self) -> None:
        """A trial was started."""
        self.num_started += 1

    def ended(self, evaluation: Evaluation) -> None:
        """A trial ended."""
        self.evaluations.append(evaluation)

    def reason(self, now: float) -> StopReason | None:
        """None as long as another trial may start."""
        reason = self.rule.reason(self.num_started, now)
        if reason is None and self.gain is not None and self.gain.is_met(self.evaluations):
            return StopReason.NO_GAIN
        return reason
