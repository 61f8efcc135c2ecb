"""Compiles the kernels of ``covering.py``'s configs, each once, and checks configs, to a deadline.

A config is checked as soon as its kernels are compiled; compilers and checkers are processes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from covering_jobs import Outcome, check_config, compile_kernel, load_checker, load_compiler
from covering_sample import Item
from tilescout.kernels.base import KernelSpec
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner.process_pool import JobCrashedError, JobTimeoutError, WorkerPool
from tilescout.tuner.records import TrialStatus

__all__ = ["Result", "Run"]

COMPILE_TIMEOUT_S = 60.0
"""Of one kernel: far above any compile seen, far below what would hold up a run."""
CHECK_TIMEOUT_S = 60.0
"""Of one config; the first check of a family makes inputs and references too."""
_OK = TrialStatus.OK.value


@dataclass(frozen=True)
class Result:
    """What became of one config."""

    key: str
    op: str
    family: str
    template: str
    config: dict[str, Any]
    status: str
    reason: str
    compile_s: float = 0.0
    """Of its kernels together, those that it shares included."""
    check_s: float = 0.0


@dataclass(eq=False)
class _Kernel:
    """One kernel, the configs that wait for it, and what became of it."""

    spec: KernelSpec
    waiting: list[_Pending] = field(default_factory=list)
    outcome: Outcome | None = None


@dataclass(eq=False)
class _Pending:
    """A config on its way."""

    item: Item
    kernels: list[_Kernel]
    num_missing: int

    @property
    def compile_s(self) -> float:
        """Of all its kernels that were compiled."""
        seconds: list[float] = [k.outcome[2] for k in self.kernels if k.outcome is not None]
        return sum(seconds)


class Run:
    """One run over items, until a deadline."""

    def __init__(
        self, device: DeviceSpec, *, num_compilers: int, num_checkers: int, deadline: float
    ) -> None:
        """``num_checkers`` 0: what compiled is ok and nothing is launched."""
        self._arch = device.arch
        self._compilers = WorkerPool(num_compilers, initializer=load_compiler)
        self._checkers = None
        if num_checkers:
            # They load while the first kernels compile.
            self._checkers = WorkerPool(num_checkers, initializer=load_checker)
            self._checkers.start()
        self._deadline = deadline
        self._lock = threading.Lock()
        self._results: queue.Queue[Result] = queue.Queue()
        self.num_kernels = 0
        """Kernels that were compiled."""

    def results(self, items: Sequence[Item]) -> Iterator[Result]:
        """Results as they come; fewer than items where the deadline passes."""
        kernels: dict[Hashable, _Kernel] = {}
        for item in items:
            _enlist(item, kernels)
        try:
            for kernel in kernels.values():
                job = self._compilers.submit(
                    COMPILE_TIMEOUT_S, compile_kernel, kernel.spec, self._arch
                )
                job.add_done_callback(partial(self._compiled, kernel))
            for _ in items:
                try:
                    yield self._results.get(timeout=max(0.0, self._deadline - time.monotonic()))
                except queue.Empty:
                    return
        finally:
            self._compilers.close()
            if self._checkers is not None:
                self._checkers.close()

    def _compiled(self, kernel: _Kernel, job: Future[Outcome]) -> None:
        if job.cancelled():
            return
        outcome = _outcome_of(job, TrialStatus.COMPILE_ERROR)
        with self._lock:
            kernel.outcome = outcome
            self.num_kernels += 1
            for pending in kernel.waiting:
                pending.num_missing -= 1
            ready = [pending for pending in kernel.waiting if not pending.num_missing]
        for pending in ready:
            self._check(pending)

    def _check(self, pending: _Pending) -> None:
        outcomes = [kernel.outcome for kernel in pending.kernels if kernel.outcome is not None]
        failed = next((outcome for outcome in outcomes if outcome[0] != _OK), None)
        if failed is not None or self._checkers is None:
            self._put(pending, failed or (_OK, "", 0.0))
            return
        item = pending.item
        try:
            job = self._checkers.submit(CHECK_TIMEOUT_S, check_config, item.problem, item.config)
        except AssertionError:
            return  # closed meanwhile
        job.add_done_callback(partial(self._checked, pending))

    def _checked(self, pending: _Pending, job: Future[Outcome]) -> None:
        if not job.cancelled():
            self._put(pending, _outcome_of(job, TrialStatus.RUNTIME_ERROR))

    def _put(self, pending: _Pending, outcome: Outcome) -> None:
        item, (status, reason, seconds) = pending.item, outcome
        self._results.put(
            Result(
                *(item.key, item.op, item.family, item.config.template, item.config.as_dict()),
                *(status, reason, pending.compile_s, seconds),
            )
        )


def _enlist(item: Item, kernels: dict[Hashable, _Kernel]) -> None:
    """Adds the item's kernels that are not there, and the item to those that it waits for."""
    own = [kernels.setdefault(key, _Kernel(spec)) for key, spec in item.specs.items()]
    pending = _Pending(item, own, len(own))
    for kernel in own:
        kernel.waiting.append(pending)


def _outcome_of(job: Future[Outcome], otherwise: TrialStatus) -> Outcome:
    """The job's outcome; where it ended with an exception, what that is."""
    error = job.exception()
    if error is None:
        return job.result()
    status = otherwise
    if isinstance(error, JobTimeoutError):
        status = TrialStatus.TIMEOUT
    elif isinstance(error, JobCrashedError):
        status = TrialStatus.CRASHED
    return status.value, f"{type(error).__name__}: {error}", 0.0
