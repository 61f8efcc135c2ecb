"""Learns which configs are among the fast ones: a random forest that classifies.

The method is likelihood-free Bayesian optimisation (Song et al., ICML 2022): the trials below a
quantile of the times are the positives, each weighted by how far below it lies, and the predicted
probability of being one ranks what is left. It needs no distances between nominal values, takes
failures as plain negatives, and scores a whole enumerated space at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from sklearn.ensemble import RandomForestClassifier

from .candidates import Matrix

__all__ = ["Forest", "ForestSettings"]

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
_SMALLEST_MARGIN = 1e-3
"""Of a positive at the very quantile: a thousandth in time, so that its weight is not zero."""
_NUM_COMPARED = 100
"""Best-scored candidates among which a batch is chosen."""


@dataclass(frozen=True)
class ForestSettings:
    """What the fit depends on; chosen on recorded spaces, see docs/search.md."""

    num_trees: int = 30
    good_share: float = 0.15
    """Share of the trials that count as fast."""
    diversity: float = 0.3
    """What a candidate loses if it shares every leaf with the batch so far."""


class Forest:
    """A forest fitted to the trials so far."""

    def __init__(
        self, rows: Matrix, log_times: Vector, settings: ForestSettings, seed: int
    ) -> None:
        """``log_times`` are infinite for trials that failed; at least one is finite."""
        is_good, weights = _labels(log_times, settings.good_share)
        self._settings = settings
        self._model = RandomForestClassifier(settings.num_trees, random_state=seed, n_jobs=1)
        self._model.fit(rows, is_good, sample_weight=weights)

    def scores(self, rows: Matrix) -> Vector:
        """Probability of each row to be among the fast ones."""
        classes = list(self._model.classes_)
        if True not in classes or len(classes) == 1:
            return np.full(len(rows), 0.5)
        scores: Vector = self._model.predict_proba(rows)[:, classes.index(True)]
        return scores

    def batch(self, rows: Matrix, scores: Vector, in_flight: Matrix, n: int) -> list[int]:
        """Indices of up to ``n`` rows with high scores, unlike each other and what is in flight.

        Greedy: each pick lowers the score of what shares its leaves.
        """
        top = np.argsort(-scores, kind="stable")[:_NUM_COMPARED]
        leaves = self._leaves(rows[top])
        likeness = np.zeros(len(top))
        num_chosen = len(in_flight)
        for other in self._leaves(in_flight) if num_chosen else ():
            likeness += (leaves == other).mean(axis=1)
        left = scores[top].copy()
        chosen: list[int] = []
        while len(chosen) < min(n, len(top)):
            penalties = self._settings.diversity * likeness / max(1, num_chosen)
            best = int(np.argmax(left - penalties))
            chosen.append(int(top[best]))
            left[best] = -np.inf
            likeness += (leaves == leaves[best]).mean(axis=1)
            num_chosen += 1
        return chosen

    def _leaves(self, rows: Matrix) -> np.ndarray:
        """Leaf of each tree that each row ends in; rows that share leaves are alike to it."""
        return np.asarray(self._model.apply(rows))


def _labels(log_times: Vector, good_share: float) -> tuple[np.ndarray, Vector]:
    """Which trials are fast, and the weight of each: 1 in the mean of either class."""
    ordered = np.sort(log_times)
    num_good = max(2, math.ceil(good_share * len(ordered)))
    is_good = (log_times <= ordered[min(num_good, len(ordered)) - 1]) & np.isfinite(log_times)
    weights: Vector = np.ones(len(log_times))
    quantile = ordered[min(num_good, len(ordered) - 1)]
    if np.isfinite(quantile):
        margins = np.maximum(quantile - log_times[is_good], 0.0) + _SMALLEST_MARGIN
        weights[is_good] = margins / margins.mean()
    return is_good, weights
