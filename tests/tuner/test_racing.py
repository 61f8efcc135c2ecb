"""The racing rule on made-up samples; test_racing_recorded.py has those of real GPUs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tilescout.tuner.racing import Race, RaceRules, race

RULES = RaceRules.up_to(40)


class Made:
    """Samples around given times; remembers the blocks."""

    def __init__(self, times: Sequence[float], scatter: float, seed: int = 0) -> None:
        self._times = times
        self._scatter = scatter
        self._rng = random.Random(seed)
        self.blocks: list[tuple[int, ...]] = []

    def draw(self, contestants: Sequence[int], num_rounds: int) -> list[list[float]]:
        self.blocks.append(tuple(contestants))
        return [
            [self._times[i] * self._rng.gauss(1.0, self._scatter) for _ in range(num_rounds)]
            for i in contestants
        ]


def run(times: Sequence[float], scatter: float, **options: int) -> tuple[Race, Made]:
    source = Made(times, scatter)
    return race(source, len(times), RULES, **options), source


def test_clear_differences_need_the_opening_only() -> None:
    result, source = run([12.0, 10.0, 11.0], 0.001)
    assert result.order == (1, 2, 0)
    assert result.is_settled
    assert [len(s) for s in result.samples] == [RULES.opening] * 3
    assert len(source.blocks) == 1


def test_samples_go_to_the_close_calls() -> None:
    result, source = run([10.0, 10.15, 13.0, 14.0, 15.0, 16.0], 0.02)
    sizes = [len(s) for s in result.samples]
    assert result.order[0] == 0
    assert min(sizes[:2]) > 2 * RULES.opening
    assert sum(sizes[3:]) <= 3 * (RULES.opening + 2 * RULES.rounds_per_block)
    assert all(result.order[0] in block for block in source.blocks[-3:])


def test_what_cannot_be_told_apart_ends_at_the_allowance() -> None:
    result, _ = run([10.0, 10.04, 10.06, 10.08], 0.05)
    assert not result.is_settled
    assert sum(map(len, result.samples)) <= RULES.share * RULES.max_samples * 4


def test_ties_are_settled_without_an_order_between_them() -> None:
    result, _ = run([10.0, 10.0, 10.0], 0.0002)
    assert result.is_settled
    assert max(len(s) for s in result.samples) <= RULES.opening + RULES.rounds_per_block


def test_a_wrong_start_is_put_right() -> None:
    """The fastest shows its slow mode first."""

    class LateBloomer(Made):
        def draw(self, contestants: Sequence[int], num_rounds: int) -> list[list[float]]:
            drawn = super().draw(contestants, num_rounds)
            if len(self.blocks) == 1:
                drawn[0] = [1.04 * x for x in drawn[0][:3]] + drawn[0][3:]
            return drawn

    result = race(LateBloomer([10.0, 10.2, 10.3, 10.4], 0.01), 4, RULES)
    assert result.order[0] == 0


@pytest.mark.parametrize(
    ("incumbent_time", "winner"),
    [
        pytest.param(10.03, 0, id="within the noise: kept"),
        pytest.param(10.2, 1, id="beaten by more: replaced"),
        pytest.param(9.0, 0, id="fastest: wins"),
    ],
)
def test_the_incumbent_is_kept_unless_beaten_by_more_than_the_noise(
    incumbent_time: float, winner: int
) -> None:
    result, _ = run([incumbent_time, 10.0, 11.0, 12.0], 0.001, incumbent=0)
    assert result.order[0] == winner
    assert result.is_settled


def test_an_incumbent_in_doubt_is_sampled() -> None:
    """Many are faster, so it would never be among the likeliest to lead."""
    result, _ = run([10.06, 9.99, 10.0, 10.0, 10.0, 10.0], 0.004, incumbent=0)
    assert len(result.samples[0]) > RULES.opening


def test_the_error_rate_is_what_the_rules_say() -> None:
    """Far enough apart to matter, close enough to be hard."""
    wrong = 0
    for seed in range(200):
        rules = replace(RULES, share=1.0)
        result = race(Made([10.0, 10.1, 10.1, 10.2], 0.01, seed), 4, rules)
        best = min(range(4), key=lambda i: sorted(result.samples[i])[len(result.samples[i]) // 2])
        wrong += result.order[0] != 0
        assert not (result.is_settled and abs(best - result.order[0]) > 3)
    assert wrong <= 0.05 * 200


def test_a_race_that_is_late_ends() -> None:
    result, source = run([10.0, 10.01], 0.05, is_late=lambda: True)
    assert len(source.blocks) == 1
    assert not result.is_settled


def test_one_contestant_wins_alone() -> None:
    result, _ = run([10.0], 0.05)
    assert result.order == (0,)
    assert result.is_settled
