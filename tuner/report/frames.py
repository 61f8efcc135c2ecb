"""Pandas frames of the rows: the one source of the CSV files, the page and the plots."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import pandas as pd

from . import baseline_rows, evidence, library_summaries, matrices, rows, search_rows, transfer
from .baselines import Baseline
from .binary_comparison import BinaryComparisonRow, binary_comparison_rows
from .comparison import ComparisonRow, comparison_rows
from .comparison_summaries import (
    ComparisonSummaryRow,
    ParameterChangeRow,
    comparison_summary_rows,
    parameter_change_rows,
)
from .searches import Search, ordered_skus, shown
from .second_process import SecondProcess

__all__ = ["ReportFrames", "build_frames", "frame_of"]

_DTYPES = {bool: "boolean", int: "Int64", float: "float64", str: "object"}
"""Nullable where pandas would turn an integer with gaps into a float."""


@dataclass(frozen=True)
class ReportFrames:
    """Every table of a report; a field's name is the name of its CSV file."""

    devices: pd.DataFrame
    summary: pd.DataFrame
    comparison_summary: pd.DataFrame
    libraries_summary: pd.DataFrame
    libraries: pd.DataFrame
    times: pd.DataFrame
    parameter_changes: pd.DataFrame
    comparison: pd.DataFrame
    transfer_matrix: pd.DataFrame
    transfer_summary: pd.DataFrame
    transfer_missing: pd.DataFrame
    transfer: pd.DataFrame
    binary_comparison: pd.DataFrame
    results: pd.DataFrame
    baselines_summary: pd.DataFrame
    baselines: pd.DataFrame
    importance: pd.DataFrame
    best_configs: pd.DataFrame
    accuracy: pd.DataFrame
    progress: pd.DataFrame
    binaries: pd.DataFrame
    searches: pd.DataFrame
    failures: pd.DataFrame

    def named(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Name and frame of each table, in the order of the page."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


def build_frames(
    searches: Sequence[Search],
    skus: Sequence[str] | None = None,
    baselines: Sequence[Baseline] = (),
    second: SecondProcess | None = None,
) -> ReportFrames:
    """All tables of these searches.

    Results, what stands behind them and comparisons speak of one search a problem, SKU, provenance
    and policy; devices, searches, progress and failures of all.

    Args:
        searches: of all SKUs.
        skus: the order of SKUs; None leaves it to the data.
        baselines: other libraries.
        second: a process that takes a share of the work.
    """
    order = ordered_skus(searches, skus, baselines)
    everything = sorted(searches, key=lambda s: order.index(s.sku))
    current = tuple(sorted(shown(searches), key=lambda s: order.index(s.sku)))
    weighings = evidence.started_weighings(current, second or SecondProcess())
    results = [rows.result_row(search) for search in current]
    return ReportFrames(
        results=frame_of(rows.ResultRow, results),
        summary=frame_of(rows.SummaryRow, rows.summary_rows(current, results)),
        **_evidence_frames(current),
        **_comparison_frames(current, order, baselines),
        **_library_frames(current, order, baselines),
        **_search_frames(everything, {search.digest for search in current}),
        importance=frame_of(evidence.ImportanceRow, evidence.importance_rows(weighings)),
    )


def _evidence_frames(current: Sequence[Search]) -> dict[str, pd.DataFrame]:
    accuracy = filter(None, map(evidence.accuracy_row, current))
    return {
        "best_configs": frame_of(
            evidence.BestConfigRow, (r for s in current for r in evidence.best_config_rows(s))
        ),
        "accuracy": frame_of(evidence.AccuracyRow, accuracy),
        "binaries": frame_of(
            search_rows.BinaryRow, (r for s in current for r in search_rows.binary_rows(s))
        ),
    }


def _comparison_frames(
    current: Sequence[Search], order: Sequence[str], baselines: Sequence[Baseline]
) -> dict[str, pd.DataFrame]:
    compared = list(comparison_rows(current, order))
    transfers = list(transfer.transfer_rows(current, order))
    pairs = list(transfer.transfer_pair_rows(transfers))
    return {
        "comparison": frame_of(ComparisonRow, compared),
        "comparison_summary": frame_of(ComparisonSummaryRow, comparison_summary_rows(compared)),
        "parameter_changes": frame_of(ParameterChangeRow, parameter_change_rows(current, order)),
        "binary_comparison": frame_of(BinaryComparisonRow, binary_comparison_rows(current, order)),
        "times": matrices.times_matrix(current, baselines, order),
        "transfer": frame_of(transfer.TransferRow, transfers),
        "transfer_summary": frame_of(transfer.TransferPairRow, pairs),
        "transfer_missing": frame_of(
            transfer.TransferMissingRow, transfer.transfer_missing_rows(transfers)
        ),
        "transfer_matrix": matrices.transfer_matrix(pairs, order),
    }


def _library_frames(
    current: Sequence[Search], order: Sequence[str], baselines: Sequence[Baseline]
) -> dict[str, pd.DataFrame]:
    sorted_baselines = sorted(baselines, key=lambda b: order.index(b.sku))
    beside = list(baseline_rows.baseline_rows(sorted_baselines, current))
    libraries = list(baseline_rows.library_rows(sorted_baselines, order))
    return {
        "baselines": frame_of(baseline_rows.BaselineRow, beside),
        "baselines_summary": frame_of(
            library_summaries.BaselineSummaryRow, library_summaries.baseline_summary_rows(beside)
        ),
        "libraries": frame_of(baseline_rows.LibraryRow, libraries),
        "libraries_summary": frame_of(
            library_summaries.LibrarySummaryRow, library_summaries.library_summary_rows(libraries)
        ),
    }


def _search_frames(
    everything: Sequence[Search], shown_digests: Collection[str]
) -> dict[str, pd.DataFrame]:
    return {
        "devices": frame_of(rows.DeviceRow, rows.device_rows(everything)),
        "searches": frame_of(
            search_rows.SearchRow,
            (search_rows.search_row(s, is_shown=s.digest in shown_digests) for s in everything),
        ),
        "progress": _frame(search_rows.ProgressRow, search_rows.progress_columns(everything)),
        "failures": frame_of(search_rows.FailureRow, search_rows.failure_rows(everything)),
    }


def frame_of(row_type: type[Any], found: Iterable[Any]) -> pd.DataFrame:
    """The rows as a frame whose columns and dtypes are those of ``row_type``, rows or no rows."""
    names = [field.name for field in fields(row_type)]
    values = list(zip(*map(attrgetter(*names), found), strict=True)) or [()] * len(names)
    return _frame(row_type, dict(zip(names, values, strict=True)))


def _frame(row_type: type[Any], columns: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    hints = typing.get_type_hints(row_type)
    names = [field.name for field in fields(row_type)]
    return pd.DataFrame(
        {name: pd.Series(columns[name], dtype=_dtype(hints[name])) for name in names},
        columns=names,
    )


def _dtype(hint: Any) -> str:
    """The dtype for ``int``, ``str | None`` and so on."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return _DTYPES[hint]
