"""The jobs of the process that owns the GPU, and what it keeps between them.

A worker serves one problem at a time. It allocates the inputs once, then judges and times one
config a job. Nothing here starts or kills a process: ``gpu_worker`` does, from outside. What a
config does wrong comes back as a status; what is wrong with this code is raised.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from ..kernels import registry
from ..kernels.base import Config, KernelTemplate, Operation, Problem
from .compile_pool import short_reason
from .finals import run_race
from .gpu_state import ClockWatch, nvml_reader
from .launch_errors import failures, is_out_of_memory, status_of
from .measure import MeasureSettings, count_copies, count_launches, measure, warm_up
from .order_statistics import timing_of
from .records import MeasurementPolicy, Timing, TrialStatus
from .timed_launches import Copy, TimedLaunches, part_launches, whole_launches
from .timers import CudaTimer, Run, Timer, WallTimer
from .validate import Verdict, judge_repeat, validate

__all__ = ["Outcome", "RaceOutcome", "Task", "evaluate", "prepare", "race", "verify"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """Everything a fresh worker needs to serve a problem."""

    op: str
    op_module: str
    problem: Problem
    policy: MeasurementPolicy
    torch_device: str
    l2_bytes: int
    seed: int
    settings: MeasureSettings = field(default_factory=MeasureSettings)


@dataclass(frozen=True)
class Outcome:
    """What became of one config in the worker."""

    status: TrialStatus
    reason: str = ""
    timing: Timing | None = None
    max_abs_error: float | None = None
    relative_rms_error: float | None = None
    measure_s: float = 0.0
    is_device_lost: bool = False
    """The CUDA context is broken: this process is of no more use."""
    num_disturbed: int = 0
    """Blocks of samples that were repeated because the clock or a throttle reason changed."""


@dataclass(frozen=True)
class RaceOutcome:
    """What became of the finalists: one outcome each, and the order of those that are ok."""

    outcomes: tuple[Outcome, ...]
    order: tuple[int, ...] = ()
    is_settled: bool = False
    num_disturbed: int = 0

    @property
    def is_device_lost(self) -> bool:
        """Whether a finalist broke the CUDA context."""
        return any(outcome.is_device_lost for outcome in self.outcomes)


@dataclass
class _State:
    """The problem that this process serves, with its memory."""

    task: Task
    operation: Operation
    timer: Timer
    copies: list[Copy]
    validation_inputs: Any
    fresh_inputs: Any = None
    """Validation inputs of another seed, made for the finals."""
    watch: ClockWatch | None = None
    """Sees the device's clock where there is a driver to ask."""
    can_compare_timed: bool = True
    """Whether the reference fits in memory on the inputs that are timed."""

    def template(self, config: Config) -> KernelTemplate:
        return registry.template(self.task.op, config.template)


_state: _State | None = None


def load_device() -> None:
    """Loads torch and makes the CUDA context, which no task is needed for; a process's first act.

    What is wrong with the device is told by the first task, with its problem.
    """
    with suppress(ImportError, RuntimeError):
        import torch

        if torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]


def prepare(task: Task) -> int:
    """Makes the inputs of the problem in the place of the last one's; the first job of a task.

    Returns:
        How many copies of the data the timing rotates.
    """
    global _state  # noqa: PLW0603  (a worker process serves one problem at a time)
    if _state is not None:
        _state = None
        _free_memory()
    registry.register(task.op, task.op_module)
    operation = registry.operation(task.op)
    is_cuda = task.torch_device.startswith("cuda")
    validation_inputs = operation.make_validation_inputs(
        task.problem, device=task.torch_device, seed=task.seed
    )
    copies = _make_copies(task, operation)
    watch = _clock_watch() if is_cuda else None
    timer = CudaTimer(is_graph=task.policy.is_cuda_graph, watch=watch) if is_cuda else WallTimer()
    _state = _State(task, operation, timer, copies, validation_inputs, watch=watch)
    return len(copies)


@cache
def _clock_watch() -> ClockWatch:
    """Keeps its memory of the clock from problem to problem."""
    import torch

    return ClockWatch(nvml_reader(str(torch.cuda.get_device_properties(0).uuid)))


def evaluate(config: Config, best_us: float | None, part: str = "") -> Outcome:
    """Judges a config and times it if it is right; cuts it if far slower than ``best_us``.

    With ``part``, the whole operation is judged and that part of it is timed.
    """
    state = _prepared()

    def work() -> Outcome:
        verdict = validate(
            state.operation,
            state.template(config),
            state.task.problem,
            config,
            state.validation_inputs,
        )
        if not verdict.is_ok:
            return _outcome(verdict)
        return _time(state, config, verdict, best_us, part)

    return _guarded(work)


def verify(config: Config) -> Outcome:
    """Judges a finalist again, on validation inputs that no trial has seen."""
    state = _prepared()
    operation, task = state.operation, state.task

    def work() -> Outcome:
        if state.fresh_inputs is None:
            state.fresh_inputs = operation.make_validation_inputs(
                task.problem, device=task.torch_device, seed=task.seed + 1
            )
        template = state.template(config)
        return _outcome(validate(operation, template, task.problem, config, state.fresh_inputs))

    return _guarded(work)


def race(configs: Sequence[Config]) -> RaceOutcome:
    """Times finalists against each other in interleaved rounds.

    One that fails while it is made ready is left out of the race.
    """
    state = _prepared()
    outcomes: list[Outcome] = []
    runs: list[Run] = []
    runners: list[int] = []
    start = time.monotonic()
    for index, config in enumerate(configs):
        outcome = _guarded(partial(_join_race, state, config, runs))
        outcomes.append(outcome)
        if outcome.is_device_lost:
            return RaceOutcome(tuple(outcomes))
        if outcome.status is TrialStatus.OK:
            runners.append(index)
    if not runners:
        return RaceOutcome(tuple(outcomes))
    disturbed_before = _num_disturbed()
    result = run_race(runs, state.timer, state.task.settings)
    share_s = (time.monotonic() - start) / len(runners)
    for index, samples_us in zip(runners, result.samples_us, strict=True):
        timing = timing_of(samples_us, keep_samples=True)
        outcomes[index] = Outcome(TrialStatus.OK, timing=timing, measure_s=share_s)
    order = tuple(runners[place] for place in result.order)
    num_disturbed = _num_disturbed() - disturbed_before
    return RaceOutcome(tuple(outcomes), order, result.is_settled, num_disturbed)


def _prepared() -> _State:
    assert _state is not None, "prepare() is the first job of a worker"
    return _state


def _make_copies(task: Task, operation: Operation) -> list[Copy]:
    """Copies with seeds of their own: pages then lie differently in each, as they would."""

    def make(index: int) -> Copy:
        inputs = operation.make_inputs(
            task.problem, device=task.torch_device, seed=task.seed + index
        )
        return Copy(inputs, operation.make_outputs(task.problem, inputs))

    held_before = _memory(task.torch_device).held
    copies = [make(0)]
    memory = _memory(task.torch_device)
    wanted = task.problem.num_input_variants
    if task.policy.is_cold_l2:
        wanted = count_copies(
            bytes_moved=task.problem.bytes_moved,
            bytes_held=max(memory.held - held_before, task.problem.bytes_moved),
            l2_bytes=task.l2_bytes if memory.is_device else 0,
            free_bytes=memory.free,
            settings=task.settings,
            num_variants=task.problem.num_input_variants,
        )
    copies += [make(index) for index in range(1, wanted)]
    return copies


@dataclass(frozen=True)
class _Memory:
    held: int
    free: int
    is_device: bool


def _memory(torch_device: str) -> _Memory:
    if not torch_device.startswith("cuda"):
        return _Memory(0, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), False)
    import torch

    torch.cuda.synchronize()
    reusable = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return _Memory(torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] + reusable, True)


def _launches(state: _State, config: Config, part: str = "") -> TimedLaunches:
    """Launches of the config, or of one part of it, a copy each."""
    template, problem = state.template(config), state.task.problem
    if part:
        return part_launches(state.operation, template, problem, config, state.copies, part=part)
    return whole_launches(state.operation, template, problem, config, state.copies)


def _time(
    state: _State, config: Config, verdict: Verdict, best_us: float | None, part: str
) -> Outcome:
    """Times a config that is right, and judges it again on what was timed."""
    launches = _launches(state, config, part)
    measurement = measure(
        launches.calls,
        state.timer,
        state.task.settings,
        best_us=best_us,
        num_variants=state.task.problem.num_input_variants,
    )
    if measurement.is_pruned and best_us is not None:
        ratio = measurement.timing.median_us / best_us
        reason = f"cut: {ratio:.2f} times the best time so far"
        return replace(
            _outcome(verdict), status=TrialStatus.PRUNED, reason=reason, timing=measurement.timing
        )
    launches.finish()
    verdict = _judge_timed(state, config, verdict, launches.first)
    outcome = _outcome(verdict)
    return replace(outcome, timing=measurement.timing) if verdict.is_ok else outcome


def _judge_timed(state: _State, config: Config, verdict: Verdict, first: Any) -> Verdict:
    """Judges the inputs that were timed: a lone launch, and what the last replay left.

    A config that is right once may be wrong back to back, where it does not reset its counters.
    """
    operation, problem, copy = state.operation, state.task.problem, state.copies[0]
    is_repeatable = state.template(config).is_repeatable
    judged = first if is_repeatable else copy.outputs
    if state.can_compare_timed:
        try:
            comparison = operation.compare(problem, copy.inputs, judged)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            state.can_compare_timed = False
            _free_memory()
            _log.info("the reference does not fit beside the inputs timed of %s", problem)
        else:
            timed = Verdict.of(comparison, "inputs timed")
            if not timed.is_ok:
                return timed
    if not is_repeatable:
        return verdict
    return judge_repeat(operation, verdict, first, copy.outputs, "launches back to back")


def _join_race(state: _State, config: Config, runs: list[Run]) -> Outcome:
    """Adds a warm run of the config to ``runs``."""
    settings, timer = state.task.settings, state.timer
    calls = _launches(state, config).calls
    for call in calls:
        call()
    pilot = timer.prepare(calls, min(len(calls), settings.pilot_launches))
    estimate_us = min(timer.time_us([pilot, pilot]))
    run = timer.prepare(calls, count_launches(estimate_us, len(calls), settings))
    warm_up(run, timer, estimate_us, settings)
    runs.append(run)
    return Outcome(TrialStatus.OK)


def _outcome(verdict: Verdict) -> Outcome:
    return Outcome(
        verdict.status,
        verdict.reason,
        max_abs_error=verdict.max_abs_error,
        relative_rms_error=verdict.relative_rms_error,
    )


def _guarded(work: Callable[[], Outcome]) -> Outcome:
    """Runs ``work`` and turns what the config did to the device into an outcome."""
    start, disturbed_before = time.monotonic(), _num_disturbed()
    try:
        outcome = work()
        _synchronize()  # so that an error of the device shows with the config that caused it
    except failures() as error:
        outcome = Outcome(status_of(error), short_reason(error), is_device_lost=_is_device_lost())
    # Only here has the error let go of the tensors in its traceback.
    if outcome.status is TrialStatus.OUT_OF_RESOURCES and not outcome.is_device_lost:
        _free_memory()
    return replace(
        outcome,
        measure_s=time.monotonic() - start,
        num_disturbed=_num_disturbed() - disturbed_before,
    )


def _num_disturbed() -> int:
    return _state.watch.num_disturbed if _state is not None and _state.watch is not None else 0


def _synchronize() -> None:
    if _state is not None and _state.task.torch_device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def _is_device_lost() -> bool:
    """Whether the CUDA context still fails after the error: then it fails for ever."""
    try:
        _synchronize()
    except RuntimeError:
        return True
    return False


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
