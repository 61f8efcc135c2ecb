"""Each limit ends a search, and none does so early."""

from __future__ import annotations

import pytest
from tilescout.kernels.base import Config
from tilescout.tuner.records import Evaluation, Provenance, Timing, TrialStatus
from tilescout.tuner.search.stopping import GainRule, Stopping, StoppingRule, StopReason


@pytest.mark.parametrize(
    ("num_started", "now", "reason"),
    [
        (0, 0.0, None),
        (9, 4.9, None),
        (10, 0.0, StopReason.TRIALS),
        (1, 5.0, StopReason.DEADLINE),
        (0, 99.0, None),
        (12, 99.0, StopReason.EXHAUSTED),
    ],
    ids=["start", "just-before", "trials", "deadline", "default-is-tried", "exhausted"],
)
def test_reason(num_started, now, reason):
    rule = StoppingRule(num_trials=10, deadline=5.0, space_size=12)
    assert rule.reason(num_started, now) is reason


def test_no_deadline():
    assert StoppingRule(10, None, 12).reason(3, 1e12) is None


def evaluations(*times_us: float | None, noise: float = 0.0) -> list[Evaluation]:
    found = []
    for index, time_us in enumerate(times_us):
        config = Config.of("t", {"x": index})
        if time_us is None:
            found.append(Evaluation(config, TrialStatus.CRASHED, Provenance.MEASURED, "broke"))
            continue
        low, high = time_us * (1 - noise), time_us * (1 + noise)
        spread = Timing(time_us, low, high, low, high)
        found.append(Evaluation(config, TrialStatus.OK, Provenance.MEASURED, timing=spread))
    return found


RULE = GainRule(min_trials=6, num_start=4, trials_per_step=1.0, tolerance=0.01)
FLAT = [5.15, 5.15, 5.15, 5.0]
"""Three steps of a hundredth from the middling config to the best."""
STEEP = [50.0, 50.0, 50.0, 5.0]
"""230 steps."""


@pytest.mark.parametrize(
    ("times_us", "noise", "is_met"),
    [
        ([*FLAT, 6, 6, 6], 0.0, True),
        ([*FLAT, 6, 6], 0.0, False),
        ([*FLAT, None, None, 6, 6], 0.0, False),
        ([*FLAT, 6, 6, 4.9, 6], 0.0, False),
        ([*FLAT, 6, 6, 6, 4.97], 0.0, True),
        ([*STEEP, *[6] * 200], 0.0, False),
        ([*STEEP, *[6] * 240], 0.0, True),
        ([*STEEP, *[6] * 25], 0.1, True),
        ([5.0] * 5, 0.0, False),
        ([5.0] * 6, 0.0, True),
    ],
    ids=[
        "waited-for-each-step",
        "waits",
        "failures-do-not-count",
        "gain-starts-the-wait-again",
        "gain-within-the-noise-does-not",
        "steep-space-waits-long",
        "but-not-for-ever",
        "noise-hides-steps",
        "too-few",
        "all-alike",
    ],
)
def test_waits_for_as_many_trials_as_the_search_has_won_steps(times_us, noise, is_met):
    assert RULE.is_met(evaluations(*times_us, noise=noise)) is is_met


def test_one_disturbed_measurement_ends_nothing():
    quiet = evaluations(*STEEP, *[6] * 25)
    disturbed = evaluations(5.0, noise=0.2)[0]
    assert not RULE.is_met([*quiet[:3], disturbed, *quiet[4:]])


def test_gain_rule_ends_a_search_only_where_it_is_given():
    with_rule = Stopping(StoppingRule(100, None, 100), RULE)
    without = Stopping(StoppingRule(100, None, 100))
    for stopping in (with_rule, without):
        for evaluation in evaluations(*[5.0] * 10):
            stopping.started()
            stopping.ended(evaluation)
    assert with_rule.reason(0.0) is StopReason.NO_GAIN
    assert without.reason(0.0) is None


def test_limits_count_what_was_started():
    stopping = Stopping(StoppingRule(2, None, 100))
    stopping.started()
    assert stopping.reason(0.0) is None
    stopping.started()
    assert stopping.reason(0.0) is StopReason.TRIALS
