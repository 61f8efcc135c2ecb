"""Trials and winners in a database; the only folder that imports SQLAlchemy and Alembic."""

from __future__ import annotations

from .records import ImportSummary, StudyRecord, TrialRecord, WinnerRecord
from .store import Store
from .transfer import export_json, import_json

__all__ = [
    "ImportSummary",
    "Store",
    "StudyRecord",
    "TrialRecord",
    "WinnerRecord",
    "export_json",
    "import_json",
]
