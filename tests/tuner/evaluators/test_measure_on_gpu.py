"""Measuring on a real GPU: what the clock says, and what a broken kernel costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from tilescout.kernels import registry
from tilescout.kernels.base import Config
from tilescout.tuner.environment import current_device, describe
from tilescout.tuner.evaluators.measure import MeasureEvaluator
from tilescout.tuner.records import Evaluation, MeasurementPolicy, TrialStatus
from tilescout.tuner.timers import CudaTimer

pytestmark = pytest.mark.gpu

MIB = 2**20


def config(**values: Any) -> Config:
    return Config.of("triton", {"block": 4096, **values})


@pytest.fixture
def problem_of() -> Any:
    """Makes the problem of copying so many floats."""
    gpu_toy_op = pytest.importorskip("gpu_toy_op")
    registry.register("gpu_toy", "gpu_toy_op")
    return gpu_toy_op.GpuToyProblem


@pytest.fixture
def evaluator_for(problem_of: Any) -> Iterator[Any]:
    """Makes evaluators and closes them."""
    device = current_device()
    assert device is not None, describe()["reason"]
    opened: list[MeasureEvaluator] = []

    def make(size: int, policy: MeasurementPolicy | None = None, **options: Any) -> Any:
        evaluator = MeasureEvaluator(problem_of(size), device, policy, **options)
        opened.append(evaluator)
        return evaluator

    yield make
    for evaluator in opened:
        evaluator.close()


def evaluate(evaluator: MeasureEvaluator, wanted: Config) -> Evaluation:
    evaluator.submit(wanted)
    return evaluator.collect()


def test_cold_l2_is_slower_than_warm(evaluator_for: Any) -> None:
    size = 2 * MIB  # 8 MiB in, 8 MiB out: both fit in the L2 of a data-centre part
    cold = evaluate(evaluator_for(size, MeasurementPolicy(is_cold_l2=True)), config())
    warm = evaluate(evaluator_for(size, MeasurementPolicy(is_cold_l2=False)), config())
    assert cold.status is warm.status is TrialStatus.OK
    assert cold.time_us > 1.15 * warm.time_us


def test_graph_and_event_times_agree_for_a_long_kernel(problem_of: Any) -> None:
    import gpu_toy_op

    problem = problem_of(256 * MIB)
    inputs = gpu_toy_op.make_inputs(problem, device="cuda", seed=0)
    outputs = gpu_toy_op.make_outputs(problem, inputs)
    launcher = gpu_toy_op.GpuToyLauncher(config(), inputs["x"].device)

    launcher.launch(inputs, outputs)
    timers = [CudaTimer(is_graph=False), CudaTimer(is_graph=True)]
    runs = [timer.prepare([lambda: launcher.launch(inputs, outputs)], 2) for timer in timers]
    samples_us: list[list[float]] = [[], []]
    # In turns, and the least of many: whoever shares the GPU delays both timers alike and, of
    # forty short samples, leaves some alone.
    for _ in range(40):
        for timer, run, taken in zip(timers, runs, samples_us, strict=True):
            taken.extend(timer.time_us([run]))
    eager_us, graph_us = map(min, samples_us)
    assert eager_us > 200.0
    assert graph_us == pytest.approx(eager_us, rel=0.10)


def test_a_bandwidth_bound_copy_is_timed_below_the_peak(evaluator_for: Any) -> None:
    size = 64 * MIB
    device = current_device()
    assert device is not None
    evaluator = evaluator_for(size)
    # Others may use the GPU at the same time: the fastest of several is nearest to being alone.
    times_us = []
    for block in (512, 1024, 2048, 4096):
        evaluation = evaluate(evaluator, config(block=block))
        assert evaluation.status in {TrialStatus.OK, TrialStatus.PRUNED}
        if evaluation.status is TrialStatus.OK:
            times_us.append(evaluation.time_us)
    gbps = 8 * size / min(times_us) / 1e3
    assert 0.5 * device.bandwidth_gbps < gbps < device.bandwidth_gbps


def test_an_illegal_access_costs_one_trial(evaluator_for: Any) -> None:
    evaluator = evaluator_for(MIB)
    broken = evaluate(evaluator, config(behaviour="illegal_access"))
    assert broken.status in {TrialStatus.RUNTIME_ERROR, TrialStatus.CRASHED}
    assert "illegal" in broken.reason or "died" in broken.reason
    good = evaluate(evaluator, config())
    assert good.status is TrialStatus.OK
    assert good.max_abs_error == 0.0


def test_a_kernel_that_never_ends_costs_its_time_limit(evaluator_for: Any) -> None:
    evaluator = evaluator_for(MIB, run_timeout_s=8.0)
    assert evaluate(evaluator, config()).status is TrialStatus.OK
    endless = evaluate(evaluator, config(behaviour="loop"))
    assert endless.status is TrialStatus.TIMEOUT
    assert "longer than 8 s" in endless.reason
    assert 8.0 <= endless.measure_s < 30.0
    good = evaluate(evaluator, config(block=2048))
    assert good.status is TrialStatus.OK
    assert good.max_abs_error == 0.0


def test_running_out_of_memory_is_a_status_and_the_worker_lives_on(evaluator_for: Any) -> None:
    evaluator = evaluator_for(MIB)
    full = evaluate(evaluator, config(behaviour="out_of_memory"))
    assert full.status is TrialStatus.OUT_OF_RESOURCES
    assert "out of memory" in full.reason
    assert evaluate(evaluator, config()).status is TrialStatus.OK


def test_a_counter_that_is_not_reset_is_found_after_the_replays(evaluator_for: Any) -> None:
    evaluation = evaluate(evaluator_for(MIB), config(behaviour="stale_counter"))
    assert evaluation.status in {TrialStatus.UNREPEATABLE, TrialStatus.INCORRECT}


def test_finals_put_the_faster_config_first(evaluator_for: Any) -> None:
    evaluator = evaluator_for(16 * MIB)
    slow, fast = config(block=32), config()
    finals = evaluator.finals([slow, fast])
    assert [e.config for e in finals] == [fast, slow]
    assert all(len(e.timing.samples_us) >= 6 for e in finals)


def test_a_small_problem_takes_a_quarter_of_a_second_a_config(evaluator_for: Any) -> None:
    evaluator = evaluator_for(MIB)
    blocks = (512, 1024, 2048, 4096, 8192)
    for block in blocks:  # no compile pool fills the cache for this kernel
        evaluate(evaluator, config(block=block))
    again = [evaluate(evaluator, config(block=block, again=True)) for block in blocks]
    assert statistics.median(e.measure_s for e in again) < 0.25
