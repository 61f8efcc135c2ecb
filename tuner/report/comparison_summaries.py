"""Two SKUs over all their common problems: how much faster, and what changed in the winners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .baselines import mixture
from .comparison import ComparisonRow, compared_pairs
from .rows import geometric_mean
from .searches import Search
from .wording import iso_time, parameter_changes, versions_text

__all__ = [
    "ComparisonSummaryRow",
    "ParameterChangeRow",
    "comparison_summary_rows",
    "parameter_change_rows",
]

NUM_CHANGES = 4
"""How many changes of a parameter are told, the commonest first."""


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Which SKUs and figures a line speaks of."""

    op: str
    policy: str
    base_sku: str
    sku: str
    device: str
    provenance: str
    """Of the ratios: mixed where the two times differ in theirs."""
    versions: str
    date: str
    num_problems: int


@dataclass(frozen=True, kw_only=True)
class ComparisonSummaryRow(_Pair):
    """All common problems of an operation on two SKUs in a line."""

    geomean_speedup: float
    """How many times as fast ``sku`` is as ``base_sku``."""
    smallest_speedup: float
    largest_speedup: float
    bandwidth_ratio: float
    peak_ratio: float
    geomean_roofline_ratio: float
    """What the rooflines alone would give."""
    num_same_config: int
    """Problems with the same winner on both."""


@dataclass(frozen=True, kw_only=True)
class ParameterChangeRow(_Pair):
    """One parameter of the winners of an operation on two SKUs."""

    parameter: str
    num_changed: int
    share_changed: float
    changes: str
    """The commonest changes, from ``base_sku`` to ``sku``, with their counts."""


def comparison_summary_rows(found: Iterable[ComparisonRow]) -> Iterator[ComparisonSummaryRow]:
    """One row an operation, policy, pair of SKUs and provenance of the ratios."""
    grouped: dict[tuple[str, ...], list[ComparisonRow]] = {}
    for row in found:
        place = (row.op, row.policy, row.base_sku, row.sku, row.speedup_provenance)
        grouped.setdefault(place, []).append(row)
    for (op, policy, base_sku, sku, provenance), group in grouped.items():
        speedups = [row.speedup for row in group]
        yield ComparisonSummaryRow(
            op=op,
            policy=policy,
            base_sku=base_sku,
            sku=sku,
            device=group[0].device,
            provenance=provenance,
            versions="; ".join(dict.fromkeys(row.versions for row in group)),
            date=max(row.date for row in group),
            num_problems=len(group),
            geomean_speedup=geometric_mean(speedups),
            smallest_speedup=min(speedups),
            largest_speedup=max(speedups),
            bandwidth_ratio=group[0].bandwidth_ratio,
            peak_ratio=geometric_mean([row.peak_ratio for row in group]),
            geomean_roofline_ratio=geometric_mean([row.roofline_ratio for row in group]),
            num_same_config=sum(row.base_config == row.config for row in group),
        )


def parameter_change_rows(
    searches: Iterable[Search], skus: Sequence[str]
) -> Iterator[ParameterChangeRow]:
    """One row a parameter that some winner changed, the most often changed first."""
    grouped: dict[tuple[str, ...], list[tuple[Search, Search]]] = {}
    for base, other in compared_pairs(searches, skus):
        key = other.key
        provenance = mixture(base.key.provenance, key.provenance)
        place = (key.problem.op, str(key.policy), base.sku, other.sku, provenance)
        grouped.setdefault(place, []).append((base, other))
    for (op, policy, base_sku, sku, provenance), pairs in grouped.items():
        others = [other for _, other in pairs]
        for parameter, changes in _changes(pairs):
            num_changed = changes.total()
            yield ParameterChangeRow(
                op=op,
                policy=policy,
                base_sku=base_sku,
                sku=sku,
                device=others[0].key.device.name,
                provenance=provenance,
                versions="; ".join(dict.fromkeys(versions_text(o.key.toolchain) for o in others)),
                date=iso_time(max(other.last_change for other in others)),
                num_problems=len(pairs),
                parameter=parameter,
                num_changed=num_changed,
                share_changed=num_changed / len(pairs),
                changes=_told(changes),
            )


def _changes(pairs: Iterable[tuple[Search, Search]]) -> list[tuple[str, Counter[str]]]:
    """The changes of each parameter with their counts, the most often changed first."""
    found: dict[str, Counter[str]] = {}
    for base, other in pairs:
        assert base.best is not None
        assert other.best is not None
        changes = parameter_changes(base.best.evaluation.config, other.best.evaluation.config)
        for name, change in changes.items():
            found.setdefault(name, Counter())[change] += 1
    return sorted(found.items(), key=lambda item: (-item[1].total(), item[0]))


def _told(changes: Counter[str]) -> str:
    told = [f"{change} ({count})" for change, count in changes.most_common(NUM_CHANGES)]
    untold = len(changes) - len(told)
    return ", ".join(told) + (f", {untold} others" if untold > 0 else "")
