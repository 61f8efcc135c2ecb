"""What the winner of one SKU costs on another: the foreign config against the one tuned there.

Only trials count: where the other SKU's search has no time for the config, nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .comparison import best_us, side_by_side
from .rows import geometric_mean
from .searches import Search
from .wording import iso_time, versions_text

__all__ = ["TransferPairRow", "TransferRow", "transfer_pair_rows", "transfer_rows"]


@dataclass(frozen=True, kw_only=True)
class TransferRow:
    """One problem: the best config of ``from_sku`` in the search on ``sku``."""

    op: str
    problem: str
    policy: str
    from_sku: str
    from_provenance: str
    sku: str
    device: str
    provenance: str
    """Of both times on ``sku``."""
    versions: str
    date: str
    config: str
    """Best on ``from_sku``."""
    status: str
    """How its trial on ``sku`` ended, or ``not tried``."""
    time_us: float | None
    own_time_us: float
    """Of the best config of ``sku``."""
    cost: float | None
    """How many times as long the foreign config takes."""


@dataclass(frozen=True, kw_only=True)
class TransferPairRow:
    """All common problems of two SKUs in a line."""

    op: str
    policy: str
    from_sku: str
    from_provenance: str
    sku: str
    device: str
    provenance: str
    versions: str
    date: str
    num_common: int
    num_timed: int
    """Problems on which the foreign config has a time."""
    num_failed: int
    """Problems on which the foreign config was tried and did not work."""
    geomean_cost: float | None
    largest_cost: float | None


def transfer_rows(searches: Iterable[Search], skus: Sequence[str]) -> Iterator[TransferRow]:
    """Every ordered pair of SKUs on every common problem, by the most trusted searches."""
    for by_sku in side_by_side(searches):
        present = [sku for sku in skus if sku in by_sku]
        for from_sku in present:
            for sku in present:
                if from_sku != sku:
                    yield _transfer(by_sku[from_sku][0], by_sku[sku][0])


def _transfer(source: Search, target: Search) -> TransferRow:
    assert source.best is not None
    config = source.best.evaluation.config
    tried = target.by_config.get(config)
    time_us = tried.evaluation.time_us if tried is not None else None
    own_us = best_us(target)
    problem = target.key.problem
    return TransferRow(
        op=problem.op,
        problem=str(problem),
        policy=str(target.key.policy),
        from_sku=source.sku,
        from_provenance=source.key.provenance.value,
        sku=target.sku,
        device=target.key.device.name,
        provenance=target.key.provenance.value,
        versions=versions_text(target.key.toolchain),
        date=iso_time(target.last_change),
        config=str(config),
        status=tried.evaluation.status.value if tried is not None else "not tried",
        time_us=time_us,
        own_time_us=own_us,
        cost=time_us / own_us if time_us is not None else None,
    )


def transfer_pair_rows(found: Iterable[TransferRow]) -> Iterator[TransferPairRow]:
    """One row an operation, policy and ordered pair of SKUs with their provenances."""
    grouped: dict[tuple[str, ...], list[TransferRow]] = {}
    for row in found:
        place = (
            row.op,
            row.policy,
            row.from_sku,
            row.from_provenance,
            row.sku,
            row.provenance,
        )
        grouped.setdefault(place, []).append(row)
    for (op, policy, from_sku, from_provenance, sku, provenance), group in grouped.items():
        costs = [row.cost for row in group if row.cost is not None]
        yield TransferPairRow(
            op=op,
            policy=policy,
            from_sku=from_sku,
            from_provenance=from_provenance,
            sku=sku,
            device=group[0].device,
            provenance=provenance,
            versions="; ".join(dict.fromkeys(row.versions for row in group)),
            date=max(row.date for row in group),
            num_common=len(group),
            num_timed=len(costs),
            num_failed=sum(r.cost is None and r.status != "not tried" for r in group),
            geomean_cost=geometric_mean(costs) if costs else None,
            largest_cost=max(costs, default=None),
        )
