from __future__ import annotations

import random
import statistics

import pytest
from tilescout.tuner.order_statistics import MIN_SAMPLES, median_interval, quantile, timing_of


@pytest.mark.parametrize("count", [MIN_SAMPLES, 11, 40])
@pytest.mark.parametrize("shape", ["uniform", "skewed"])
def test_the_interval_covers_the_median_in_95_of_100_cases(count: int, shape: str) -> None:
    rng = random.Random(count)
    draw = rng.random if shape == "uniform" else lambda: rng.lognormvariate(0.0, 1.0)
    true_median = 0.5 if shape == "uniform" else 1.0
    covered = 0
    for _ in range(2000):
        low, high = median_interval([draw() for _ in range(count)])
        covered += low <= true_median <= high
    assert 0.94 <= covered / 2000 <= 0.995


def test_the_interval_is_narrower_than_the_extremes_once_there_are_samples_enough() -> None:
    samples = list(range(9))
    assert median_interval(samples[:MIN_SAMPLES]) == (0, 5)
    # P(at most 1 of 9 below the median) = 10/512 = 2.0%, at most 2 would be 9%.
    assert median_interval(samples) == (1, 7)


def test_the_order_of_samples_does_not_matter() -> None:
    samples = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 7.0]
    assert timing_of(samples) == timing_of(sorted(samples))


def test_quantiles_agree_with_the_standard_library() -> None:
    rng = random.Random(1)
    samples = [rng.random() for _ in range(23)]
    expected = statistics.quantiles(samples, n=10, method="inclusive")
    assert quantile(samples, 0.1) == pytest.approx(expected[0])
    assert quantile(samples, 0.9) == pytest.approx(expected[-1])


def test_a_single_sample_is_its_own_summary() -> None:
    timing = timing_of([3.0])
    assert (timing.median_us, timing.p10_us, timing.p90_us) == (3.0, 3.0, 3.0)
    assert (timing.ci_low_us, timing.ci_high_us, timing.num_samples) == (3.0, 3.0, 1)


def test_raw_samples_are_kept_only_on_request() -> None:
    assert timing_of([2.0, 1.0]).samples_us == ()
    assert timing_of([2.0, 1.0], keep_samples=True).samples_us == (2.0, 1.0)
