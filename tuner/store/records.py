"""What the store hands out: studies, trials and winners as frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ..records import Evaluation, StudyKey

__all__ = ["ImportSummary", "StudyRecord", "TrialRecord", "WinnerRecord"]


@dataclass(frozen=True)
class StudyRecord:
    """One search: trials of equal keys belong to it and are resumed with it."""

    study_id: int
    key: StudyKey
    seed: int
    created_at: datetime
    num_trials: int


@dataclass(frozen=True)
class TrialRecord:
    """One evaluated config, whatever its fate."""

    trial_id: int
    study_id: int
    number: int
    """Order inside the study, from 0."""
    evaluation: Evaluation
    """Times to 1 ns, durations to 1 ms; samples, as float32, are there for finalists only."""
    created_at: datetime


@dataclass(frozen=True)
class WinnerRecord:
    """The decision of one study."""

    winner_id: int
    study: StudyRecord
    trial: TrialRecord
    finals: tuple[int, ...]
    """Ids of the trials that were compared, in final order."""
    decided_at: datetime


@dataclass(frozen=True)
class ImportSummary:
    """What an import added; rows that were there already are not counted."""

    num_studies: int
    num_trials: int
    num_winners: int
