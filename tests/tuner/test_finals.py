from __future__ import annotations

import random

import pytest
from fake_timer import FakeTimer
from tilescout.tuner.finals import FinalsResult, run_race, time_rounds
from tilescout.tuner.measure import MeasureSettings
from tilescout.tuner.timers import Run

SETTINGS = MeasureSettings(max_rounds=40)


def runs_of(times_us: list[float], scatter: float) -> tuple[list[Run], FakeTimer]:
    rng = random.Random(5)
    calls = [lambda i=i: i for i in range(len(times_us))]
    timer = FakeTimer(lambda call: times_us[call()] * (1.0 + scatter * rng.gauss(0.0, 1.0)))
    return [timer.prepare([call], 10) for call in calls], timer


def race(times_us: list[float], scatter: float) -> tuple[FinalsResult, FakeTimer]:
    runs, timer = runs_of(times_us, scatter)
    return run_race(runs, timer, SETTINGS), timer


def test_a_race_stops_once_it_is_settled() -> None:
    result, _ = race([11.0, 10.0, 12.0], 0.001)
    assert result.order == (1, 0, 2)
    assert result.is_settled
    assert [len(samples) for samples in result.samples_us] == [5, 5, 5]
    assert result.samples_us[1][0] == pytest.approx(10.0, rel=0.02)
    assert result.samples_us[2][0] == pytest.approx(12.0, rel=0.02)


def test_the_first_is_kept_unless_beaten_by_more_than_the_noise() -> None:
    assert race([10.03, 10.0, 11.0], 0.0005)[0].order == (0, 1, 2)
    assert race([10.10, 10.0, 11.0], 0.0005)[0].order == (1, 0, 2)


def test_a_race_that_does_not_settle_ends_at_its_allowance() -> None:
    result, _ = race([10.05, 10.0, 10.02], 0.05)
    assert not result.is_settled
    assert sum(map(len, result.samples_us)) <= SETTINGS.max_rounds


def test_a_race_out_of_time_ends_after_the_opening() -> None:
    runs, timer = runs_of([10.0, 10.01], 0.05)
    result = run_race(runs, timer, MeasureSettings(max_rounds=40, max_finals_s=0.0))
    assert len(timer.sequences) == 1
    assert not result.is_settled


def test_rounds_are_interleaved_and_rotate() -> None:
    runs, timer = runs_of([11.0, 10.0, 12.0], 0.001)
    samples_us = time_rounds(runs, timer, 4)
    assert [len(samples) for samples in samples_us] == [4, 4, 4]
    (sequence,) = timer.sequences
    first, second, third, fourth = (sequence[i : i + 3] for i in (0, 3, 6, 9))
    assert len(set(first)) == 3
    assert second == [*first[1:], first[0]]
    assert third == [*second[1:], second[0]]
    assert fourth == first


def test_what_slows_a_whole_round_does_not_hide_a_difference() -> None:
    rng = random.Random(3)
    drift: list[float] = []

    def time_of(call: object) -> float:
        if call is calls[0] or not drift:
            drift.append(1.0 + 0.2 * rng.random())
        return (10.2 if call is calls[0] else 10.0) * drift[-1]

    calls = [lambda: None, lambda: None]
    timer = FakeTimer(time_of)
    result = run_race([timer.prepare([call], 10) for call in calls], timer, SETTINGS)
    assert result.order == (1, 0)


def test_one_finalist_wins_alone() -> None:
    result, _ = race([10.0], 0.001)
    assert result.order == (0,)
    assert result.is_settled
