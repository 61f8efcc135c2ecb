"""A pool of worker processes that a crash, a hang or a kill cannot take the parent down with.

Wraps ``pebble.ProcessPool`` for the compile pool and the GPU worker: what a job's process printed
becomes the reason of its crash, workers never outlive their parent, and a worker takes the
programs it started (``ptxas``) with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from pebble import ProcessExpired, ProcessPool

from .memory_watch import MemoryWatch, memory_share

__all__ = ["JobCrashedError", "JobMemoryError", "JobTimeoutError", "WorkerPool"]

P = ParamSpec("P")
T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_GRACE_S = 1.0
_MAX_ATTEMPTS = 2


class JobTimeoutError(Exception):
    """A job ran longer than it may; its process was killed."""


class JobCrashedError(Exception):
    """The process of a job died; the text is how, and the last line it printed."""


class JobMemoryError(JobCrashedError):
    """The process of a job was killed because it took too much of the host's memory."""


class WorkerPool:
    """Runs functions in worker processes, each job with its own time limit.

    A worker serves many jobs; one that dies or overruns costs only its job and is replaced.
    Workers import the module of the function, never the caller's ``__main__``.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        initializer: Callable[[], None] | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        """Starts no process yet.

        Args:
            num_workers: Processes.
            initializer: Runs first in every worker.
            memory_limit_bytes: Host memory of one worker, above which it is killed. Default: an
                even part of most of the machine's.
        """
        assert num_workers > 0
        self._num_workers = num_workers
        self._initializer = initializer
        self._logs = tempfile.TemporaryDirectory(prefix="tilescout-")
        self._lock = threading.RLock()
        self._is_closed = False
        self._broken: list[ProcessPool] = []
        self._pool = self._new_pool()
        self._unfinished: set[Future[Any]] = set()
        self._memory = MemoryWatch(
            self._worker_pids, memory_limit_bytes or memory_share(num_workers)
        )

    def submit(
        self, timeout_s: float | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Queues ``function(*args, **kwargs)``; the time limit counts from when it starts.

        The future ends with the result, with what the function raised, with ``JobTimeoutError``
        or with ``JobCrashedError``. Function, arguments and result must pickle. ``cancel`` of the
        future ends the job, in its process too.
        """
        future: Future[T] = Future()
        with self._lock:
            assert not self._is_closed, "the pool is closed"
            self._unfinished.add(future)

        def schedule(attempt: int) -> None:
            with self._lock:
                if self._is_closed:
                    return
                try:
                    pool, inner = self._schedule(timeout_s, function, args, kwargs)
                except BaseException:
                    self._unfinished.discard(future)
                    raise
            inner.add_done_callback(lambda done: settle(pool, done, attempt))
            # Who takes a job back wants its process for something else.
            future.add_done_callback(lambda ended: ended.cancelled() and inner.cancel())

        def settle(pool: ProcessPool, done: Future[T], attempt: int) -> None:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, BrokenProcessPool) and attempt < _MAX_ATTEMPTS:
                self._replace(pool)
                schedule(attempt + 1)
                return
            with self._lock:
                self._unfinished.discard(future)
            self._finish(future, done, timeout_s)

        schedule(1)
        return future

    def start(self) -> None:
        """Starts the processes, which otherwise start with the first job; does not wait."""
        self.submit(None, _nothing)

    def close(self) -> None:
        """Kills the workers and cancels what has not ended; may be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            unfinished = tuple(self._unfinished)
        self._memory.close()
        for pool in (*self._broken, self._pool):
            pool.stop()  # type: ignore[no-untyped-call]
            pool.join()
        for future in unfinished:
            future.cancel()
        self._logs.cleanup()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=_start_worker,
            initargs=(self._logs.name, self._initializer),
            context=_Context(),
        )

    def _schedule(
        self, timeout_s: float | None, function: Callable[..., T], args: Any, kwargs: Any
    ) -> tuple[ProcessPool, Future[T]]:
        """Hands the job to the pool, which may turn out to be broken only now."""
        job = (_run_job, (function, args, kwargs))
        try:
            return self._pool, self._pool.schedule(*job, timeout=timeout_s)
        except RuntimeError:
            self._replace(self._pool)
            return self._pool, self._pool.schedule(*job, timeout=timeout_s)

    def _replace(self, pool: ProcessPool) -> None:
        """Puts a fresh pool in the place of a broken one, once."""
        with self._lock:
            if pool is self._pool and not self._is_closed:
                self._broken.append(pool)  # its own threads call here and cannot join themselves
                self._pool = self._new_pool()

    def _finish(self, future: Future[T], done: Future[T], timeout_s: float | None) -> None:
        if future.cancelled() or not future.set_running_or_notify_cancel():
            return
        error = CancelledError() if done.cancelled() else done.exception()
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, BrokenProcessPool):
            future.set_exception(JobCrashedError(f"the worker pool broke: {error}"))
        elif isinstance(error, ProcessExpired):
            excess = self._memory.reason(int(error.pid))
            crash = JobMemoryError(excess) if excess else JobCrashedError(self._crash_reason(error))
            future.set_exception(crash)
        elif isinstance(error, TimeoutError) and "Task timeout" in error.args:
            future.set_exception(JobTimeoutError(f"took longer than {timeout_s:g} s"))
        else:
            future.set_exception(error)

    def _worker_pids(self) -> list[int]:
        """Processes that were started, by the logs they opened; some may be gone."""
        with suppress(FileNotFoundError):
            return [int(log.stem) for log in Path(self._logs.name).glob("*.log")]
        return []

    def _crash_reason(self, error: ProcessExpired) -> str:
        code = int(error.exitcode)
        try:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except ValueError:
            how = f"killed by signal {-code}"
        log = Path(self._logs.name, f"{error.pid}.log")
        with suppress(OSError):
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
            last = next((line for line in reversed(lines) if line), "")
            return f"the process died ({how}): {last}" if last else f"the process died ({how})"
        return f"the process died ({how})"


class _Process(SpawnProcess):
    """A spawned process that does not run the caller's script again.

    Workers need nothing of it, it may import torch, and one that lacks the ``__main__`` guard
    would start a tuning run in every worker.
    """

    _main_lock = threading.Lock()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  (multiprocessing's name)
        with _Process._main_lock:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


def _start_worker(log_dir: str, initializer: Callable[[], None] | None) -> None:
    """Makes this process a group of its own that dies with the parent and talks to a file."""
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent_pid = parent.pid

    def parent_ended(*_: object) -> None:
        # Linux sends this when the thread that started us ends, too.
        if os.getppid() != parent_pid:
            _kill_group()

    signal.signal(signal.SIGTERM, lambda *_: _kill_group())
    signal.signal(signal.SIGHUP, parent_ended)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()
    log = os.open(Path(log_dir, f"{os.getpid()}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    if initializer is not None:
        initializer()


def _nothing() -> None:
    """The job that starts a pool."""


def _watch(sentinel: int) -> None:
    """Kills the group once the parent is gone, where the signal's handler never gets to run.

    Python handles signals between two instructions of the main thread, which may sit inside a
    compiler or a driver call for ever.
    """
    connection.wait([sentinel])
    time.sleep(_GRACE_S)
    _kill_group()


def _kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


def _run_job(function: Callable[..., T], args: Any, kwargs: Any) -> T:
    """Runs one job with an empty log, so that a crash is explained by its own last words."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.ftruncate(2, 0)
    try:
        return function(*args, **kwargs)
    except Exception as error:
        # One that cannot be rebuilt in the parent would break the whole pool.
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise
