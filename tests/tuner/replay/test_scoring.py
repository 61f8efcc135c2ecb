"""Scores against figures worked out by hand or by drawing."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from recordings import kernel_tuner_cache
from tilescout.kernels.base import Config
from tilescout.tuner.records import TrialStatus
from tilescout.tuner.replay.kernel_tuner_file import read_kernel_tuner_cache
from tilescout.tuner.replay.recorded import failed, measured, recorded_space
from tilescout.tuner.replay.scoring import expected_random_best, score_runs


def made_of(*times_us: float, num_failed: int = 0):
    configs = [Config.of("t", {"x": x}) for x in range(len(times_us) + num_failed)]
    evaluations = [measured(c, t, ()) for c, t in zip(configs, times_us, strict=False)]
    broken = configs[len(times_us) :]
    evaluations += [failed(c, TrialStatus.RUNTIME_ERROR, "broke") for c in broken]
    return recorded_space("made up", evaluations)


def test_baseline_of_two_draws_by_hand():
    # Pairs of {1, 2, 4}: best 1, 1, 2.
    assert expected_random_best(made_of(1.0, 2.0, 4.0), 4) == pytest.approx([7 / 3, 4 / 3, 1, 1])


def test_failed_configs_draw_as_the_slowest():
    assert expected_random_best(made_of(1.0, 3.0, num_failed=2), 2) == pytest.approx([2.5, 2.0])


def test_baseline_equals_drawing():
    space = read_kernel_tuner_cache("made up", kernel_tuner_cache())
    times = [e.time_us or float(space.times_us[-1]) for e in space.evaluations.values()]
    rng = random.Random(0)
    drawn = statistics.mean(min(rng.sample(times, 5)) for _ in range(20_000))
    assert expected_random_best(space, 5)[4] == pytest.approx(drawn, rel=0.01)


def test_score_by_hand():
    space = made_of(1.0, 2.0, 4.0)
    score = score_runs(space, [[4.0, 1.0], [math.inf, 2.0]], 3)
    # Baselines are 7/3, 4/3 and 1. Run 1: 4, 1, 1; run 2: failed, so 4, then 2, 2.
    first, second = (7 / 3 - 4) / (4 / 3), (4 / 3 - 2) / (1 / 3)
    assert score.p_t == pytest.approx(((first + 1 + 1) + (first + second + 0)) / 6)
    assert score.runs_within_5_pct == score.runs_within_10_pct == 0.5
    assert score.median_evaluations == 2
    assert set(score.median_ratio.values()) == {None}


def test_run_that_stopped_keeps_its_best():
    score = score_runs(made_of(1.0, 2.0, 4.0), [[2.0], [2.0, 1.0], [1.0]], 50)
    assert score.median_ratio == {25: 1.0, 50: 1.0, 100: None, 200: None}
