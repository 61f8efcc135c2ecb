"""Comparative reports: rows, CSV and one self-contained HTML page."""

from __future__ import annotations

from .writer import ReportPaths, write_report

__all__ = ["ReportPaths", "write_report"]
