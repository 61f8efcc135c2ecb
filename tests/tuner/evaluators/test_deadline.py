"""What still compiles when the time is up is taken back, and costs no trial."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import parts_study
import parts_toy_op
import pytest
from formula_evaluator import FormulaEvaluator
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.evaluators.measure import MeasureEvaluator
from tilescout.tuner.evaluators.predict import PredictEvaluator
from tilescout.tuner.records import Evaluation, TrialStatus
from tilescout.tuner.search.loop import search
from tilescout.tuner.search.stopping import Stopping, StoppingRule, StopReason


def config(behaviour: str, **changes: Any) -> Config:
    values = {"block_n": 16, "num_stages": 2, "split_rule": "none", "behaviour": behaviour}
    return Config.of("triton", {**values, **changes})


@pytest.mark.parametrize("kind", [MeasureEvaluator, PredictEvaluator])
def test_one_config_ends_however_late_and_the_rest_is_taken_back(
    kind: Any, toy: Any, h200: DeviceSpec
) -> None:
    options = {"torch_device": "cpu"} if kind is MeasureEvaluator else {}
    started = time.monotonic()
    with CompilePool(2) as pool:
        pools = {"compilers": pool} if kind is MeasureEvaluator else {"pool": pool}
        with kind(toy.ToyProblem(64), h200, deadline=started, **pools, **options) as evaluator:
            evaluator.submit(config("ok"))
            evaluator.submit(config("compile_hang"))
            evaluator.submit(config("compile_hang", num_stages=3))
            ended = [evaluator.collect() for _ in range(3)]
            assert [e.config for e in ended if e is not None] == [config("ok")]
            # The processes are free again, and finals know no deadline.
            (final,) = evaluator.finals([config("ok")])
            assert final.status is TrialStatus.OK
    assert time.monotonic() - started < 60.0, "nobody waited for a compiler's time limit"


@pytest.mark.parametrize("kind", [MeasureEvaluator, PredictEvaluator])
def test_what_is_kept_is_waited_for(kind: Any, toy: Any, h200: DeviceSpec) -> None:
    slow, other = config("compile_slowly"), config("compile_hang")
    options: dict[str, Any] = {"deadline": time.monotonic(), "kept": [slow]}
    if kind is MeasureEvaluator:
        options["torch_device"] = "cpu"
    name = "compilers" if kind is MeasureEvaluator else "pool"
    with (
        CompilePool(3) as pool,
        kind(toy.ToyProblem(64), h200, **{name: pool}, **options) as evaluator,
    ):
        evaluator.submit(config("ok"))
        assert evaluator.collect() is not None
        evaluator.submit(slow)
        evaluator.submit(other)
        ended = [evaluator.collect() for _ in range(2)]
    assert [e.config for e in ended if e is not None] == [slow]


class TakesBack(FormulaEvaluator):
    """Takes every second config back."""

    def collect(self) -> Evaluation | None:
        ended = super().collect()
        return ended if len(self.evaluated) % 2 else None


class Counting:
    """Asks for a new config each time and remembers what it is told."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.told: list[Evaluation] = []

    def ask(self, count: int) -> list[Config]:
        self.num_asked += 1
        return [config("ok", num_stages=self.num_asked)]

    def tell(self, evaluation: Evaluation) -> None:
        self.told.append(evaluation)


def test_a_search_is_told_of_what_ended_alone() -> None:
    kept: list[Evaluation] = []
    sampler = Counting()
    stopping = Stopping(StoppingRule(6, None, 100), None)
    assert search(sampler, TakesBack(), stopping, kept.append) is StopReason.TRIALS
    assert sampler.num_asked == 6
    assert kept == sampler.told
    assert len(kept) == 3


@pytest.mark.parametrize("kind", [MeasureEvaluator, PredictEvaluator])
def test_a_caller_waits_no_longer_than_it_says(kind: Any, toy: Any, h200: DeviceSpec) -> None:
    options = {"torch_device": "cpu"} if kind is MeasureEvaluator else {}
    with CompilePool(2) as pool:
        pools = {"compilers": pool} if kind is MeasureEvaluator else {"pool": pool}
        with kind(toy.ToyProblem(64), h200, **pools, **options) as evaluator:
            evaluator.submit(config("compile_hang"))
            assert evaluator.collect(time.monotonic()) is None
            # The other process has not been touched.
            evaluator.submit(config("ok"))
            ended = evaluator.collect()
    assert ended is not None
    assert ended.status is TrialStatus.OK


@pytest.mark.parametrize("kind", [MeasureEvaluator, PredictEvaluator])
def test_what_was_prepared_is_not_compiled_again(
    kind: Any, h200: DeviceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts_study.register()
    log = tmp_path / "compiled"
    monkeypatch.setenv("TOY_COMPILED", str(log))
    problem = parts_toy_op.PartsToyProblem(64)
    default = joint_space(problem, h200).default
    options = {"torch_device": "cpu"} if kind is MeasureEvaluator else {}
    with CompilePool(1) as pool:
        pools = {"compilers": pool} if kind is MeasureEvaluator else {"pool": pool}
        with kind(problem, h200, **pools, **options) as evaluator:
            evaluator.prepare(default)
            evaluator.submit(default)
            ended = evaluator.collect()
            assert ended is not None
            assert ended.status is TrialStatus.OK
    compiled = log.read_text().split()
    # Measured ones are compiled, from a cache on disk, once more to read the code.
    most = 2 if kind is MeasureEvaluator else 1
    assert compiled
    assert max(Counter(compiled).values()) <= most
