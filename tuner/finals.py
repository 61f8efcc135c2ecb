"""The last comparison of the best configs: interleaved, until their order is settled.

Two configs measured minutes apart differ by temperature and clock as much as by merit. Here each
round times every finalist once, in rotating order, and configs are compared round by round: what
slows a round slows all of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .measure import MeasureSettings
from .order_statistics import median_interval
from .timers import Run, Timer

__all__ = ["Race", "rank", "run_race"]

_ROUNDS_BETWEEN_CHECKS = 5


@dataclass(frozen=True)
class Race:
    """Outcome of the finals, finalists named by their place in what was passed."""

    order: tuple[int, ...]
    """Best first."""
    samples_us: tuple[tuple[float, ...], ...]
    """One a round for each finalist."""
    is_settled: bool
    """Whether the winner is known to be faster than, or tied with, each other finalist."""


def run_race(runs: Sequence[Run], timer: Timer, settings: MeasureSettings) -> Race:
    """Times the runs in rounds until the winner is settled or the rounds or the time run out."""
    samples_us: list[list[float]] = [[] for _ in runs]
    deadline = time.monotonic() + settings.max_finals_s
    for round_index in range(settings.max_rounds):
        # Rotating gives each finalist each predecessor in turn.
        turn = [(round_index + i) % len(runs) for i in range(len(runs))]
        for finalist, time_us in zip(turn, timer.time_us([runs[i] for i in turn]), strict=True):
            samples_us[finalist].append(time_us)
        num_rounds = round_index + 1
        is_check = num_rounds >= settings.min_rounds and num_rounds % _ROUNDS_BETWEEN_CHECKS == 0
        is_late = time.monotonic() > deadline
        if is_late or (is_check and rank(samples_us, settings.noise)[1]):
            break
    order, is_settled = rank(samples_us, settings.noise)
    return Race(order, tuple(map(tuple, samples_us)), is_settled)


def rank(samples_us: Sequence[Sequence[float]], noise: float) -> tuple[tuple[int, ...], bool]:
    """Orders finalists by paired samples; within ``noise`` of the fastest, the earlier one wins.

    Returns:
        The order, and whether the winner is settled: each other finalist is, with 95% confidence,
        either slower than the fastest by more than the noise or tied with it.
    """
    remaining = list(range(len(samples_us)))
    order: list[int] = []
    is_settled = True
    while remaining:
        fastest = min(remaining, key=lambda i: statistics.median(samples_us[i]))
        ties = [i for i in remaining if _ratio(samples_us, i, fastest) <= 1.0 + noise]
        if not order:
            is_settled = all(
                _is_pair_settled(samples_us, i, fastest, noise) for i in remaining if i != fastest
            )
        order.append(min(ties))
        remaining.remove(order[-1])
    return tuple(order), is_settled


def _ratio(samples_us: Sequence[Sequence[float]], slower: int, faster: int) -> float:
    return statistics.median(_ratios(samples_us, slower, faster))


def _is_pair_settled(
    samples_us: Sequence[Sequence[float]], slower: int, faster: int, noise: float
) -> bool:
    low, high = median_interval(_ratios(samples_us, slower, faster))
    return low > 1.0 + noise or high <= 1.0 + noise


def _ratios(samples_us: Sequence[Sequence[float]], slower: int, faster: int) -> list[float]:
    return [a / b for a, b in zip(samples_us[slower], samples_us[faster], strict=True)]
