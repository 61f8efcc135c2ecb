"""The main job: searches the problems of a workload on each SKU and keeps what it finds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UnsupportedError, UsageError
from ..kernels.base import Config
from ..kernels.registry import template
from ..search_spaces.parts import PartScope
from ..search_spaces.registry import joint_space
from ..search_spaces.space import JointSpace
from . import catalog, dispatch, environment
from .carried_winners import CarriedWinners
from .catalog import Budget, Workload, WorkloadProblem
from .compile_pool import CompilePool, default_num_workers
from .evaluators.base import Evaluator
from .evaluators.predict import PredictEvaluator
from .external import (
    contest_space,
    is_runnable,
    own_templates,
    run_timeout_s,
    space_of_libraries,
)
from .measuring_processes import MeasuringProcesses
from .paths import user_database_path
from .prediction.roofline import share_of_roofline
from .progress import LoggingListener, ProgressListener
from .records import MeasurementPolicy, Provenance, StudyKey, TrialStatus
from .search.driver import failure_summary
from .search.partwise import expected_trials, run_search
from .search.stopping import GainRule
from .store import Store
from .store.records import StudyRecord, TrialRecord, WinnerRecord
from .targets import Mode, Target, resolve_targets
from .time_shares import TimeShares
from .tune_arguments import check_run, checked_budget, checked_names, checked_seed
from .tune_summary import TuneRow, TuneSummary

if TYPE_CHECKING:
    from .evaluators.measure import MeasureEvaluator

__all__ = ["ALL_WORKLOADS", "tune"]

ALL_WORKLOADS = "all"

_COMPILE_CORE_S = 4.0
"""Time of one core to compile and read a config; 3.7 s over 26 configs of paged decode for sm_90
and sm_100 with Triton 3.9 on a 2-core virtual machine, November 2026."""
_MEASURE_S = 0.6
"""Time the GPU is held for a config: verify, warm up, measure."""


def tune(
    workload: str | Workload = "quickstart",
    *,
    gpus: Sequence[str] | None = None,
    templates: Sequence[str] | None = None,
    mode: Mode = "auto",
    trials: int | None = None,
    time_budget_s: float | None = None,
    budget: str = "quick",
    db: str | Path | None = None,
    seed: int = 0,
    dry_run: bool = False,
    listener: ProgressListener | None = None,
) -> TuneSummary:
    """Finds the best config for every problem of the workload on every SKU.

    Started again after an interruption it goes on where it was; started again after it finished
    it returns the same winners at once.

    Args:
        workload: name of a workload, path of a workload file, or ``all``; or a workload itself,
            whose problems are searched in their order.
        gpus: SKU names; None for the GPU at hand or, without one, H200 and B200.
        templates: names of the templates to search; None for all. A problem that none of them
            serves has a row with the reason.
        mode: ``measure`` on the GPU at hand, ``predict`` without one, or ``auto``: measure the GPU
            at hand and predict other SKUs.
        trials: trials a study in all, in the place of the budget's number; without it a study
            also ends where further gain is unlikely.
        time_budget_s: seconds for the whole call, shared evenly between the studies; what runs when
            they are over is finished.
        budget: name of a budget: ``quick`` or ``full``.
        db: database path or URL; None for the user's database.
        seed: seed of the search, of 32 bits.
        dry_run: only say what would be searched, how large it is and how long it may take.
        listener: follows the run; by default it goes to the log.

    Raises:
        UsageError: an argument is wrong, or names something unknown.
        UnsupportedError: no template serves any of the problems.
        DeviceError: ``mode`` is ``measure`` and there is no GPU.
        StoreError: the database cannot be used.
    """
    started = time.monotonic()
    limits = checked_budget(budget, trials, time_budget_s)
    seed = checked_seed(seed)
    check_run(db, listener, dry_run=dry_run)
    problems = _problems(workload)
    gpus, names = checked_names("gpus", gpus), checked_names("templates", templates)
    with ExitStack() as resources:
        measuring = None
        if not dry_run and mode != "predict" and environment.has_gpu():
            # Loads side by side with what asks the GPU for its name: both take seconds.
            measuring = resources.enter_context(MeasuringProcesses())
            measuring.start()
        targets = resolve_targets(gpus, mode)
        jobs = [_Job(entry, target, names) for target in targets for entry in problems]
        if dry_run:
            rows = [_plan(job, limits, len(jobs)) for job in jobs]
            database, share, num_disturbed = "", None, 0
        else:
            location = user_database_path() if db is None else db
            # Who names a number of trials wants them all.
            gain = GainRule() if trials is None else None
            listener = listener or LoggingListener()
            with _Run(location, limits, seed, gain, listener, measuring=measuring) as run:
                rows = run.all(jobs)
                share, num_disturbed = run.gpu_busy_share, run.num_disturbed
            dispatch.refresh()  # look-ups of this process see what was found
            database = str(location)
    _raise_if_all_unsupported(rows)
    elapsed_s = time.monotonic() - started
    return TuneSummary(tuple(rows), dry_run, database, elapsed_s, share, num_disturbed)


@dataclass(frozen=True)
class _Job:
    """One study to be: a problem on a target."""

    entry: WorkloadProblem
    target: Target
    templates: tuple[str, ...] | None

    def space(self) -> JointSpace:
        """What is searched: our templates, or libraries where none of ours takes part.

        Raises:
            UnsupportedError: no template serves the problem.
        """
        problem, device = self.entry.problem, self.target.device
        own = own_templates(problem.op, self.templates)
        if own == ():
            return space_of_libraries(problem, device, self.templates, is_measured=self.is_measured)
        try:
            return joint_space(problem, device, own)
        except UnsupportedError:
            contest = self.contest(())
            if contest is None:
                raise
            return contest

    def contest(self, held: Sequence[Config]) -> JointSpace | None:
        """Winners against each other and the libraries that are installed; None without a rival."""
        if not self.is_measured:
            return None
        return contest_space(self.entry.problem, self.target.device, self.templates, held)

    @property
    def is_measured(self) -> bool:
        """Whether a GPU runs what is searched."""
        return self.target.provenance is Provenance.MEASURED

    def row(self, reason: str = "") -> TuneRow:
        """A row without a result."""
        return TuneRow(
            label=self.entry.label,
            problem=self.entry.problem,
            sku=self.target.device.sku,
            provenance=self.target.provenance,
            reason=reason,
        )


class _Run:
    """The open database and compilers of one call."""

    def __init__(
        self,
        location: str | Path,
        limits: Budget,
        seed: int,
        gain: GainRule | None,
        listener: ProgressListener,
        *,
        measuring: MeasuringProcesses | None,
    ) -> None:
        self._resources = ExitStack()
        self._store = self._resources.enter_context(Store.open(location))
        self._carried = CarriedWinners(self._store, location)
        self._resources.callback(self._carried.close)
        self._limits = limits
        self._seed = seed
        self._gain = gain
        self._listener = listener
        self._compilers: CompilePool | None = None
        self._measuring = measuring
        self._measured: list[MeasureEvaluator] = []
        self._shares = TimeShares(limits.time_budget_s)

    @property
    def gpu_busy_share(self) -> float | None:
        """Share of the time of the measured searches that the GPU was held; None without any."""
        # The parts of an operation are measured while its own evaluator waits.
        elapsed_s = sum(evaluator.elapsed_s for evaluator in self._measured if evaluator.is_whole)
        busy_s = sum(evaluator.busy_s for evaluator in self._measured)
        return busy_s / elapsed_s if elapsed_s else None

    @property
    def num_disturbed(self) -> int:
        """Blocks of samples that were repeated."""
        return sum(evaluator.num_disturbed for evaluator in self._measured)

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def all(self, jobs: Sequence[_Job]) -> list[TuneRow]:
        """Searches job after job; one that nothing supports does not stop the others."""
        rows = []
        predicted: list[tuple[int, _Job, JointSpace]] = []
        for index, job in enumerate(jobs):
            try:
                space = job.space()
            except UnsupportedError as error:
                rows.append(job.row(str(error)))
                continue
            deadline = self._shares.next_deadline(len(jobs) - index)
            rows.append(self._one(job, space, deadline))
            if not job.is_measured:
                predicted.append((index, job, space))
        # What a later SKU has found is now predicted on the earlier ones.
        for place, (index, job, space) in enumerate(predicted):
            deadline = self._shares.next_deadline(len(predicted) - place)
            is_over = deadline is not None and deadline <= time.monotonic()
            if not is_over and self._untried(job, space):
                rows[index] = self._one(job, space, deadline)
        return rows

    def _untried(self, job: _Job, space: JointSpace) -> bool:
        """Whether the winner of another SKU has no trial in this study."""
        key = _study_key(job, space)
        carried = set(self._carried.of(key, space))
        study = self._store.find_study(key) if carried else None
        trials = self._store.trials(study.study_id) if study is not None else ()
        return bool(carried - {trial.evaluation.config for trial in trials})

    def _one(self, job: _Job, space: JointSpace, deadline: float | None) -> TuneRow:
        standing = self._standing(job, space)
        if own_templates(job.entry.problem.op, [s.template for s in space.spaces]) == ():
            space = job.contest(standing) or space
            winner, trials = self._search(job, space, deadline, standing)
            return _row(job, space, self._decided_last(job, winner), trials)
        winner, trials = self._search(job, space, deadline)
        ours = () if winner is None else (winner.trial.evaluation.config,)
        contest = job.contest((*ours, *standing))
        if contest is not None:
            best, more = self._search(job, contest, deadline, standing)
            winner, trials = best or winner, trials + more
        return _row(job, space, self._decided_last(job, winner), trials)

    def _decided_last(self, job: _Job, winner: WinnerRecord | None) -> WinnerRecord | None:
        """The winner, decided again where another study of the problem was decided since.

        A search that has nothing new to measure keeps its decision, and the newest is handed out.
        """
        if winner is None or not job.is_measured:
            return winner
        newest = self._carried.last_decision(winner.study.key)
        if newest is None or newest <= winner.decided_at:
            return winner
        study_id = winner.study.study_id
        tried = {trial.trial_id: trial.evaluation for trial in self._store.trials(study_id)}
        # Rows that cannot be read are left out; the winner's can.
        finals = [tried[trial_id] for trial_id in winner.finals if trial_id in tried]
        return self._store.decide(study_id, finals)

    def _standing(self, job: _Job, space: JointSpace) -> tuple[Config, ...]:
        """What serves now, if the search leaves its template out: one config at most."""
        if not job.is_measured:
            return ()
        problem, device = job.entry.problem, job.target.device
        standing = self._carried.standing(_study_key(job, space), space)
        return next(((c,) for c in standing if is_runnable(problem, device, c)), ())

    def _search(
        self,
        job: _Job,
        space: JointSpace,
        deadline: float | None,
        standing: tuple[Config, ...] = (),
    ) -> tuple[WinnerRecord | None, list[TrialRecord]]:
        """The winner of one study and its trials, those of its parts included.

        The default and what is handed out now are evaluated however little time is left: the study,
        being the newest, would be handed out without it.
        """
        entry, target = job.entry, job.target
        study = self._store.study(_study_key(job, space), seed=self._seed)
        served = self._carried.served(study.key, space)
        if job.is_measured:
            others = self._carried.earlier(study.key, space)
            now = (space.default, *served, *others[:1], *standing)
        else:
            others = self._carried.of(study.key, space)
            now = (space.default, *served)
        kept = tuple(dict.fromkeys(c for c in now if space.check(c) is None))
        # The search itself begins with the default.
        carried = tuple(c for c in dict.fromkeys((*kept, *others)) if c != space.default)
        total = expected_trials(space, self._limits.num_trials)
        self._listener.study_started(entry.label, target.device.sku, entry.problem, total)
        winner = run_search(
            space=space,
            evaluators=partial(self._evaluator, job, space, deadline=deadline, kept=kept),
            store=self._store,
            study=study,
            num_trials=self._limits.num_trials,
            deadline=deadline,
            seed=self._seed,
            num_finalists=self._limits.num_finalists,
            listener=self._listener,
            gain=self._gain,
            carried=carried,
            kept=kept,
        )
        self._listener.study_ended(winner)
        trials = list(self._store.trials(study.study_id))
        for part in self._store.part_studies(study):
            trials += self._store.trials(part.study_id)
        return winner, trials

    def _evaluator(
        self,
        job: _Job,
        space: JointSpace,
        study: StudyRecord,
        scope: PartScope | None = None,
        *,
        deadline: float | None,
        kept: tuple[Config, ...],
    ) -> Evaluator:
        problem, device = job.entry.problem, job.target.device
        if job.target.provenance is Provenance.PREDICTED:
            if self._compilers is None:
                self._compilers = self._resources.enter_context(CompilePool())
            pool = self._compilers
            return PredictEvaluator(
                problem, device, pool=pool, scope=scope, deadline=deadline, kept=kept
            )
        # Loads the parts that need a GPU only where one is used.
        from .evaluators.measure import MeasureEvaluator

        processes = self._measuring_processes()
        times = [
            record.evaluation.time_us
            for record in self._store.trials(study.study_id)
            if record.evaluation.status is TrialStatus.OK and record.evaluation.time_us is not None
        ]
        policy = study.key.policy
        evaluator = MeasureEvaluator(
            problem,
            device,
            policy,
            compilers=processes.compilers,
            gpu=processes.gpu,
            run_timeout_s=run_timeout_s(problem.op, space),
            best_us=min(times, default=None),
            seed=self._seed,
            scope=scope,
            deadline=deadline,
            kept=kept,
        )
        self._measured.append(evaluator)
        return evaluator

    def _measuring_processes(self) -> MeasuringProcesses:
        if self._measuring is None:
            self._measuring = self._resources.enter_context(MeasuringProcesses())
        return self._measuring


def _problems(workload: str | Workload) -> list[WorkloadProblem]:
    """The problems of the workload, or of all of them, each once."""
    if not isinstance(workload, str | Path | Workload):
        raise UsageError(f"workload={workload!r} must be a name, a TOML file's path or a Workload")
    if isinstance(workload, Workload):
        entries = list(workload.problems)
    else:
        names = catalog.workload_names() if workload == ALL_WORKLOADS else (workload,)
        entries = [entry for name in names for entry in catalog.workload(name).problems]
    unique: dict[tuple[str, str], WorkloadProblem] = {}
    for entry in entries:
        unique.setdefault((entry.problem.op, entry.problem.key()), entry)
    return list(unique.values())


def _study_key(job: _Job, space: JointSpace) -> StudyKey:
    problem, target = job.entry.problem, job.target
    is_measured = target.provenance is Provenance.MEASURED
    names = sorted(part.template for part in space.spaces)
    return StudyKey(
        problem=problem,
        device=target.device,
        toolchain=environment.toolchain(with_driver=is_measured),
        provenance=target.provenance,
        policy=MeasurementPolicy(),
        space_fingerprint=space.fingerprint(),
        template_hashes=tuple((n, template(problem.op, n).source_hash()) for n in names),
    )


def _row(
    job: _Job, space: JointSpace, winner: WinnerRecord | None, trials: Sequence[TrialRecord]
) -> TuneRow:
    evaluations = [record.evaluation for record in trials]
    counts = Counter(evaluation.status.value for evaluation in evaluations)
    row = replace(job.row(), num_trials=dict(counts), space_size=space.count())
    if winner is None:
        return replace(row, reason=failure_summary(evaluations))
    time_us = winner.trial.evaluation.time_us
    assert time_us is not None
    return replace(
        row,
        config=winner.trial.evaluation.config,
        time_us=time_us,
        default_time_us=next((e.time_us for e in evaluations if e.config == space.default), None),
        share_of_roofline=share_of_roofline(job.entry.problem, job.target.device, time_us),
        trial_id=winner.trial.trial_id,
    )


def _plan(job: _Job, limits: Budget, num_jobs: int) -> TuneRow:
    """What a search for the job would be, were it new."""
    try:
        space = job.space()
    except UnsupportedError as error:
        return job.row(str(error))
    size = space.count()
    compile_s = _COMPILE_CORE_S / default_num_workers()
    is_measured = job.target.provenance is Provenance.MEASURED
    trial_s = max(compile_s, _MEASURE_S) if is_measured else compile_s
    expected_s = trial_s * expected_trials(space, limits.num_trials)
    if limits.time_budget_s is not None:
        expected_s = min(expected_s, limits.time_budget_s / num_jobs)
    return replace(job.row(), space_size=size, expected_s=expected_s)


def _raise_if_all_unsupported(rows: Sequence[TuneRow]) -> None:
    if rows and all(row.space_size is None for row in rows):
        raise UnsupportedError("\n".join(dict.fromkeys(row.reason for row in rows)))
