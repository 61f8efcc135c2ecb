"""The parent's handle on the one process that may use the GPU.

Starts it, gives it one job at a time, and replaces it when it dies, hangs or has broken its CUDA
context. A replacement makes its inputs anew before it takes a job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import ParamSpec, TypeVar

from ..errors import DeviceError
from . import worker
from .compile_pool import short_reason
from .process_pool import JobCrashedError, JobTimeoutError, WorkerPool
from .worker import Task

__all__ = ["SETUP_TIMEOUT_S", "GpuWorker"]

SETUP_TIMEOUT_S = 300.0
"""Limit for starting a process and making its inputs."""

P = ParamSpec("P")
T = TypeVar("T")

_JOBS_PER_PROCESS = 500
"""Compilers keep every kernel they loaded; a fresh process now and then frees it all."""


class GpuWorker:
    """Runs jobs for one task after another, one job at a time.

    Threads take turns; ``close`` waits for none.
    """

    def __init__(
        self, *, setup_timeout_s: float = SETUP_TIMEOUT_S, memory_limit_bytes: int | None = None
    ) -> None:
        """Starts nothing yet; ``memory_limit_bytes`` of host memory, see ``WorkerPool``."""
        self._memory_limit_bytes = memory_limit_bytes
        self._task: Task | None = None
        self._setup_timeout_s = setup_timeout_s
        self._lock = threading.Lock()
        self._turn = threading.RLock()
        """Held for as long as a job, or the start of a process, takes."""
        self._pool: WorkerPool | None = None
        """The process, once its inputs are made."""
        self._started: WorkerPool | None = None
        """A process that loads and has no inputs yet."""
        self._num_jobs = 0
        self._is_closed = False

    def start(self) -> None:
        """Starts a process now, so that it loads before there is a task; does not wait."""
        with self._turn, self._lock:
            if self._pool is None and self._started is None and not self._is_closed:
                self._started = self._new_pool()
                self._started.start()

    def take_on(self, task: Task) -> None:
        """Makes ``task`` what jobs are about; the process, where there is one, stays.

        So do its inputs where the task is the same.

        Raises:
            DeviceError: no process can be made ready for the task.
            CancelledError: ``close`` was called.
        """
        with self._turn:
            is_same = task == self._task
            self._task = task
            if self._pool is not None and not is_same:
                self._make_inputs(self._pool, task)

    def run(self, timeout_s: float, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs one job and waits for it.

        Raises:
            JobTimeoutError: it took too long; the process was killed.
            JobCrashedError: the process died.
            DeviceError: no process can be made ready for the task.
            CancelledError: ``close`` was called.
        """
        with self._turn:
            pool = self.make_ready()
            self._num_jobs += 1
            try:
                return pool.submit(timeout_s, job, *args, **kwargs).result()
            except (JobCrashedError, JobTimeoutError):
                self.discard()
                raise

    def make_ready(self) -> WorkerPool:
        """Starts a process and makes its inputs, where there is none.

        Raises:
            DeviceError: the process cannot be made ready for the task.
            CancelledError: ``close`` was called.
        """
        with self._turn:
            if self._num_jobs >= _JOBS_PER_PROCESS:
                self.discard()
            return self._pool or self._prepared_pool()

    def discard(self) -> None:
        """Ends the process; the next job gets another."""
        with self._lock:
            pools = self._pool, self._started
            self._pool = self._started = None
            self._num_jobs = 0
        for pool in pools:
            if pool is not None:
                pool.close()

    def close(self) -> None:
        """Ends the process for good, and with it the job that another thread waits for."""
        with self._lock:
            self._is_closed = True
        self.discard()

    def _prepared_pool(self) -> WorkerPool:
        with self._lock:
            if self._is_closed:
                raise CancelledError
            pool = self._pool = self._started or self._new_pool()
            self._started = None
        assert self._task is not None, "take_on() comes before the first job"
        self._make_inputs(pool, self._task)
        return pool

    def _new_pool(self) -> WorkerPool:
        return WorkerPool(
            1, initializer=worker.load_device, memory_limit_bytes=self._memory_limit_bytes
        )

    def _make_inputs(self, pool: WorkerPool, task: Task) -> None:
        try:
            pool.submit(self._setup_timeout_s, worker.prepare, task).result()
        except (JobCrashedError, JobTimeoutError, RuntimeError, MemoryError) as error:
            self.discard()
            raise DeviceError(
                f"cannot prepare {task.torch_device} for {task.op} problem {task.problem}: "
                f"{short_reason(error)}; free the device's memory, see `tilescout env`, or choose "
                "a smaller problem"
            ) from error
