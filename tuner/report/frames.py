"""Pandas frames of the rows: the one source of the CSV files, the page and the plots."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from . import rows
from .comparison import ComparisonRow, comparison_rows
from .searches import Search, ordered_skus, shown

__all__ = ["ReportFrames", "build_frames", "frame_of"]

_DTYPES = {bool: "boolean", int: "Int64", float: "float64", str: "object"}
"""Nullable where pandas would turn an integer with gaps into a float."""


@dataclass(frozen=True)
class ReportFrames:
    """Every table of a report; a field's name is the name of its CSV file."""

    devices: pd.DataFrame
    summary: pd.DataFrame
    results: pd.DataFrame
    comparison: pd.DataFrame
    binaries: pd.DataFrame
    searches: pd.DataFrame
    progress: pd.DataFrame
    failures: pd.DataFrame

    def named(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Name and frame of each table, in the order of the page."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


def build_frames(searches: Sequence[Search], skus: Sequence[str] | None = None) -> ReportFrames:
    """All tables of these searches; ``skus`` gives the order of SKUs, None leaves it to the data.

    Results, comparison and binaries speak of one search a problem, SKU, provenance and policy;
    devices, searches, progress and failures of all.
    """
    order = ordered_skus(searches, skus)
    current = shown(searches)
    shown_digests = {search.key.digest for search in current}
    everything = sorted(searches, key=lambda s: order.index(s.sku))
    current = tuple(sorted(current, key=lambda s: order.index(s.sku)))
    return ReportFrames(
        devices=frame_of(rows.DeviceRow, rows.device_rows(everything)),
        summary=frame_of(rows.SummaryRow, rows.summary_rows(current)),
        results=frame_of(rows.ResultRow, map(rows.result_row, current)),
        comparison=frame_of(ComparisonRow, comparison_rows(current, order)),
        binaries=frame_of(rows.BinaryRow, (r for s in current for r in rows.binary_rows(s))),
        searches=frame_of(
            rows.SearchRow,
            (rows.search_row(s, is_shown=s.key.digest in shown_digests) for s in everything),
        ),
        progress=frame_of(rows.ProgressRow, (r for s in everything for r in rows.progress_rows(s))),
        failures=frame_of(rows.FailureRow, rows.failure_rows(everything)),
    )


def frame_of(row_type: type[Any], found: Iterable[Any]) -> pd.DataFrame:
    """The rows as a frame whose columns and dtypes are those of ``row_type``, rows or no rows."""
    hints = typing.get_type_hints(row_type)
    names = [field.name for field in fields(row_type)]
    listed = list(found)
    return pd.DataFrame(
        {
            name: pd.Series([getattr(row, name) for row in listed], dtype=_dtype(hints[name]))
            for name in names
        },
        columns=names,
    )


def _dtype(hint: Any) -> str:
    """The dtype for ``int``, ``str | None`` and so on."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return _DTYPES[hint]
