"""Each limit ends a search, and none does so early."""

from __future__ import annotations

import pytest
from tilescout.tuner.search.stopping import StoppingRule, StopReason


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
