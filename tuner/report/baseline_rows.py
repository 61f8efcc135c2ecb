"""Other libraries in rows: beside our winners, and on one SKU against another.

The same library on two SKUs compares the SKUs even where nothing of ours was timed on either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...kernels.base import Problem
from ..prediction.roofline import peak_flops_per_us, roofline_us
from .baselines import TRUST, Baseline, mixture
from .rows import Origin
from .searches import Search
from .wording import iso_time, versions_text

__all__ = [
    "BaselineRow",
    "LibraryRow",
    "baseline_rows",
    "library_rows",
]


@dataclass(frozen=True, kw_only=True)
class BaselineRow(Origin):
    """One library's time and, where there is one, ours for the same problem on the same SKU."""

    op: str
    problem: str
    library: str
    library_version: str
    conditions: str
    source: str
    time_us: float
    achieved_gbps: float
    share_of_roofline: float
    our_time_us: float | None
    our_provenance: str | None
    our_policy: str | None
    our_template: str | None
    speedup: float | None
    """How many times as fast ours is."""
    compared: str
    """What the ratio rests on: provenances, and policies where they differ."""


@dataclass(frozen=True, kw_only=True)
class LibraryRow(Origin):
    """One library on one problem on two SKUs."""

    op: str
    problem: str
    library: str
    base_sku: str
    base_time_us: float
    base_provenance: str
    base_version: str
    library_version: str
    time_us: float
    ratio: float
    """How many times as fast ``sku`` is as ``base_sku``."""
    ratio_provenance: str
    bandwidth_ratio: float
    peak_ratio: float
    roofline_ratio: float
    base_source: str
    source: str


def baseline_rows(
    baselines: Iterable[Baseline], searches: Sequence[Search]
) -> Iterator[BaselineRow]:
    """Every baseline, beside our best for the same problem on the same SKU.

    Those that have one come first.
    """
    ours: dict[tuple[Problem, str], list[Search]] = {}
    for search in searches:
        if search.best is not None:
            ours.setdefault((search.key.problem, search.sku), []).append(search)
    found = [_beside(b, ours.get((b.key.problem, b.sku), [])) for b in baselines]
    yield from sorted(found, key=lambda row: row.our_time_us is None)


def _origin(baseline: Baseline) -> dict[str, str]:
    key = baseline.key
    return {
        "sku": baseline.sku,
        "device": key.device.name,
        "provenance": key.provenance.value,
        "policy": str(key.policy),
        "versions": versions_text(key.toolchain),
        "date": iso_time(baseline.trial.created_at),
    }


def _beside(baseline: Baseline, candidates: Sequence[Search]) -> BaselineRow:
    key = baseline.key
    search = min(
        candidates,
        key=lambda s: (s.key.policy != key.policy, TRUST.index(s.key.provenance)),
        default=None,
    )
    best = search.best.evaluation if search is not None and search.best is not None else None
    our_us = best.time_us if best is not None else None
    return BaselineRow(
        **_origin(baseline),
        op=key.problem.op,
        problem=str(key.problem),
        library=baseline.name,
        library_version=baseline.said("version"),
        conditions=baseline.said("conditions"),
        source=baseline.source,
        time_us=baseline.time_us,
        achieved_gbps=key.problem.bytes_moved / 1e3 / baseline.time_us,
        share_of_roofline=roofline_us(key.problem, key.device) / baseline.time_us,
        our_time_us=our_us,
        our_provenance=search.key.provenance.value if search else None,
        our_policy=str(search.key.policy) if search else None,
        our_template=best.config.template if best else None,
        speedup=baseline.time_us / our_us if our_us else None,
        compared=_compared(baseline, search) if search else "nothing of ours",
    )


def _compared(baseline: Baseline, search: Search) -> str:
    text = mixture(baseline.key.provenance, search.key.provenance)
    theirs, ours = baseline.key.policy, search.key.policy
    return text if theirs == ours else f"{text}; policies differ: {theirs} / {ours}"


def library_rows(baselines: Iterable[Baseline], skus: Sequence[str]) -> Iterator[LibraryRow]:
    """Each SKU against the first of ``skus`` that has the same library on the same problem.

    A time is set against one of its own provenance and policy where there is one; under another
    policy it is not compared.
    """
    grouped: dict[tuple[object, ...], dict[str, list[Baseline]]] = {}
    for baseline in baselines:
        place = (baseline.key.problem, baseline.name, baseline.key.policy)
        grouped.setdefault(place, {}).setdefault(baseline.sku, []).append(baseline)
    for by_sku in grouped.values():
        base_sku, *others = [sku for sku in skus if sku in by_sku]
        for sku in others:
            fastest = min(by_sku[sku], key=_preference)
            yield _across(_counterpart(by_sku[base_sku], fastest), fastest)


def _preference(baseline: Baseline) -> tuple[int, float]:
    return TRUST.index(baseline.key.provenance), baseline.time_us


def _counterpart(candidates: Sequence[Baseline], other: Baseline) -> Baseline:
    same = [c for c in candidates if c.key.provenance is other.key.provenance]
    return min(same or candidates, key=_preference)


def _across(base: Baseline, other: Baseline) -> LibraryRow:
    problem, here, there = other.key.problem, other.key.device, base.key.device
    dtype = problem.compute_dtype
    return LibraryRow(
        **_origin(other),
        op=problem.op,
        problem=str(problem),
        library=other.name,
        base_sku=base.sku,
        base_time_us=base.time_us,
        base_provenance=base.key.provenance.value,
        base_version=base.said("version"),
        library_version=other.said("version"),
        time_us=other.time_us,
        ratio=base.time_us / other.time_us,
        ratio_provenance=mixture(base.key.provenance, other.key.provenance),
        bandwidth_ratio=here.bandwidth_gbps / there.bandwidth_gbps,
        peak_ratio=peak_flops_per_us(here, dtype) / peak_flops_per_us(there, dtype),
        roofline_ratio=roofline_us(problem, there) / roofline_us(problem, here),
        base_source=base.source,
        source=other.source,
    )
