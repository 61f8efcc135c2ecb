"""Kernels that wait for a compiler: which comes next, each once, whoever asks for it and how often.

Configs share kernels: of a template with parts each kernel is that of many, and one that does not
depend on a problem's sizes serves all problems of a run. So the unit of work is a kernel, and what
became of one is kept for as long as the queue. Nothing here starts a process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ..kernels.base import KernelSpec
from ..kernels.tilelang_spec import TileLangKernelSpec
from .compile_result import CompileResult, joined
from .records import TrialStatus

__all__ = ["KernelJobs", "KernelKey"]

_PATIENCE_S = 20.0
"""A compiler that nobody waits for is let end for so long, longer than nearly all take: the next
problem often wants the same kernel. Then it must go if others wait for its process."""
_LASTING = frozenset(
    {TrialStatus.OK, TrialStatus.COMPILE_ERROR, TrialStatus.OUT_OF_RESOURCES},
)
"""What a compiler will say again."""


class KernelKey(NamedTuple):
    """What is compiled, and for what."""

    spec: KernelSpec
    arch: int
    reads_code: bool


@dataclass(eq=False)
class _Job:
    key: KernelKey
    number: int
    is_slow: bool
    """Starts before others of its kind: TileLang takes 10 to 20 s for a kernel, Triton 1 to 5 s."""
    waiting: list[Future[CompileResult]] = field(default_factory=list)
    running: Future[CompileResult] | None = None
    started: float = 0.0
    is_read_later: bool = False
    """Whether its code is to be read when it is compiled and nothing is more urgent."""
    result: CompileResult | None = None

    @property
    def urgency(self) -> tuple[bool, bool, int]:
        """Less is earlier: what somebody waits for, then what takes long, then in order."""
        return (not self.waiting, not self.is_slow, self.number)


class KernelJobs:
    """The kernels of a compile pool; may be called from any thread."""

    def __init__(
        self, num_running: int, compile_kernel: Callable[[KernelKey], Future[CompileResult]]
    ) -> None:
        """``compile_kernel`` starts one, whose future can be cancelled; so many run at a time."""
        self._num_running = num_running
        self._compile = compile_kernel
        self._lock = threading.RLock()
        self._jobs: dict[KernelKey, _Job] = {}
        self._queued: list[_Job] = []
        self._running: list[_Job] = []
        self._num_jobs = 0
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def submit(self, keys: Sequence[KernelKey]) -> Future[CompileResult]:
        """What becomes of all kernels of a config together; ``cancel`` gives up waiting for them.

        One that nobody waits for is not begun; one under way goes on, see ``_PATIENCE_S``.
        """
        outer: Future[CompileResult] = Future()
        parts = [self._awaited(key) for key in keys]
        left = len(parts)
        lock = threading.Lock()

        def ended(_: Future[CompileResult]) -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                _settle(outer, parts)

        outer.add_done_callback(partial(self._give_up, parts))
        for part in parts:
            part.add_done_callback(ended)
        if not parts:
            outer.set_result(joined([]))
        self._fill()
        return outer

    def prepare(self, keys: Sequence[KernelKey]) -> None:
        """Compiles the kernels when no process has anything more urgent to do.

        Code that is not read with the compile is read behind it: who measures a config asks for it
        in the end, and would wait.
        """
        with self._lock:
            for key in keys:
                job = self._job(key)
                if job.result is None:
                    job.is_read_later = not key.reads_code
        self._fill()

    def drop_prepared(self) -> None:
        """Forgets what was prepared, has not begun and nobody waits for."""
        with self._lock:
            for job in [job for job in self._queued if not job.waiting]:
                self._forget(job)

    def close(self) -> None:
        """Ends nothing that runs; all that still wait are cancelled."""
        with self._lock:
            self._is_closed = True
            waiting = [f for job in self._jobs.values() for f in job.waiting]
            if self._timer is not None:
                self._timer.cancel()
        for future in waiting:
            future.cancel()

    def _job(self, key: KernelKey) -> _Job:
        job = self._jobs.get(key)
        if job is None:
            self._num_jobs += 1
            is_slow = isinstance(key.spec, TileLangKernelSpec)
            job = self._jobs[key] = _Job(key, self._num_jobs, is_slow)
            self._queued.append(job)
        return job

    def _awaited(self, key: KernelKey) -> Future[CompileResult]:
        future: Future[CompileResult] = Future()
        with self._lock:
            assert not self._is_closed, "the pool is closed"
            job = self._job(key)
            if job.result is None:
                job.waiting.append(future)
                return future
            # Its time was spent once.
            result, job.result = job.result, job.result.at_no_cost()
        future.set_result(result)
        return future

    def _give_up(self, parts: Sequence[Future[CompileResult]], outer: Future[object]) -> None:
        if not outer.cancelled():
            return
        with self._lock:
            for job in [*self._queued, *self._running]:
                job.waiting = [future for future in job.waiting if future not in parts]
            for job in [job for job in self._queued if not job.waiting]:
                self._forget(job)
        # A process may be due for what others wait for.
        self._fill()

    def _forget(self, job: _Job) -> None:
        self._queued.remove(job)
        del self._jobs[job.key]

    def _fill(self) -> None:
        """Starts jobs as long as there is room."""
        while True:
            with self._lock:
                if self._is_closed or not self._queued:
                    return
                job = min(self._queued, key=lambda job: job.urgency)
                if len(self._running) >= self._num_running:
                    if job.waiting:
                        self._make_room()
                    return
                self._queued.remove(job)
                self._running.append(job)
                job.started = time.monotonic()
                running = job.running = self._compile(job.key)
            running.add_done_callback(partial(self._ended, job))

    def _make_room(self) -> None:
        """Ends a compiler that nobody has waited for long enough, now or as soon as it is due."""
        unwanted = [job for job in self._running if not job.waiting and job.running is not None]
        if not unwanted:
            return
        oldest = min(unwanted, key=lambda job: job.started)
        left_s = oldest.started + _PATIENCE_S - time.monotonic()
        if left_s <= 0:
            assert oldest.running is not None
            oldest.running.cancel()
        elif self._timer is None:
            self._timer = threading.Timer(left_s, self._look_again)
            self._timer.daemon = True
            self._timer.start()

    def _look_again(self) -> None:
        with self._lock:
            self._timer = None
        self._fill()

    def _ended(self, job: _Job, running: Future[CompileResult]) -> None:
        error = None if running.cancelled() else running.exception()
        result = None if running.cancelled() or error else running.result()
        with self._lock:
            self._running.remove(job)
            waiting, job.waiting = job.waiting, []
            if result is not None and result.status in _LASTING:
                # Who waited takes the time it cost; what was prepared is paid by the first to ask.
                job.result = result.at_no_cost() if waiting else result
                if job.is_read_later and result.status is TrialStatus.OK:
                    self._job(job.key._replace(reads_code=True))
            else:
                del self._jobs[job.key]
        for place, future in enumerate(waiting):
            if not future.set_running_or_notify_cancel():
                continue
            if error is not None:
                future.set_exception(error)
            elif result is not None:
                future.set_result(result.at_no_cost() if place else result)
        if running.cancelled():
            for future in waiting:
                future.cancel()
        self._fill()


def _settle(outer: Future[CompileResult], parts: Sequence[Future[CompileResult]]) -> None:
    if any(part.cancelled() for part in parts):
        outer.cancel()
        return
    if not outer.set_running_or_notify_cancel():
        return
    error = next((e for part in parts if (e := part.exception()) is not None), None)
    if error is not None:
        outer.set_exception(error)
    else:
        outer.set_result(joined([part.result() for part in parts]))
