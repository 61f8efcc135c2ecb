"""When a search asks for no further config."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
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
    """The limits of one search; what is measured when one is met is still waited for."""

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
    """Ends a search that has waited for a gain longer than the space's spread is worth.

    What a search can still win is judged by what it has won: the distance from a middling config
    of its start to its best, in steps of the noise. In a flat space that is a few steps, and a
    short wait shows that none is left; where configs differ by factors it is many, and the rule
    stays silent however flat the surroundings of the best are.
    """

    min_trials: int = 40
    """Trials that worked before the rule may speak."""
    num_start: int = 20
    """Trials at the start whose median is the middling config."""
    trials_per_step: float = 4.0
    """Trials without a gain for each step of noise that the search has won."""
    tolerance: float = 0.01
    """Least relative difference in time that counts as a gain, however quiet the machine."""

    def is_met(self, evaluations: Sequence[Evaluation]) -> bool:
        """Whether a search with these trials, in order, may end."""
        timings = [e.timing for e in evaluations if e.status is TrialStatus.OK and e.timing]
        if len(timings) < self.min_trials:
            return False
        times_us = [timing.median_us for timing in timings]
        best_us = min(times_us)
        # That of a middling trial: one disturbed measurement must not end a search.
        noise = max(self.tolerance, statistics.median(map(_noise, timings)))
        middling_us = statistics.median(times_us[: self.num_start])
        num_steps = max(1.0, math.log(middling_us / best_us) / noise)
        limit_us = best_us * (1.0 + noise)
        last_gain = next(i for i, time_us in enumerate(times_us) if time_us <= limit_us)
        return len(times_us) - 1 - last_gain >= self.trials_per_step * num_steps


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
