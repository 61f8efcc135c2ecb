"""Configs that are the same code, launched the same way, are run once."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from tilescout.kernels import registry
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner.compile_pool import CompileResult
from tilescout.tuner.evaluators.measure import MeasureEvaluator
from tilescout.tuner.measure import MeasureSettings
from tilescout.tuner.records import Evaluation, TrialStatus

QUICK = MeasureSettings(run_target_us=200.0, warmup_us=200.0, max_samples=12)


class Compilers:
    """Makes code that depends on ``block_n`` alone."""

    num_workers = 1

    def submit(
        self,
        op: str,
        module: str,
        template: str,
        problem: Any,
        config: Config,
        arch: int,
        part: str = "",
        *,
        reads_code: bool,
    ):
        job: Future[CompileResult] = Future()
        digest = None if config.get("behaviour") == "no code" else f"{config['block_n']}"
        job.set_result(CompileResult(TrialStatus.OK, compile_s=0.5, digest=digest))
        return job


def config(**values: Any) -> Config:
    base = {"block_n": 64, "num_stages": 3, "split_rule": "fixed", "num_splits": 4}
    return Config.of("triton", {**base, **values})


@pytest.fixture
def run(toy: Any, h200: DeviceSpec) -> Any:
    registry.register("twin_toy", "twin_toy_op")
    import twin_toy_op

    def run_on(problem: Any, configs: list[Config]) -> list[Evaluation]:
        with MeasureEvaluator(
            problem, h200, settings=QUICK, torch_device="cpu", compilers=Compilers()
        ) as evaluator:
            ended = []
            for wanted in configs:
                evaluator.submit(wanted)
                ended.append(evaluator.collect())
        return ended

    return lambda configs, problem=None: run_on(problem or twin_toy_op.TwinToyProblem(64), configs)


def is_taken_over(evaluation: Evaluation) -> bool:
    return evaluation.measure_s == 0.0


def test_a_twin_takes_over_what_was_found(run: Any) -> None:
    first, twin = run([config(), config(num_stages=2)])
    assert first.status is twin.status is TrialStatus.OK
    assert twin.config == config(num_stages=2)
    assert twin.timing == first.timing
    assert twin.max_abs_error == first.max_abs_error
    assert not is_taken_over(first)
    assert is_taken_over(twin)
    assert twin.compile_s == 0.5


def test_a_wrong_one_is_wrong_again(run: Any) -> None:
    first, twin = run([config(behaviour="wrong"), config(behaviour="wrong", num_stages=2)])
    assert twin.status is TrialStatus.INCORRECT
    assert twin.reason == first.reason
    assert is_taken_over(twin)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(config(num_splits=8), id="another launch"),
        pytest.param(config(block_n=32), id="another code"),
    ],
)
def test_others_are_run(run: Any, other: Config) -> None:
    assert not any(map(is_taken_over, run([config(), other])))


def test_a_crash_is_tried_again(run: Any) -> None:
    crashed, other = run([config(behaviour="crash"), config(num_stages=2)])
    assert crashed.status is TrialStatus.CRASHED
    assert other.status is TrialStatus.OK


def test_without_code_nothing_is_taken_over(run: Any) -> None:
    behaviour = {"behaviour": "no code"}
    assert not any(
        map(is_taken_over, run([config(**behaviour), config(num_stages=2, **behaviour)]))
    )


def test_a_template_that_does_not_say_is_always_run(run: Any, toy: Any) -> None:
    ended = run([config(), config(num_stages=2)], toy.ToyProblem(64))
    assert not any(map(is_taken_over, ended))
