"""Dividing trials and time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilescout.tuner.search.allotment import TimeAllotment, divide, num_rounds


@pytest.mark.parametrize(
    ("total", "weights", "room", "expected"),
    [
        pytest.param(12, [1, 2, 3], [99, 99, 99], [2, 4, 6], id="in proportion"),
        pytest.param(12, [1, 1, 1], [2, 99, 99], [2, 5, 5], id="what has no room goes to others"),
        pytest.param(10, [1, 1, 1], [99, 99, 99], [4, 3, 3], id="the rest to the first"),
        pytest.param(10, [1, 1], [3, 4], [3, 4], id="more than there is room"),
        pytest.param(1, [1, 5], [9, 9], [0, 1], id="one for the heavier"),
        pytest.param(0, [1, 1], [9, 9], [0, 0], id="nothing"),
        pytest.param(5, [], [], [], id="nobody"),
    ],
)
def test_trials_are_divided(total, weights, room, expected):
    assert divide(total, weights, room) == expected


@given(
    st.integers(0, 500),
    st.lists(st.tuples(st.floats(0.1, 30), st.integers(0, 200)), min_size=1, max_size=6),
)
def test_all_is_given_and_nobody_gets_more_than_its_room(total, rivals):
    weights, room = [w for w, _ in rivals], [r for _, r in rivals]
    given_out = divide(total, weights, room)
    assert sum(given_out) == min(total, sum(room))
    assert all(0 <= g <= r for g, r in zip(given_out, room, strict=True))


@pytest.mark.parametrize(("rivals", "rounds"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (8, 4)])
def test_rounds_halve_the_rivals(rivals, rounds):
    assert num_rounds(rivals) == rounds
    num = rivals
    for _ in range(rounds - 1):
        num = -(-num // 2)
    assert num == 1


def test_time_is_shared_by_trials_and_what_is_left_goes_on():
    now = [100.0]
    allotment = TimeAllotment(180.0, 8, lambda: now[0])
    assert allotment.until(2) == 120.0
    now[0] = 110.0  # ended early
    assert allotment.until(3) == pytest.approx(110.0 + 70.0 * 3 / 6)
    assert not allotment.is_over
    now[0] = 180.0
    assert allotment.is_over
    assert allotment.until(3) == 180.0


def test_without_a_deadline_time_has_no_end():
    allotment = TimeAllotment(None, 8, lambda: 1e9)
    assert allotment.until(4) is None
    assert not allotment.is_over
