"""Prediction through real compile processes: order, every fate, finals, a whole study."""

from __future__ import annotations

import pytest
from tilescout.kernels.base import Config
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.evaluators.predict import PredictEvaluator
from tilescout.tuner.records import Provenance, TrialStatus
from tilescout.tuner.store import Store
from toy_study import search_toy


@pytest.fixture(scope="module")
def pool():
    with CompilePool(2, timeout_s=3.0) as workers:
        yield workers


@pytest.fixture
def evaluator(toy, h200, pool):
    return PredictEvaluator(toy.ToyProblem(size=2**20), h200, pool=pool)


def toy_config(behaviour: str = "ok", **changes) -> Config:
    values = {"block_n": 16, "num_stages": 2, "split_rule": "none", "behaviour": behaviour}
    return Config.of("triton", {**values, **changes})


def test_prediction_has_a_time_without_spread_and_the_facts(evaluator):
    evaluator.submit(toy_config())
    found = evaluator.collect()
    assert found.status is TrialStatus.OK
    assert found.provenance is Provenance.PREDICTED
    timing = found.timing
    assert timing.median_us > 0
    spread = {timing.p10_us, timing.p90_us, timing.ci_low_us, timing.ci_high_us}
    assert spread == {timing.median_us}
    assert timing.num_samples == 0
    assert [f.kernel for f in found.facts] == ["toy_kernel"]


def test_more_in_flight_is_faster(evaluator):
    configs = [toy_config(num_stages=1), toy_config(num_stages=4)]
    for config in configs:
        evaluator.submit(config)
    few, many = (evaluator.collect() for _ in configs)
    assert many.time_us < few.time_us


def test_every_fate_costs_one_trial_and_comes_in_order(evaluator):
    fates = {
        "compile_hang": TrialStatus.TIMEOUT,
        "ok": TrialStatus.OK,
        "compile_crash": TrialStatus.CRASHED,
        "compile_error": TrialStatus.COMPILE_ERROR,
    }
    for behaviour in fates:
        evaluator.submit(toy_config(behaviour))
    collected = [evaluator.collect() for _ in fates]
    assert [e.config["behaviour"] for e in collected] == list(fates)
    assert [e.status for e in collected] == list(fates.values())
    assert all(bool(e.reason) == (e.status is not TrialStatus.OK) for e in collected)
    assert all((e.timing is None) == (e.status is not TrialStatus.OK) for e in collected)


def test_what_cannot_launch_is_out_of_resources(evaluator):
    evaluator.submit(toy_config(num_stages=300))
    found = evaluator.collect()
    assert found.status is TrialStatus.OUT_OF_RESOURCES
    assert "shared memory" in found.reason
    assert found.facts


def test_finals_are_ordered_by_time_and_ties_keep_their_order(evaluator):
    slow, fast = toy_config(num_stages=1), toy_config(num_stages=4)
    twins = [toy_config(num_stages=2, split_rule=rule) for rule in ("none", "fixed")]
    broken = toy_config("compile_error")
    finals = evaluator.finals([broken, slow, *twins, fast])
    assert [e.config for e in finals] == [fast, *twins, slow, broken]
    assert finals[1].time_us == finals[2].time_us


def test_own_pool_ends_with_the_evaluator_and_a_shared_one_does_not(toy, h200, pool, evaluator):
    with PredictEvaluator(toy.ToyProblem(size=64), h200, num_workers=1) as own:
        assert own.capacity == 2
        own.submit(toy_config())
        assert own.collect().status is TrialStatus.OK
    with pytest.raises(AssertionError):
        own.submit(toy_config())
    evaluator.close()
    evaluator.submit(toy_config())
    assert evaluator.collect().status is TrialStatus.OK


def test_study_by_prediction_takes_one_course(toy, h200, pool, tmp_path):
    courses = []
    for name in ("a.db", "b.db"):
        with Store.open(tmp_path / name) as store:
            evaluator = PredictEvaluator(toy.ToyProblem(size=64), h200, pool=pool)
            winner = search_toy(store, h200, evaluator=evaluator, num_trials=10)
            records = store.trials(winner.study.study_id)
        courses.append([r.evaluation.config for r in records])
        assert {r.evaluation.provenance for r in records} == {Provenance.PREDICTED}
        best = min(r.evaluation.time_us for r in records)
        assert winner.trial.evaluation.time_us == best
    assert courses[0] == courses[1]
