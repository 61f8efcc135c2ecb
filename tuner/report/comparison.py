"""The same problem on several SKUs, side by side.

A ratio always says what provenance its two times have; a problem is compared under one policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..prediction.roofline import peak_flops_per_us, roofline_us
from .baselines import TRUST, mixture
from .searches import Search
from .wording import changed_parameters, iso_time, versions_text

__all__ = ["ComparisonRow", "best_us", "compared_pairs", "comparison_rows", "side_by_side"]


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """The best of one problem on two SKUs."""

    op: str
    problem: str
    policy: str
    base_sku: str
    base_device: str
    sku: str
    device: str
    base_time_us: float
    base_provenance: str
    time_us: float
    provenance: str
    speedup: float
    """How many times as fast ``sku`` is as ``base_sku``."""
    speedup_provenance: str
    bandwidth_ratio: float
    """Peak bandwidth of ``sku`` over that of ``base_sku``."""
    peak_ratio: float
    """The same of the peak rates for the problem's operands."""
    roofline_ratio: float
    """What the rooflines alone would give."""
    speedup_over_bandwidth_ratio: float
    base_share_of_roofline: float
    share_of_roofline: float
    changed_parameters: str
    base_config: str
    config: str
    base_state: str
    state: str
    base_versions: str
    versions: str
    base_date: str
    date: str


def side_by_side(searches: Iterable[Search]) -> list[dict[str, list[Search]]]:
    """The searches by SKU of each problem and policy timed on several, most trusted first."""
    grouped: dict[tuple[object, ...], dict[str, list[Search]]] = {}
    for search in searches:
        if search.best is not None:
            place = grouped.setdefault((search.key.problem, search.key.policy), {})
            place.setdefault(search.sku, []).append(search)
    common = [by_sku for by_sku in grouped.values() if len(by_sku) > 1]
    for by_sku in common:
        for found in by_sku.values():
            found.sort(key=lambda search: TRUST.index(search.key.provenance))
    return common


def compared_pairs(
    searches: Iterable[Search], skus: Sequence[str]
) -> Iterator[tuple[Search, Search]]:
    """Each SKU's search behind the one it is compared with, of the first SKU with the problem.

    Like is compared with like: a time is set against one of its own provenance where there is
    one, else against the base's most trusted.
    """
    for by_sku in side_by_side(searches):
        base_sku, *others = [sku for sku in skus if sku in by_sku]
        for sku in others:
            for search in by_sku[sku]:
                yield _counterpart(by_sku[base_sku], search), search


def comparison_rows(searches: Iterable[Search], skus: Sequence[str]) -> Iterator[ComparisonRow]:
    """Every compared pair; a row says so where provenances are mixed."""
    for base, other in compared_pairs(searches, skus):
        yield _compare(base, other)


def _counterpart(candidates: Sequence[Search], search: Search) -> Search:
    same = (c for c in candidates if c.key.provenance is search.key.provenance)
    return next(same, candidates[0])


def _compare(base: Search, other: Search) -> ComparisonRow:
    problem = other.key.problem
    base_device, device = base.key.device, other.key.device
    base_us, time_us = best_us(base), best_us(other)
    base_bound, bound = roofline_us(problem, base_device), roofline_us(problem, device)
    speedup = base_us / time_us
    dtype = problem.compute_dtype
    bandwidth_ratio = device.bandwidth_gbps / base_device.bandwidth_gbps
    assert base.best is not None
    assert other.best is not None
    return ComparisonRow(
        op=problem.op,
        problem=str(problem),
        policy=str(other.key.policy),
        base_sku=base.sku,
        base_device=base_device.name,
        sku=other.sku,
        device=device.name,
        base_time_us=base_us,
        base_provenance=base.key.provenance.value,
        time_us=time_us,
        provenance=other.key.provenance.value,
        speedup=speedup,
        speedup_provenance=mixture(base.key.provenance, other.key.provenance),
        bandwidth_ratio=bandwidth_ratio,
        peak_ratio=peak_flops_per_us(device, dtype) / peak_flops_per_us(base_device, dtype),
        roofline_ratio=base_bound / bound,
        speedup_over_bandwidth_ratio=speedup / bandwidth_ratio,
        base_share_of_roofline=base_bound / base_us,
        share_of_roofline=bound / time_us,
        changed_parameters=changed_parameters(
            base.best.evaluation.config, other.best.evaluation.config
        ),
        base_config=str(base.best.evaluation.config),
        config=str(other.best.evaluation.config),
        base_state=base.state,
        state=other.state,
        base_versions=versions_text(base.key.toolchain),
        versions=versions_text(other.key.toolchain),
        base_date=iso_time(base.last_change),
        date=iso_time(other.last_change),
    )


def best_us(search: Search) -> float:
    """Time of the best config of a search that has one."""
    assert search.best is not None
    time_us = search.best.evaluation.time_us
    assert time_us is not None
    return time_us
