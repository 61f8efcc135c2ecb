from __future__ import annotations

import random
import statistics

import pytest
from tilescout.tuner.median_posterior import MedianPosterior


def test_weights_are_probabilities() -> None:
    posterior = MedianPosterior.of([5.0, 1.0, 3.0], 31)
    assert sum(posterior.weights) == pytest.approx(1.0)
    assert min(posterior.weights) >= 0.0
    assert list(posterior.values) == sorted(posterior.values)


def test_once_all_is_seen_the_median_is_certain() -> None:
    samples = [9.0, 1.0, 4.0, 2.0, 7.0]
    posterior = MedianPosterior.of(samples, len(samples))
    assert posterior.mean == pytest.approx(statistics.median(samples))
    assert max(posterior.weights) == pytest.approx(1.0)


def test_a_value_that_enough_samples_undercut_cannot_be_the_median() -> None:
    posterior = MedianPosterior.of([1.0, 1.0, 1.0, 9.0], 5)
    assert dict(zip(posterior.values, posterior.weights, strict=True))[9.0] == 0.0


@pytest.mark.parametrize("num_seen", [3, 8, 20])
@pytest.mark.parametrize("shape", ["normal", "two modes"])
def test_the_odds_are_borne_out(num_seen: int, shape: str) -> None:
    """Of pairs said to be in order with 80 to 100%, about so many are."""
    rng = random.Random(num_seen)

    def draw() -> list[float]:
        level = rng.uniform(1.0, 1.05)
        high = 1.08 if shape == "two modes" else 1.0
        return [
            level * (high if rng.random() < 0.3 else 1.0) * rng.gauss(1, 0.01) for _ in "x" * 31
        ]

    promised, kept = [], []
    for _ in range(1500):
        a, b = draw(), draw()
        seen_a, seen_b = (MedianPosterior.of(x[:num_seen], 31) for x in (a, b))
        odds = seen_a.odds_below(seen_b)
        if odds > 0.8:
            promised.append(odds)
            kept.append(statistics.median(a) < statistics.median(b))
    assert len(kept) > 200
    assert statistics.mean(kept) == pytest.approx(statistics.mean(promised), abs=0.05)


def test_odds_count_by_how_much() -> None:
    fast = MedianPosterior.of([1.0] * 20, 31)
    slow = MedianPosterior.of([1.01] * 20, 31)
    assert fast.odds_below(slow) > 0.99
    assert fast.odds_below(slow, 1.005) > 0.99
    assert fast.odds_below(slow, 1.015) < 0.01
    assert slow.odds_below(fast) < 0.01
