"""What the samples seen so far say of the median of all samples that a race may take.

A race takes at most N samples of a config. After n of them, the median of all N is unknown only as
far as the N - n unseen ones may shift it. Taking the unseen ones to be like the seen ones (a Polya
urn, the distribution-free posterior of a finite population) gives each seen value a probability of
being that median: beta-binomial, exact, whatever the shape of the samples, two modes included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import exp, lgamma

__all__ = ["MedianPosterior"]

_UNSEEN_WEIGHT = 0.5
"""Samples' worth of doubt on each side: the extremes seen need not be the extremes there are."""
_UNSEEN_DISTANCE = 0.02
"""How far beyond the extremes the unseen values are put; 0.02 and 0.05 choose equally well on the
recorded spaces of benchmarks/racing.py."""


@dataclass(frozen=True)
class MedianPosterior:
    """Values that the median of all samples may have, in order, with their probabilities."""

    values: tuple[float, ...]
    weights: tuple[float, ...]
    cumulative: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float], num_all: int) -> MedianPosterior:
        """The posterior after ``samples`` of ``num_all``; the lower median where that is even."""
        ordered = sorted(samples)
        below = _at_most(len(ordered), max(num_all, len(ordered)))
        values = (
            ordered[0] * (1.0 - _UNSEEN_DISTANCE),
            *ordered,
            ordered[-1] * (1.0 + _UNSEEN_DISTANCE),
        )
        bounds = (0.0, *below, 1.0)
        weights = tuple(high - low for low, high in pairwise(bounds))
        return cls(values, weights, tuple(accumulate(weights)))

    @property
    def mean(self) -> float:
        """Expected median."""
        return sum(v * w for v, w in zip(self.values, self.weights, strict=True))

    def odds_below(self, other: MedianPosterior, ratio: float = 1.0) -> float:
        """Probability that this median times ``ratio`` is less than the other."""
        odds = 0.0
        for value, weight in zip(self.values, self.weights, strict=True):
            if weight > 0.0:
                place = bisect_right(other.values, value * ratio)
                odds += weight * (1.0 - (other.cumulative[place - 1] if place else 0.0))
        return min(1.0, max(0.0, odds))


@cache
def _at_most(num_seen: int, num_all: int) -> tuple[float, ...]:
    """For k = 0..n: probability that the median of all is at most a value that k of n are."""
    needed, unseen = (num_all + 1) // 2, num_all - num_seen
    return tuple(
        _tail(needed - k, unseen, k + _UNSEEN_WEIGHT, num_seen - k + _UNSEEN_WEIGHT)
        for k in range(num_seen + 1)
    )


def _tail(least: int, count: int, a: float, b: float) -> float:
    """P(X >= least) of a beta-binomial X among ``count``."""
    if least <= 0:
        return 1.0
    terms = (
        lgamma(count + 1) - lgamma(x + 1) - lgamma(count - x + 1)
        + lgamma(x + a) + lgamma(count - x + b) - lgamma(count + a + b)
        + lgamma(a + b) - lgamma(a) - lgamma(b)
        for x in range(least, count + 1)
    )  # fmt: skip
    return min(1.0, sum(map(exp, terms)))
