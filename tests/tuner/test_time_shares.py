"""Deadlines of a run's studies: even shares, what ends late kept back."""

from __future__ import annotations

import pytest
from tilescout.tuner.time_shares import TimeShares


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def search_times(budget_s, num_studies, late_s, start_s=0.0) -> list[float]:
    """How long studies search that end ``late_s`` after their deadlines."""
    clock = Clock()
    shares = TimeShares(budget_s, clock=clock)
    found = []
    for index in range(num_studies):
        deadline = shares.next_deadline(num_studies - index)
        found.append(deadline - clock.now)
        clock.now = deadline + late_s + (0.0 if index else start_s)
    return found


def test_without_a_budget_nobody_has_a_deadline() -> None:
    assert TimeShares(None).next_deadline(3) is None


def test_studies_that_end_in_time_share_evenly() -> None:
    assert search_times(12.0, 4, 0.0) == pytest.approx([3.0] * 4)


def test_what_a_study_leaves_goes_to_those_after_it() -> None:
    clock = Clock()
    shares = TimeShares(10.0, clock=clock)
    assert shares.next_deadline(2) == 105.0
    clock.now = 101.0
    assert shares.next_deadline(1) == 110.0


def test_studies_that_end_late_leave_the_last_as_much_as_the_first() -> None:
    found = search_times(290.0, 39, 2.6)
    assert found[0] == pytest.approx(290 / 39)
    assert min(found[1:]) > 4.5
    assert max(found[1:]) - min(found[1:]) < 0.5


def test_one_study_that_ends_late_costs_the_others_nothing_for_long() -> None:
    clock = Clock()
    shares = TimeShares(100.0, clock=clock)
    found = []
    for index in range(10):
        deadline = shares.next_deadline(10 - index)
        found.append(deadline - clock.now)
        clock.now = deadline + (0.0 if index else 8.0)
    assert found[1] == pytest.approx(82.0 / 9 / 2)
    assert found[3:] == pytest.approx([found[3]] * 7)


def test_a_slow_start_leaves_everybody_half_a_share() -> None:
    found = search_times(60.0, 10, 1.0, start_s=20.0)
    assert found[1] == pytest.approx((60.0 - found[0] - 21.0) / 9 / 2)
    assert min(found[1:]) > 1.0


def test_a_spent_budget_gives_deadlines_that_have_passed() -> None:
    clock = Clock()
    shares = TimeShares(1.0, clock=clock)
    clock.now = 105.0
    assert shares.next_deadline(3) == 105.0
