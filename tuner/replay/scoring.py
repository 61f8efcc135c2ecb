"""Scores the runs of a search over a recorded space: ratios to the optimum, shares, P_t.

P_t is the score of Willemsen et al., doi 10.1016/j.future.2024.05.021: 0 for what random draws
without replacement are expected to find after t evaluations, 1 for the optimum. Failed configs
count as draws that take as long as the slowest config that worked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .recorded import RecordedSpace

__all__ = ["COUNTS", "Score", "expected_random_best", "score_runs"]

COUNTS = (25, 50, 100, 200)
"""Distinct evaluations after which a run is looked at."""

Curve = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Score:
    """How the runs of one sampler fared on one recorded space."""

    num_runs: int
    median_ratio: dict[int, float | None]
    """Best time found over the optimum by number of evaluations; None beyond the last trial."""
    runs_within_5_pct: float
    """Share of runs whose best at their end is within 5% of the optimum."""
    runs_within_10_pct: float
    p_t: float
    """Mean of P_t over the runs and over all t from 1 to the number of trials."""
    median_evaluations: float
    """Evaluations a run took; fewer than the trials where it stopped by itself."""


def score_runs(space: RecordedSpace, runs: Sequence[Sequence[float]], num_trials: int) -> Score:
    """The score of runs, each the times of its evaluations in order; infinite where they failed.

    A run that ended early keeps its best for the later counts.
    """
    slowest = float(space.times_us[-1])
    curves = np.array([_curve(run, num_trials, slowest) for run in runs])
    ratios = curves / space.optimum_us
    ends = ratios[:, -1]
    return Score(
        num_runs=len(runs),
        median_ratio={
            count: float(np.median(ratios[:, count - 1])) if count <= num_trials else None
            for count in COUNTS
        },
        runs_within_5_pct=float(np.mean(ends <= 1.05)),
        runs_within_10_pct=float(np.mean(ends <= 1.10)),
        p_t=float(np.mean(_p_t(space, curves))),
        median_evaluations=float(np.median([len(run) for run in runs])),
    )


def _curve(times_us: Sequence[float], length: int, slowest_us: float) -> Curve:
    """Best time after each evaluation."""
    best: Curve = np.full(length, slowest_us)
    found = np.minimum.accumulate(np.array(times_us[:length], dtype=np.float64))
    best[: len(found)] = np.minimum(found, slowest_us)
    best[len(found) :] = best[len(found) - 1] if len(found) else slowest_us
    return best


def _p_t(space: RecordedSpace, curves: np.ndarray) -> np.ndarray:
    baseline = expected_random_best(space, curves.shape[1])
    room = baseline - space.optimum_us
    # With every config drawn, random search is at the optimum too and cannot be beaten.
    has_room = room > 1e-9 * space.optimum_us
    is_optimal = curves <= space.optimum_us * (1 + 1e-9)
    return np.where(
        has_room, (baseline - curves) / np.where(has_room, room, 1.0), is_optimal.astype(float)
    )


def expected_random_best(space: RecordedSpace, num_draws: int) -> Curve:
    """Expected best time after 1 to ``num_draws`` random draws without replacement.

    The best of t draws out of N is at least the i-th smallest exactly when all t draws come from
    the N - i + 1 that are not smaller.
    """
    times = np.concatenate([space.times_us, np.full(space.num_failed, space.times_us[-1])])
    total = len(times)
    steps = np.diff(times, prepend=0.0)
    expected: Curve = np.empty(num_draws)
    # Probability that no draw is among the i smallest, for i = 0 .. N-1; one factor a draw.
    survival = np.ones(total)
    left = total - np.arange(total, dtype=np.float64)
    for draw in range(num_draws):
        if draw < total:
            survival = survival * np.clip(left - draw, 0.0, None) / (total - draw)
        expected[draw] = float(steps @ survival)
    return expected
