"""What a run tells while it goes on: an interface, and the one that writes to the log."""

from __future__ import annotations

import logging
from typing import Protocol

from ..kernels.base import Problem
from .store.records import TrialRecord, WinnerRecord

__all__ = ["LoggingListener", "ProgressListener"]

_LOG = logging.getLogger(__name__)


class ProgressListener(Protocol):
    """Follows a run, study by study."""

    def study_started(self, label: str, sku: str, problem: Problem, total: int) -> None:
        """A study of ``total`` trials begins or resumes."""

    def trial_ended(self, record: TrialRecord, best_us: float | None, is_new: bool) -> None:
        """A trial is in the store; ``is_new`` is false for those that an earlier run left.

        ``best_us`` is the best time of the study so far.
        """

    def study_ended(self, winner: WinnerRecord | None) -> None:
        """The study is decided; None where no config worked."""


class LoggingListener:
    """Writes one line a study at level INFO and one a trial at level DEBUG."""

    def __init__(self) -> None:
        self._name = ""

    def study_started(self, label: str, sku: str, problem: Problem, total: int) -> None:
        """See ``ProgressListener``."""
        self._name = f"{label} on {sku}"
        _LOG.info("%s: searching %s, %d trials", self._name, problem, total)

    def trial_ended(self, record: TrialRecord, best_us: float | None, is_new: bool) -> None:
        """See ``ProgressListener``."""
        evaluation = record.evaluation
        best = "none" if best_us is None else f"{best_us:.2f} us"
        _LOG.debug(
            "%s: trial %d %s%s, best %s: %s",
            self._name,
            record.number,
            evaluation.status.value,
            f" ({evaluation.reason})" if evaluation.reason else "",
            best,
            evaluation.config,
        )

    def study_ended(self, winner: WinnerRecord | None) -> None:
        """See ``ProgressListener``."""
        if winner is None:
            _LOG.warning("%s: no config worked", self._name)
            return
        evaluation = winner.trial.evaluation
        _LOG.info("%s: %.2f us with %s", self._name, evaluation.time_us or 0.0, evaluation.config)
