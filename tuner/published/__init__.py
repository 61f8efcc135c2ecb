"""Times of other libraries: tables of results, read into the database as baselines."""

from __future__ import annotations

from .importing import PublishedSummary, import_published

__all__ = ["PublishedSummary", "import_published"]
