"""The GPU worker is made ready while the first config is still being compiled."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from tilescout.errors import DeviceError
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner.compile_pool import CompileResult
from tilescout.tuner.evaluators.measure import MeasureEvaluator
from tilescout.tuner.records import TrialStatus
from tilescout.tuner.worker import Outcome

CONFIG = Config.of("triton", {"block_n": 64, "num_stages": 3, "split_rule": "none"})


class Compilers:
    """One compile that ends when the test says so."""

    num_workers = 1

    def __init__(self) -> None:
        self.job: Future[CompileResult] = Future()

    def submit(self, *job: Any, reads_code: bool) -> Future[CompileResult]:
        return self.job


class Gpu:
    """Counts its starts; fails at the first few."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_starts = 0
        self.started = threading.Event()
        self._num_failures = num_failures

    def take_on(self, task: Any) -> None: ...

    def make_ready(self) -> None:
        self.num_starts += 1
        self.started.set()
        if self.num_starts <= self._num_failures:
            raise DeviceError("no memory")

    def run(self, timeout_s: float, job: Any, *args: Any) -> Outcome:
        return Outcome(TrialStatus.RUNTIME_ERROR, "ran")


def evaluator_with(toy: Any, device: DeviceSpec, gpu: Gpu, compilers: Compilers) -> Any:
    return MeasureEvaluator(
        toy.ToyProblem(64), device, torch_device="cpu", gpu=gpu, compilers=compilers
    )


def test_the_worker_starts_before_the_first_compile_ends(toy: Any, h200: DeviceSpec) -> None:
    gpu, compilers = Gpu(), Compilers()
    with evaluator_with(toy, h200, gpu, compilers) as evaluator:
        assert not gpu.started.wait(0.2), "nobody has asked for anything yet"
        evaluator.submit(CONFIG)
        assert gpu.started.wait(10.0)
        compilers.job.set_result(CompileResult(TrialStatus.OK))
        assert evaluator.collect().reason == "ran"


def test_why_it_cannot_start_is_told_with_a_config(toy: Any, h200: DeviceSpec) -> None:
    gpu, compilers = Gpu(num_failures=2), Compilers()
    with evaluator_with(toy, h200, gpu, compilers) as evaluator:
        evaluator.submit(CONFIG)
        assert gpu.started.wait(10.0)
        compilers.job.set_result(CompileResult(TrialStatus.OK))
        with pytest.raises(DeviceError, match="no memory"):
            evaluator.collect()


def test_an_evaluator_that_is_asked_nothing_starts_nothing(toy: Any, h200: DeviceSpec) -> None:
    gpu = Gpu()
    evaluator_with(toy, h200, gpu, Compilers()).close()
    assert gpu.num_starts == 0
