"""The measuring evaluator end to end, with real processes, on the CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tilescout.errors import DeviceError
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.evaluators.measure import MeasureEvaluator
from tilescout.tuner.gpu_worker import GpuWorker
from tilescout.tuner.measure import MeasureSettings
from tilescout.tuner.records import Evaluation, Provenance, TrialStatus

BASE = {"block_n": 64, "num_stages": 3, "split_rule": "fixed", "num_splits": 4}
QUICK = MeasureSettings(run_target_us=500.0, warmup_us=500.0, max_samples=12, max_rounds=48)
FAILURES = {
    "compile_error": (TrialStatus.COMPILE_ERROR, "no such instruction"),
    "compile_crash": (TrialStatus.CRASHED, "exit code 11"),
    "crash": (TrialStatus.CRASHED, "exit code 12"),
    "hang": (TrialStatus.TIMEOUT, "longer than 3 s"),
    "wrong": (TrialStatus.INCORRECT, "exceeds 1e-3"),
    "nan": (TrialStatus.INCORRECT, "largest error nan"),
    "unrepeatable": (TrialStatus.UNREPEATABLE, "outputs differ"),
    "runtime_error": (TrialStatus.RUNTIME_ERROR, "toy launch failed"),
    "out_of_memory": (TrialStatus.OUT_OF_RESOURCES, "toy ran out of memory"),
}


def config(**values: Any) -> Config:
    return Config.of("triton", {**BASE, **values})


def evaluator_for(toy: Any, device: DeviceSpec, **options: Any) -> MeasureEvaluator:
    return MeasureEvaluator(
        toy.ToyProblem(256),
        device,
        settings=QUICK,
        torch_device="cpu",
        **options,
    )


def run_all(evaluator: MeasureEvaluator, configs: list[Config]) -> dict[Config, Evaluation]:
    """Drives the evaluator as a search would, never above its capacity."""
    waiting, ended, in_flight = list(configs), {}, 0
    while waiting or in_flight:
        while waiting and in_flight < evaluator.capacity:
            evaluator.submit(waiting.pop(0))
            in_flight += 1
        evaluation = evaluator.collect()
        ended[evaluation.config] = evaluation
        in_flight -= 1
    return ended


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, Evaluation]:
    """Each behaviour evaluated once by one evaluator, a good config after each bad one."""
    import toy_op
    from tilescout.kernels import registry

    registry.register("toy", toy_op.MODULE)
    device = DeviceSpec(
        "h200", "NVIDIA H200", "hopper", (9, 0), 132, 141 * 10**9, 60 * 2**20, 227 * 1024,
        228 * 1024, 65536, 2048, 32, 4800.0, {"float32": 67.0}, 1980.0,
    )  # fmt: skip
    configs = [config()]
    for behaviour in FAILURES:
        configs += [config(behaviour=behaviour), config(behaviour=f"good after {behaviour}")]
    with evaluator_for(toy_op, device, run_timeout_s=3.0) as evaluator:
        ended = run_all(evaluator, configs)
        assert len(ended) == len(configs)
        assert 0.0 < evaluator.gpu_busy_share <= 1.0
    return {str(c.get("behaviour", "good")): e for c, e in ended.items()}


@pytest.mark.parametrize("behaviour", FAILURES)
def test_a_failing_config_costs_one_trial_with_status_and_reason(
    outcomes: Mapping[str, Evaluation], behaviour: str
) -> None:
    status, reason = FAILURES[behaviour]
    failed = outcomes[behaviour]
    assert failed.status is status
    assert reason in failed.reason
    assert "\n" not in failed.reason
    assert failed.timing is None
    assert failed.provenance is Provenance.MEASURED


@pytest.mark.parametrize("behaviour", FAILURES)
def test_the_next_config_is_measured(outcomes: Mapping[str, Evaluation], behaviour: str) -> None:
    good = outcomes[f"good after {behaviour}"]
    assert good.status in {TrialStatus.OK, TrialStatus.PRUNED}
    assert good.time_us is not None


def test_a_good_config_has_time_error_facts_and_costs(outcomes: Mapping[str, Evaluation]) -> None:
    good = outcomes["good"]
    assert good.status is TrialStatus.OK
    assert good.timing is not None
    assert good.timing.median_us > 10.0  # it sleeps for 10 us
    assert good.timing.num_samples >= QUICK.min_samples
    assert good.timing.samples_us == ()
    assert good.max_abs_error == 0.0
    assert [facts.kernel for facts in good.facts] == ["toy_kernel"]
    assert good.compile_s > 0.0
    assert 0.0 < good.measure_s < 3.0


def test_a_hang_costs_its_time_limit(outcomes: Mapping[str, Evaluation]) -> None:
    assert 3.0 <= outcomes["hang"].measure_s < 15.0


def test_a_launch_that_eats_host_memory_is_killed(toy: Any, h200: DeviceSpec) -> None:
    # torch alone holds several hundred MiB in the worker.
    with (
        closing(GpuWorker(memory_limit_bytes=2 * 2**30)) as gpu,
        evaluator_for(toy, h200, gpu=gpu) as evaluator,
    ):
        greedy, good = config(behaviour="eat_memory"), config()
        ended = run_all(evaluator, [greedy, good])
    assert ended[greedy].status is TrialStatus.OUT_OF_RESOURCES
    assert "GiB of memory, above 2.0 GiB" in ended[greedy].reason
    assert ended[good].status is TrialStatus.OK


def test_clearly_slower_than_the_best_known_is_pruned(toy: Any, h200: DeviceSpec) -> None:
    with evaluator_for(toy, h200, best_us=0.01) as evaluator:
        (evaluation,) = run_all(evaluator, [config()]).values()
    assert evaluation.status is TrialStatus.PRUNED
    assert "times the best" in evaluation.reason
    assert evaluation.time_us is not None


def test_finals_keep_samples_and_survive_a_finalist_that_fails(
    toy: Any, h200: DeviceSpec, caplog: pytest.LogCaptureFixture
) -> None:
    # An absurd block_n makes the toy sleep 2 ms: a difference that any CPU shows.
    slow, fast = config(block_n=2**2000), config()
    finalists = [slow, config(behaviour="crash"), config(behaviour="wrong"), fast]
    with evaluator_for(toy, h200) as evaluator, caplog.at_level(logging.WARNING):
        finals = evaluator.finals(finalists)
    assert [e.config for e in finals[:2]] == [fast, slow]
    assert [e.status for e in finals[2:]] == [TrialStatus.CRASHED, TrialStatus.INCORRECT]
    for evaluation in finals[:2]:
        assert evaluation.status is TrialStatus.OK
        assert evaluation.timing is not None
        assert len(evaluation.timing.samples_us) == evaluation.timing.num_samples
        assert evaluation.timing.num_samples >= 6
        assert [facts.kernel for facts in evaluation.facts] == ["toy_kernel"]
    assert "behaviour=crash" in caplog.text
    assert "behaviour=wrong" in caplog.text


def test_finals_without_a_sound_finalist_say_why(toy: Any, h200: DeviceSpec) -> None:
    with evaluator_for(toy, h200) as evaluator:
        (only,) = evaluator.finals([config(behaviour="wrong")])
    assert only.status is TrialStatus.INCORRECT
    assert "largest error" in only.reason


def test_a_finalist_that_only_fails_in_the_race_is_found(
    toy: Any, h200: DeviceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``die_late`` passes a while and then kills its process, each time."""
    from tilescout.kernels import registry

    registry.register("late_toy", "late_toy_op")
    import late_toy_op

    problem = late_toy_op.LateToyProblem(256)
    with MeasureEvaluator(problem, h200, settings=QUICK, torch_device="cpu") as evaluator:
        finals = evaluator.finals([config(behaviour="die_late"), config()])
    assert [e.config for e in finals] == [config(), config(behaviour="die_late")]
    assert [e.status for e in finals] == [TrialStatus.OK, TrialStatus.CRASHED]
    assert finals[0].timing is not None


def test_inputs_that_cannot_be_made_are_a_device_error(toy: Any, h200: DeviceSpec) -> None:
    problem = toy.ToyProblem(10**15)
    with MeasureEvaluator(problem, h200, settings=QUICK, torch_device="cpu") as evaluator:
        evaluator.submit(config())
        with pytest.raises(DeviceError, match=r"cannot prepare cpu for toy problem size=10+ "):
            evaluator.collect()


def test_one_worker_process_serves_problem_after_problem(toy: Any, h200: DeviceSpec) -> None:
    with closing(GpuWorker()) as gpu, CompilePool(1) as compilers:
        shared = {"gpu": gpu, "compilers": compilers}
        with evaluator_for(toy, h200, **shared) as first:
            run_all(first, [config(), config(num_stages=2)])
            processes = worker_processes()
        larger = toy.ToyProblem(1024)
        with MeasureEvaluator(larger, h200, settings=QUICK, torch_device="cpu", **shared) as second:
            run_all(second, [config(num_stages=4)])
            assert processes <= worker_processes(), "a new problem needs no new process"
            ended = run_all(second, [config(), config(behaviour="crash"), config(num_stages=2)])
            assert processes - worker_processes() != set(), "the crash replaced the GPU worker"
        # Either of the others may be cut where the machine is busy while it is timed.
        statuses = sorted(e.status for e in ended.values())
        assert statuses.count(TrialStatus.CRASHED) == 1
        assert TrialStatus.OK in statuses
        assert set(statuses) <= {TrialStatus.CRASHED, TrialStatus.OK, TrialStatus.PRUNED}
        with evaluator_for(toy, h200, **shared) as third:
            assert run_all(third, [config()])[config()].status is TrialStatus.OK


def test_closing_ends_what_is_running(toy: Any, h200: DeviceSpec) -> None:
    before = worker_processes()
    evaluator = evaluator_for(toy, h200)
    run_all(evaluator, [config()])  # both kinds of process are up
    evaluator.submit(config(behaviour="hang"))
    evaluator.submit(config(behaviour="compile_hang"))
    time.sleep(0.5)
    assert len(worker_processes()) == len(before) + 2
    evaluator.close()
    evaluator.close()
    assert worker_processes() == before


def worker_processes() -> set[str]:
    children = {
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }
    return {pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()}


def test_a_mistake_in_a_template_surfaces(toy: Any, h200: DeviceSpec) -> None:
    """A TypeError is no property of a config: it must not become a quiet row."""
    with evaluator_for(toy, h200) as evaluator:
        evaluator.submit(config(block_n="many"))
        with pytest.raises(ValueError, match="many"):
            evaluator.collect()
