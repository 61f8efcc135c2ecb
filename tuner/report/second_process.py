"""A second process that draws and weighs parameters while this one reads and writes tables.

Only for reports of many trials: starting it takes longer than a small report.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Generic, Self, TypeVar

from ..process_pool import JobCrashedError, WorkerPool
from ..search.importance import preload

__all__ = ["MIN_TRIALS", "Pending", "SecondProcess"]

MIN_TRIALS = 20_000
"""Of a report that is worth a second process: its start takes as long as a tenth of them."""

_Result = TypeVar("_Result")


class Pending(Generic[_Result]):
    """A result that is being worked out elsewhere, or will be here when it is asked for."""

    def __init__(self, work: Callable[[], _Result], elsewhere: Future[_Result] | None) -> None:
        self._work = work
        self._elsewhere = elsewhere

    def result(self) -> _Result:
        """The result, or what the work raised."""
        if self._elsewhere is None:
            return self._work()
        try:
            return self._elsewhere.result()
        except (JobCrashedError, CancelledError):
            return self._work()


class SecondProcess:
    """Works out results in another process, or here where there is none; a context manager."""

    def __init__(self, num_trials: int = 0) -> None:
        """Starts a process for a report of that many trials where that saves time."""
        self._pool: WorkerPool | None = None
        if num_trials >= MIN_TRIALS and len(os.sched_getaffinity(0)) > 1:
            self._pool = WorkerPool(1, initializer=_import_libraries)
            self._pool.start()

    def submit(self, function: Callable[..., _Result], *args: object) -> Pending[_Result]:
        """What ``function(*args)`` returns; everything pickles."""
        elsewhere = self._pool.submit(None, function, *args) if self._pool is not None else None
        return Pending(lambda: function(*args), elsewhere)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.close()


def _import_libraries() -> None:
    """Imports what the work needs while the tables are still being read."""
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_svg  # noqa: F401

    preload()
