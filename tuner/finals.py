"""The last comparison of the best configs on a device: the source of samples of a race.

Two configs measured minutes apart differ by temperature and clock as much as by merit. So a block
times its contestants in rounds, in rotating order, and the leader is in every block. ``racing``
decides who is timed and when it is enough; all samples are kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .measure import MeasureSettings
from .racing import RaceRules, race
from .timers import Run, Timer

__all__ = ["FinalsResult", "InterleavedRuns", "run_race", "time_rounds"]


@dataclass(frozen=True)
class FinalsResult:
    """Outcome of the finals, finalists named by their place in what was passed."""

    order: tuple[int, ...]
    """Best first."""
    samples_us: tuple[tuple[float, ...], ...]
    """Every raw sample of each finalist."""
    is_settled: bool
    """Whether the winner is known to be the fastest, or the first to be within the noise of it."""


def run_race(runs: Sequence[Run], timer: Timer, settings: MeasureSettings) -> FinalsResult:
    """Races the runs until the winner is settled or the samples or the time run out.

    The first run is the incumbent: it wins unless it is beaten by more than the noise.
    """
    source = InterleavedRuns(runs, timer)
    deadline = time.monotonic() + settings.max_finals_s
    rules = RaceRules.up_to(settings.max_rounds, noise=settings.noise)
    result = race(
        source, len(runs), rules, incumbent=0, is_late=lambda: time.monotonic() >= deadline
    )
    return FinalsResult(result.order, source.samples_us, result.is_settled)


def time_rounds(
    runs: Sequence[Run], timer: Timer, num_rounds: int
) -> tuple[tuple[float, ...], ...]:
    """Samples of each run from rounds in which all take part, in rotating order."""
    source = InterleavedRuns(runs, timer)
    source.draw(range(len(runs)), num_rounds)
    return source.samples_us


class InterleavedRuns:
    """Times blocks of runs in rotating order and keeps every sample.

    Samples are not corrected for what a block has in common. Who is in a block was chosen for
    lucky earlier samples: a correction by those would keep the luck, and halves the hit rate on the
    noisiest recorded space.
    """

    def __init__(self, runs: Sequence[Run], timer: Timer) -> None:
        self._runs = runs
        self._timer = timer
        self._samples_us: list[list[float]] = [[] for _ in runs]
        self._num_rounds = 0

    @property
    def samples_us(self) -> tuple[tuple[float, ...], ...]:
        """Every raw sample of each run."""
        return tuple(map(tuple, self._samples_us))

    def draw(self, contestants: Sequence[int], num_rounds: int) -> list[list[float]]:
        """``num_rounds`` samples of each contestant, timed without a pause between them."""
        sequence = [i for _ in range(num_rounds) for i in self._turn(contestants)]
        taken: dict[int, list[float]] = {i: [] for i in contestants}
        times_us = self._timer.time_us([self._runs[i] for i in sequence], is_kept=True)
        for contestant, time_us in zip(sequence, times_us, strict=True):
            taken[contestant].append(time_us)
        for contestant, samples_us in taken.items():
            self._samples_us[contestant] += samples_us
        return [taken[i] for i in contestants]

    def _turn(self, contestants: Sequence[int]) -> list[int]:
        """Each contestant once; from round to round each gets each predecessor."""
        first = self._num_rounds % len(contestants)
        self._num_rounds += 1
        return [*contestants[first:], *contestants[:first]]
