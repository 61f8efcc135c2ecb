from __future__ import annotations

import random

import pytest
from fake_timer import FakeTimer
from tilescout.tuner.finals import Race, rank, run_race
from tilescout.tuner.measure import MeasureSettings

NOISE = 0.005


def noisy(rng: random.Random, time_us: float, share: float = 0.002) -> list[float]:
    return [time_us * (1.0 + rng.gauss(0.0, share)) for _ in range(30)]


def test_clearly_different_times_are_ordered_and_settled() -> None:
    rng = random.Random(0)
    order, is_settled = rank([noisy(rng, 12.0), noisy(rng, 10.0), noisy(rng, 11.0)], NOISE)
    assert order == (1, 2, 0)
    assert is_settled


def test_a_tie_within_the_noise_goes_to_the_earlier() -> None:
    rng = random.Random(1)
    order, is_settled = rank([noisy(rng, 10.02), noisy(rng, 10.0), noisy(rng, 9.0)], NOISE)
    assert order == (2, 0, 1)
    order, is_settled = rank([noisy(rng, 10.02), noisy(rng, 10.0)], NOISE)
    assert order == (0, 1)
    assert is_settled


def test_a_difference_beyond_the_noise_is_no_tie() -> None:
    rng = random.Random(2)
    order, _ = rank([noisy(rng, 10.2), noisy(rng, 10.0)], NOISE)
    assert order == (1, 0)


def test_what_slows_a_whole_round_does_not_hide_a_difference() -> None:
    rng = random.Random(3)
    drift = [1.0 + 0.2 * rng.random() for _ in range(30)]
    slower = [10.2 * d for d in drift]
    faster = [10.0 * d for d in drift]
    assert rank([slower, faster], NOISE) == ((1, 0), True)


def test_wide_scatter_is_not_settled() -> None:
    rng = random.Random(4)
    _, is_settled = rank([noisy(rng, 10.0, 0.1), noisy(rng, 10.1, 0.1)], NOISE)
    assert not is_settled


def race(times_us: list[float], scatter: float) -> tuple[Race, FakeTimer]:
    rng = random.Random(5)
    calls = [lambda i=i: i for i in range(len(times_us))]
    timer = FakeTimer(lambda call: times_us[call()] * (1.0 + scatter * rng.gauss(0.0, 1.0)))
    runs = [timer.prepare([call], 10) for call in calls]
    return run_race(runs, timer, MeasureSettings(min_rounds=10, max_rounds=40)), timer


def test_a_race_stops_once_it_is_settled() -> None:
    result, _ = race([11.0, 10.0, 12.0], 0.001)
    assert result.order == (1, 0, 2)
    assert result.is_settled
    assert [len(samples) for samples in result.samples_us] == [10, 10, 10]
    assert result.samples_us[1][0] == pytest.approx(10.0, rel=0.02)
    assert result.samples_us[2][0] == pytest.approx(12.0, rel=0.02)


def test_a_race_that_does_not_settle_ends_at_the_cap() -> None:
    result, _ = race([10.05, 10.0], 0.05)
    assert not result.is_settled
    assert len(result.samples_us[0]) == 40


def test_rounds_are_interleaved_and_rotate() -> None:
    _, timer = race([11.0, 10.0, 12.0], 0.001)
    assert all(len(set(sequence)) == 3 for sequence in timer.sequences)
    first, second, third, fourth = timer.sequences[:4]
    assert second == [*first[1:], first[0]]
    assert third == [*second[1:], second[0]]
    assert fourth == first


def test_one_finalist_wins_alone() -> None:
    result, _ = race([10.0], 0.001)
    assert result.order == (0,)
    assert result.is_settled
