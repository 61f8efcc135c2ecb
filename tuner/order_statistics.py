"""What can be said of a median without assuming a distribution.

GPU times are skewed and sometimes bimodal, so means and normal intervals mislead. Everything here
comes from the sorted samples alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache

from .records import Timing

__all__ = ["MIN_SAMPLES", "median_interval", "quantile", "timing_of"]

MIN_SAMPLES = 6
"""Fewest samples whose extremes enclose the median in at least 95 of 100 cases."""

_CONFIDENCE = 0.95


def timing_of(samples_us: Sequence[float], *, keep_samples: bool = False) -> Timing:
    """Median, tenth and ninetieth percentile, and the interval of the median."""
    low, high = median_interval(samples_us)
    return Timing(
        median_us=statistics.median(samples_us),
        p10_us=quantile(samples_us, 0.1),
        p90_us=quantile(samples_us, 0.9),
        ci_low_us=low,
        ci_high_us=high,
        samples_us=tuple(samples_us) if keep_samples else (),
        num_samples=len(samples_us),
    )


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample quantile, interpolated between the two samples beside it."""
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    weight = position - below
    return ordered[below] * (1.0 - weight) + ordered[above] * weight


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Two of the samples that enclose the true median with 95% confidence.

    With fewer than ``MIN_SAMPLES`` samples these are the extremes, and the confidence is less.
    """
    ordered = sorted(samples)
    rank = _lower_rank(len(ordered))
    return ordered[rank], ordered[-1 - rank]


@cache
def _lower_rank(count: int) -> int:
    """Largest k for which samples k and count-1-k, counted from 0, enclose the median.

    The number of samples below the median is Binomial(count, 1/2). Sample k lies above the median
    when at most k samples lie below it.
    """
    tail = (1.0 - _CONFIDENCE) / 2 * 2.0**count
    rank, below = 0, 1
    while below + math.comb(count, rank + 1) <= tail:
        rank += 1
        below += math.comb(count, rank)
    return rank
