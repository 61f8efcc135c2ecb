"""The evaluator that measures on a GPU: compiles on all cores, runs in one worker process.

    submit -> compile pool -> ready queue -> GPU worker -> done queue -> collect

A thread hands ready configs to the GPU worker one at a time, so the GPU stays busy while the
caller thinks, and compilation of the next configs overlaps it all. The machine code is read, in
the compile pool, of those that were timed to the end only: a disassembler takes a third of the
time of a compile, and most configs are cut.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ...errors import DeviceError
from ...kernels import registry
from ...kernels.base import Config, Problem
from ...kernels.device import DeviceSpec
from ...search_spaces.parts import PartScope
from .. import worker
from ..compile_pool import CompilePool, CompileResult
from ..environment import warn_if_busy
from ..gpu_worker import GpuWorker
from ..measure import MeasureSettings
from ..measuring_processes import measuring_compile_pool
from ..records import Evaluation, MeasurementPolicy, Provenance, TrialStatus
from ..worker import Outcome, Task
from .gpu_jobs import GpuJobs

__all__ = ["RUN_TIMEOUT_S", "MeasureEvaluator"]

RUN_TIMEOUT_S = 60.0
_QUEUED_FOR_GPU = 2
_POLL_S = 0.2

_REPEATED = frozenset({TrialStatus.OK, TrialStatus.INCORRECT, TrialStatus.UNREPEATABLE})
"""What the same code and launch will show again."""

_R = TypeVar("_R", bound="CompilePool | GpuWorker")

_log = logging.getLogger(__name__)


class MeasureEvaluator:
    """Evaluates configs of one problem by running them; see ``evaluators.base``."""

    provenance = Provenance.MEASURED

    def __init__(
        self,
        problem: Problem,
        device: DeviceSpec,
        policy: MeasurementPolicy | None = None,
        *,
        compilers: CompilePool | None = None,
        gpu: GpuWorker | None = None,
        run_timeout_s: float = RUN_TIMEOUT_S,
        settings: MeasureSettings | None = None,
        torch_device: str | None = None,
        best_us: float | None = None,
        seed: int = 0,
        scope: PartScope | None = None,
        deadline: float | None = None,
        kept: Collection[Config] = (),
    ) -> None:
        """Starts the processes as they are needed.

        Args:
            problem: The problem to measure.
            device: The GPU at hand.
            policy: How kernels are launched and what the L2 holds.
            compilers: Compiles; stays open at ``close``. Default: a pool of its own, of one
                process less than there are cores.
            gpu: Runs; stays open at ``close``, so that the next problem need not start a process.
                Default: a worker of its own.
            run_timeout_s: Limit for judging and timing one config.
            settings: How much measuring is enough.
            torch_device: Where to run; default the GPU, or the CPU where torch sees none.
            best_us: Best time known from an earlier part of the search.
            seed: Seed of the inputs.
            scope: Configs are those of this part: the whole operation is judged with the other
                parts held, the part alone is timed. Default: configs are whole.
            deadline: in seconds of ``time.monotonic``; what still compiles then is taken back, once
                one config has ended.
            kept: configs that are never taken back, however long they compile.
        """
        self._scope = scope
        policy = policy or MeasurementPolicy()
        op_module = registry.module_of(problem.op)
        torch_device = torch_device or _default_torch_device()
        if torch_device.startswith("cuda"):
            warn_if_busy()
        self._device = device
        self._problem = problem
        self._op_module = op_module
        settings = settings or MeasureSettings()
        self._best_us = best_us
        self._deadline = deadline
        self._kept = frozenset(kept)
        task = Task(
            op=problem.op,
            op_module=op_module,
            problem=problem,
            policy=policy,
            torch_device=torch_device,
            l2_bytes=device.l2_bytes,
            seed=seed,
            settings=settings,
        )
        self._owned: list[CompilePool | GpuWorker] = []
        self._compilers = compilers or self._own(measuring_compile_pool())
        gpu = gpu or self._own(GpuWorker())
        gpu.take_on(task)
        self._jobs = GpuJobs(gpu, run_timeout_s=run_timeout_s, max_finals_s=settings.max_finals_s)
        self.capacity = self._compilers.num_workers + _QUEUED_FOR_GPU
        self._in_flight = 0
        self._has_ended = threading.Event()
        """The GPU has judged a config; where there is a part, a whole one before."""
        if scope is not None:
            self._has_ended.set()
        self._compiling: set[Future[CompileResult]] = set()
        """Jobs that may be taken back, of configs that no GPU has seen."""
        self._ready: queue.Queue[tuple[Evaluation, str | None] | None] = queue.Queue()
        self._done: queue.Queue[Evaluation | BaseException | None] = queue.Queue()
        self._known: dict[Config, Evaluation] = {}
        self._twins: dict[tuple[str, str, str], Evaluation] = {}
        """What was found of a template's code and launch; see ``_code``."""
        self._started_at: float | None = None
        self._is_closed = False
        self._has_prepared = False
        self._is_wanted = threading.Event()
        """A config was submitted, or the evaluator is closed."""
        self._feeder = threading.Thread(target=self._feed_gpu, name="gpu-feeder", daemon=True)
        self._feeder.start()

    @property
    def is_whole(self) -> bool:
        """Whether configs are whole, not those of a part."""
        return self._scope is None

    @property
    def busy_s(self) -> float:
        """Time that the GPU worker held the GPU: verifying, warming up, timing."""
        return self._jobs.busy_s

    @property
    def num_disturbed(self) -> int:
        """Blocks of samples that were repeated because the GPU's clock or throttling changed."""
        return self._jobs.num_disturbed

    @property
    def elapsed_s(self) -> float:
        """Time from the first config that was submitted to the last job of the GPU worker."""
        if self._started_at is None:
            return 0.0
        return max(0.0, self._jobs.last_end - self._started_at)

    @property
    def gpu_busy_share(self) -> float:
        """Share of ``elapsed_s`` that the GPU worker held the GPU."""
        return self.busy_s / self.elapsed_s if self.elapsed_s else 0.0

    def submit(self, config: Config) -> None:
        """Queues the config for compiling, then for the GPU."""
        assert not self._is_closed, "the evaluator is closed"
        if self._started_at is None:
            self._started_at = time.monotonic()
        self._in_flight += 1
        self._is_wanted.set()
        job = self._compile(config, reads_code=False)
        if config not in self._kept:
            self._compiling.add(job)
        job.add_done_callback(lambda done: self._compiled(config, done))

    def prepare(self, config: Config) -> None:
        """See ``Evaluator``: compiles it when no compiler has anything more urgent to do."""
        assert not self._is_closed, "the evaluator is closed"
        self._has_prepared = True
        self._compilers.prepare(
            self._problem.op,
            self._op_module,
            config.template,
            self._problem,
            self._whole(config),
            self._device.arch,
            reads_code=False,
        )

    def collect(self, until: float | None = None) -> Evaluation | None:
        """The next config that ended; None for one that was taken back, see ``Evaluator``.

        Raises:
            DeviceError: the GPU cannot be used, whatever the config.
        """
        assert self._in_flight > 0, "nothing is in flight"
        ended = self._next_ended(until)
        self._in_flight -= 1
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def _next_ended(self, until: float | None) -> Evaluation | BaseException | None:
        """Waits for what ended; past the deadline or ``until``, takes back what may be."""
        while self._deadline is not None or until is not None:
            limits = [limit for limit in (self._deadline, until) if limit is not None]
            time_left_s = max(0.0, min(limits) - time.monotonic())
            with suppress(queue.Empty):
                return self._done.get(timeout=time_left_s or _POLL_S)
            # However little time there is, one config is tried.
            is_over = until is not None and time.monotonic() >= until
            if is_over or self._has_ended.is_set():
                for job in tuple(self._compiling):
                    if job.cancel():
                        self._done.put(None)
                break
        return self._done.get()

    def finals(self, configs: Sequence[Config]) -> list[Evaluation]:
        """Verifies the configs once more, then races them in interleaved rounds.

        Returned are those that are still right, the winner first, with all samples; then those
        that fail now.

        Raises:
            DeviceError: the GPU cannot be used, whatever the config.
        """
        assert self._in_flight == 0, "configs are still in flight"
        assert self._scope is None, "finals are for whole configs"
        failed: list[Evaluation] = []
        compiled = _sound(self._compiled_again(configs), failed)
        candidates = _sound(self._each(worker.verify, compiled), failed)
        ordered = self._race(candidates, failed)
        if ordered is None:
            # One that passes alone may still break the race: time each alone to find it.
            alone = _sound(self._each(worker.evaluate, candidates, None), failed)
            ordered = self._race(alone, failed)
            if ordered is None:
                _log.warning("the finals did not end; their order is that of separate measurements")
                ordered = sorted(alone, key=lambda e: e.time_us or 0.0)
        return ordered + failed

    def close(self) -> None:
        """Ends all processes; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._is_wanted.set()
        if self._has_prepared:
            self._compilers.drop_prepared()
        # What is still in flight is of no use: the jobs of owned processes end with them, those
        # of shared ones are dropped as they end.
        self._drop_ready()
        self._ready.put(None)
        for resource in self._owned:
            resource.close()
        self._feeder.join()

    def __enter__(self) -> MeasureEvaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own(self, resource: _R) -> _R:
        self._owned.append(resource)
        return resource

    def _drop_ready(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()

    @property
    def _part(self) -> str:
        return self._scope.part if self._scope else ""

    def _whole(self, config: Config) -> Config:
        return self._scope.whole(config) if self._scope else config

    def _compile(self, config: Config, *, reads_code: bool) -> Future[CompileResult]:
        return self._compilers.submit(
            self._problem.op,
            self._op_module,
            config.template,
            self._problem,
            self._whole(config),
            self._device.arch,
            self._part,
            reads_code=reads_code,
        )

    def _compiled(self, config: Config, job: Future[CompileResult]) -> None:
        """Passes a compiled config on to the GPU; runs in a thread of the compile pool."""
        self._compiling.discard(job)
        if job.cancelled() or self._is_closed:
            return
        error = job.exception()
        if error is not None:
            self._done.put(error)
        elif job.result().status is TrialStatus.OK:
            self._ready.put((_compiled_evaluation(config, job.result()), job.result().digest))
        else:
            self._done.put(_compiled_evaluation(config, job.result()))

    def _feed_gpu(self) -> None:
        """Evaluates what is ready, one config after the other; the body of the feeder thread."""
        self._start_early()
        while (ready := self._ready.get()) is not None:
            compiled, digest = ready
            try:
                self._pass_on(self._evaluate(compiled, digest))
            except BaseException as error:  # whatever it is, the caller must see it
                self._done.put(error)

    def _pass_on(self, ended: Evaluation) -> None:
        """Hands an ended config to the caller, its machine code read where it is worth reading."""
        self._has_ended.set()
        if ended.status is TrialStatus.OK and ended.time_us is not None:
            self._best_us = min(self._best_us or ended.time_us, ended.time_us)
            self._read_code(ended)
        else:
            self._done.put(ended)

    def _read_code(self, timed: Evaluation) -> None:
        def add_facts(job: Future[CompileResult]) -> None:
            if job.cancelled() or self._is_closed:
                return
            error = job.exception()
            if error is not None:
                self._done.put(error)
                return
            # A compiler that fails over what it has compiled once costs the facts alone.
            ended = replace(timed, facts=job.result().facts)
            self._known[ended.config] = ended
            self._done.put(ended)

        self._compile(timed.config, reads_code=True).add_done_callback(add_facts)

    def _start_early(self) -> None:
        """Starts the worker while the first config compiles: both take seconds."""
        self._is_wanted.wait()
        if self._is_closed:
            return
        # Why a worker cannot start is told with the first config that needs it.
        with suppress(DeviceError, CancelledError):
            self._jobs.make_ready()

    def _evaluate(self, compiled: Evaluation, digest: str | None) -> Evaluation:
        """Runs the config, or takes over what its twin showed: same code, launched the same way."""
        code = self._code(compiled.config, digest)
        twin = self._twins.get(code) if code else None
        if twin is not None:
            _log.debug("%s is the same code and launch as %s", compiled.config, twin.config)
            return replace(
                twin, config=compiled.config, compile_s=compiled.compile_s, measure_s=0.0
            )
        whole = self._whole(compiled.config)
        outcome = self._jobs.run(worker.evaluate, whole, self._best_us, self._part)
        ended = _with_outcome(compiled, outcome)
        if code and ended.status in _REPEATED:
            self._twins[code] = ended
        return ended

    def _code(self, config: Config, digest: str | None) -> tuple[str, str, str] | None:
        """Equal for configs that do exactly the same; None where that is not known."""
        if digest is None:
            return None
        template = registry.template(self._problem.op, config.template)
        launch = template.launch_key(self._problem, self._whole(config))
        return None if launch is None else (config.template, digest, launch)

    def _each(
        self, job: Callable[..., Outcome], evaluations: Sequence[Evaluation], *args: object
    ) -> list[Evaluation]:
        """The evaluations after a job on each in the GPU worker."""
        return [_with_outcome(e, self._jobs.run(job, e.config, *args)) for e in evaluations]

    def _compiled_again(self, configs: Sequence[Config]) -> list[Evaluation]:
        """The configs with what the compiler said of them; a resumed search has to ask it anew."""
        new = (c for c in configs if c not in self._known)
        jobs = {c: self._compile(c, reads_code=True) for c in new}
        return [self._known.get(c) or _compiled_evaluation(c, jobs[c].result()) for c in configs]

    def _race(
        self, candidates: Sequence[Evaluation], failed: list[Evaluation]
    ) -> list[Evaluation] | None:
        """The candidates in final order, or None where the race brought the worker down."""
        if not candidates:
            return []
        result = self._jobs.race([e.config for e in candidates])
        if result is None:
            return None
        ended = [_with_outcome(e, o) for e, o in zip(candidates, result.outcomes, strict=True)]
        _sound(ended, failed)
        if not result.is_settled:
            _log.info("the order of the finalists is not settled: more rounds would be needed")
        return [ended[i] for i in result.order]


def _default_torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _compiled_evaluation(config: Config, result: CompileResult) -> Evaluation:
    return Evaluation(
        config=config,
        status=result.status,
        provenance=Provenance.MEASURED,
        reason=result.reason,
        facts=result.facts,
        compile_s=result.compile_s,
    )


def _with_outcome(compiled: Evaluation, outcome: Outcome) -> Evaluation:
    """The evaluation after the GPU: figures of the outcome replace older ones."""
    return replace(
        compiled,
        status=outcome.status,
        reason=outcome.reason,
        timing=outcome.timing,
        max_abs_error=_first(outcome.max_abs_error, compiled.max_abs_error),
        relative_rms_error=_first(outcome.relative_rms_error, compiled.relative_rms_error),
        measure_s=compiled.measure_s + outcome.measure_s,
    )


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _sound(evaluations: Sequence[Evaluation], failed: list[Evaluation]) -> list[Evaluation]:
    """Those that are ok; the others are logged and added to ``failed``."""
    for evaluation in evaluations:
        if evaluation.status is not TrialStatus.OK:
            _log.warning(
                "finalist %s: %s: %s", evaluation.config, evaluation.status, evaluation.reason
            )
            failed.append(evaluation)
    return [evaluation for evaluation in evaluations if evaluation.status is TrialStatus.OK]
