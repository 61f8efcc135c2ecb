"""Parts through real processes on the CPU: judged with the whole operation, timed alone."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import parts_study
import parts_toy_op
import pytest
from tilescout.kernels.base import Config
from tilescout.search_spaces.parts import PartScope, algorithms
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import worker
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.evaluators.measure import MeasureEvaluator
from tilescout.tuner.evaluators.predict import PredictEvaluator
from tilescout.tuner.gpu_worker import GpuWorker
from tilescout.tuner.measure import MeasureSettings
from tilescout.tuner.records import Evaluation, MeasurementPolicy, TrialStatus

PROBLEM = parts_toy_op.PartsToyProblem(size=256)
QUICK = MeasureSettings(run_target_us=500.0, warmup_us=500.0, max_samples=12, max_rounds=48)


@pytest.fixture(autouse=True)
def _registered() -> None:
    parts_study.register()


@pytest.fixture
def split(h200: Any) -> Any:
    """The algorithm with parts."""
    (found,) = [a for a in algorithms(joint_space(PROBLEM, h200).spaces[0]) if a.part_names[1:]]
    return found


def scope_of(split: Any, part: str, **changes: Any) -> PartScope:
    return PartScope.of(split, part, split.space.default.replace(**changes))


def evaluate(evaluator: Any, config: Config) -> Evaluation:
    evaluator.submit(config)
    return evaluator.collect()


def test_a_part_alone_is_timed_and_its_config_is_what_is_kept(split: Any, h200: Any) -> None:
    with CompilePool(1) as compilers, closing(GpuWorker()) as gpu:
        options: Any = {
            "settings": QUICK,
            "torch_device": "cpu",
            "compilers": compilers,
            "gpu": gpu,
        }
        with MeasureEvaluator(PROBLEM, h200, **options) as whole:
            total = evaluate(whole, split.space.default)
        times_us = []
        for part in parts_toy_op.PARTS:
            scope = scope_of(split, part)
            with MeasureEvaluator(PROBLEM, h200, scope=scope, **options) as evaluator:
                found = evaluate(evaluator, scope.of_whole(split.space.default))
            assert found.status is TrialStatus.OK, found.reason
            assert found.max_abs_error is not None
            assert found.config == scope.of_whole(split.space.default)
            assert [facts.kernel for facts in found.facts] == [f"{part}_kernel"]
            assert found.time_us > parts_toy_op.part_time_us(split.space.default, part)
            times_us.append(found.time_us)
    assert total.status is TrialStatus.OK
    assert max(times_us) < 0.7 * total.time_us
    assert sum(times_us) == pytest.approx(total.time_us, rel=0.4)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's state for the problem, without a process."""
    monkeypatch.setattr(worker, "_state", None)
    worker.prepare(
        worker.Task(
            op="parts_toy",
            op_module=parts_toy_op.MODULE,
            problem=PROBLEM,
            policy=MeasurementPolicy(),
            torch_device="cpu",
            l2_bytes=2**20,
            seed=0,
            settings=QUICK,
        )
    )


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("part", parts_toy_op.PARTS)
def test_the_parts_behind_are_run_before_the_result_is_judged(split: Any, part: str) -> None:
    outcome = worker.evaluate(split.space.default, None, part)
    assert outcome.status is TrialStatus.OK, outcome.reason
    assert outcome.timing is not None


@pytest.mark.usefixtures("in_this_process")
def test_a_part_that_overwrites_what_it_reads_is_found(split: Any) -> None:
    base = split.space.default.replace(behaviour="in_place")
    # Once, it is right; the replays of this part alone show it.
    assert worker.evaluate(base, None).status is TrialStatus.OK
    outcome = worker.evaluate(base, None, "shift")
    assert outcome.status is TrialStatus.UNREPEATABLE
    assert "back to back" in outcome.reason


@pytest.mark.usefixtures("in_this_process")
def test_a_part_that_leaves_its_work_to_another_launch_is_found(split: Any) -> None:
    """``launch`` does more than its parts: the scratch they begin with is no finished work."""
    base = split.space.default.replace(behaviour="idle")
    assert worker.evaluate(base, None).status is TrialStatus.OK
    for part in ("shift", "store"):
        outcome = worker.evaluate(base, None, part)
        assert outcome.status is TrialStatus.UNREPEATABLE, part


@pytest.mark.usefixtures("in_this_process")
def test_a_wrong_whole_is_incorrect_in_every_part(split: Any) -> None:
    outcome = worker.evaluate(split.space.default.replace(behaviour="wrong"), None, "scale")
    assert outcome.status is TrialStatus.INCORRECT


@pytest.mark.usefixtures("in_this_process")
def test_a_part_is_cut_against_the_best_of_its_own(split: Any) -> None:
    outcome = worker.evaluate(split.space.default, 1.0, "scale")
    assert outcome.status is TrialStatus.PRUNED


def test_a_part_that_the_template_does_not_name_is_our_mistake(h200: Any, split: Any) -> None:
    scope = PartScope("merge", split.space.default, frozenset(), frozenset({"algorithm"}))
    evaluator = PredictEvaluator(PROBLEM, h200, num_workers=1, scope=scope)
    with evaluator, pytest.raises(AssertionError, match="not 'merge'"):
        evaluate(evaluator, Config.of("triton", {"algorithm": "split"}))


def test_a_part_is_predicted_from_its_own_launches_and_nothing_is_compiled_twice(
    split: Any, h200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "compiled"
    monkeypatch.setenv("TOY_COMPILED", str(log))
    with CompilePool(1) as pool:
        whole = evaluate(PredictEvaluator(PROBLEM, h200, pool=pool), split.space.default)
        parts = {}
        for part in parts_toy_op.PARTS:
            scope = scope_of(split, part)
            evaluator = PredictEvaluator(PROBLEM, h200, pool=pool, scope=scope)
            parts[part] = evaluate(evaluator, scope.of_whole(split.space.default))
    assert sum(found.time_us for found in parts.values()) == pytest.approx(whole.time_us)
    assert all(len(found.facts) == 1 for found in parts.values())
    # What the whole has compiled serves its parts.
    assert Counter(log.read_text().split()) == {f"{part}_kernel": 1 for part in parts_toy_op.PARTS}


def test_the_inputs_stay_from_part_to_part(h200: Any, split: Any) -> None:
    with CompilePool(1) as compilers, closing(GpuWorker()) as gpu:
        options: Any = {
            "settings": QUICK,
            "torch_device": "cpu",
            "compilers": compilers,
            "gpu": gpu,
        }
        for part in ("scale", "store"):
            scope = scope_of(split, part)
            with MeasureEvaluator(PROBLEM, h200, scope=scope, **options) as evaluator:
                evaluate(evaluator, scope.of_whole(split.space.default))
            num_visits = gpu.run(10.0, parts_study.count_visits)
    assert num_visits == 2
