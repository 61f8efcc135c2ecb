"""Comparative reports: rows, CSV and one self-contained HTML page."""

from __future__ import annotations

from .writer import NUM_PLOTS, ReportPaths, write_report

__all__ = ["NUM_PLOTS", "ReportPaths", "write_report"]
