"""Shows a running search on standard error: a bar in a terminal, a line a study elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from ..kernels.base import Problem
from .store.records import TrialRecord, WinnerRecord

__all__ = ["ProgressBar"]


class ProgressBar:
    """A ``ProgressListener`` and context manager; one bar for the study that runs.

    Standard output stays free for data.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            redirect_stdout=False,
        )
        self._task: TaskID | None = None
        self._label = ""
        self._total = 0
        self._num_ended = 0
        self._num_new = 0
        self._best_us: float | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def study_started(self, label: str, sku: str, problem: Problem, total: int) -> None:
        """Puts up a bar of ``total`` trials."""
        del problem
        self._label = f"{label} on {sku}"
        self._total = total
        self._num_ended, self._num_new, self._best_us = 0, 0, None
        self._task = self._progress.add_task(self._label, total=total, best="")
        if not self._console.is_terminal:
            self._console.print(f"{self._label}: {_trials(total)}", soft_wrap=True)

    def trial_ended(self, record: TrialRecord, best_us: float | None, is_new: bool) -> None:
        """Moves the bar on; a trial of an earlier run counts as done."""
        del record
        self._num_ended += 1
        self._num_new += is_new
        self._best_us = best_us
        if self._task is not None:
            best = "" if best_us is None else f"best {best_us:.4g} us"
            self._progress.update(self._task, advance=1, best=best)

    def study_ended(self, winner: WinnerRecord | None) -> None:
        """Takes the bar down and leaves one line."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self._console.print(f"{self._label}: {self._outcome(winner)}", soft_wrap=True)

    def _outcome(self, winner: WinnerRecord | None) -> str:
        counts = _trials(self._num_ended)
        if self._num_ended < self._total:
            counts = f"{self._num_ended} of {_trials(self._total)}, run again to go on"
        if self._num_new < self._num_ended:
            counts += f", {self._num_ended - self._num_new} of them from an earlier run"
        if winner is None:
            return f"no winner ({counts})"
        evaluation = winner.trial.evaluation
        time_us = evaluation.time_us
        time = "" if time_us is None else f"{time_us:.4g} us "
        return f"{time}{evaluation.provenance}, {evaluation.config} ({counts})"


def _trials(count: int) -> str:
    return f"{count} trial{'' if count == 1 else 's'}"
