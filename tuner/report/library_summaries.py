"""Other libraries in a line each: against ours on one SKU, and on one SKU against another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .baseline_rows import BaselineRow, LibraryRow
from .rows import Origin, geometric_mean

__all__ = [
    "BaselineSummaryRow",
    "LibrarySummaryRow",
    "baseline_summary_rows",
    "library_summary_rows",
]


@dataclass(frozen=True, kw_only=True)
class BaselineSummaryRow(Origin):
    """All problems on which one library and ours have a time on one SKU, in a line."""

    op: str
    library: str
    library_versions: str
    compared: str
    """What the ratios rest on: provenances, and policies where they differ."""
    num_problems: int
    num_faster: int
    """Problems on which ours is faster."""
    geomean_speedup: float
    """How many times as fast ours is."""
    smallest_speedup: float
    largest_speedup: float


@dataclass(frozen=True, kw_only=True)
class LibrarySummaryRow:
    """All problems of one library on two SKUs in a line."""

    op: str
    library: str
    base_sku: str
    sku: str
    device: str
    provenance: str
    """Of the ratios."""
    policy: str
    num_problems: int
    geomean_ratio: float
    smallest_ratio: float
    largest_ratio: float
    bandwidth_ratio: float
    peak_ratio: float
    geomean_roofline_ratio: float
    base_library_versions: str
    library_versions: str
    versions: str
    date: str


def baseline_summary_rows(found: Iterable[BaselineRow]) -> Iterator[BaselineSummaryRow]:
    """One row a SKU, operation, library and kind of comparison; those without a time of ours none.

    A problem counts once: with the fastest of the library's times of the same kind.
    """
    grouped: dict[tuple[str, ...], dict[str, BaselineRow]] = {}
    for row in found:
        if row.speedup is not None:
            place = (row.sku, row.op, row.library, row.compared, row.policy)
            by_problem = grouped.setdefault(place, {})
            known = by_problem.get(row.problem)
            if known is None or row.time_us < known.time_us:
                by_problem[row.problem] = row
    for (sku, op, library, compared, policy), by_problem in grouped.items():
        group = list(by_problem.values())
        speedups = [row.speedup for row in group if row.speedup is not None]
        yield BaselineSummaryRow(
            sku=sku,
            device=group[0].device,
            provenance=group[0].provenance,
            policy=policy,
            versions=_listed(row.versions for row in group),
            date=max(row.date for row in group),
            op=op,
            library=library,
            library_versions=_listed(row.library_version for row in group),
            compared=compared,
            num_problems=len(group),
            num_faster=sum(speedup > 1 for speedup in speedups),
            geomean_speedup=geometric_mean(speedups),
            smallest_speedup=min(speedups),
            largest_speedup=max(speedups),
        )


def library_summary_rows(found: Iterable[LibraryRow]) -> Iterator[LibrarySummaryRow]:
    """One row an operation, library, pair of SKUs, provenance and policy."""
    grouped: dict[tuple[str, ...], list[LibraryRow]] = {}
    for row in found:
        place = (row.op, row.library, row.base_sku, row.sku, row.ratio_provenance, row.policy)
        grouped.setdefault(place, []).append(row)
    for (op, library, base_sku, sku, provenance, policy), group in grouped.items():
        ratios = [row.ratio for row in group]
        yield LibrarySummaryRow(
            op=op,
            library=library,
            base_sku=base_sku,
            sku=sku,
            device=group[0].device,
            provenance=provenance,
            policy=policy,
            num_problems=len(group),
            geomean_ratio=geometric_mean(ratios),
            smallest_ratio=min(ratios),
            largest_ratio=max(ratios),
            bandwidth_ratio=group[0].bandwidth_ratio,
            peak_ratio=group[0].peak_ratio,
            geomean_roofline_ratio=geometric_mean([row.roofline_ratio for row in group]),
            base_library_versions=_listed(row.base_version for row in group),
            library_versions=_listed(row.library_version for row in group),
            versions=_listed(row.versions for row in group),
            date=max(row.date for row in group),
        )


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))
