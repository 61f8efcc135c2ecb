"""What the winner of one SKU costs on another: the foreign config against the one tuned there.

Only trials count: measured where there is one, else predicted. Where neither search has a time for
the config, its row says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .comparison import best_us, side_by_side
from .refusals import Refusal, refusal
from .rows import geometric_mean
from .searches import Search
from .wording import iso_time, versions_text

__all__ = [
    "TransferMissingRow",
    "TransferPairRow",
    "TransferRow",
    "transfer_missing_rows",
    "transfer_pair_rows",
    "transfer_rows",
]

NOT_TRIED = "not tried"
NOT_VALID = "not valid"


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Whose winners are carried where."""

    op: str
    policy: str
    from_sku: str
    from_provenance: str
    sku: str
    device: str
    provenance: str
    """Of the times on ``sku``; of both kinds with their counts where there are two."""
    versions: str
    date: str


@dataclass(frozen=True, kw_only=True)
class TransferRow(_Pair):
    """One problem: the best config of ``from_sku`` in the search on ``sku``."""

    problem: str
    config: str
    """Best on ``from_sku``."""
    status: str
    """How its trial on ``sku`` ended, ``not valid`` where there can be none, else ``not tried``."""
    constraint: str | None
    """What refuses it on ``sku``: the name of a constraint, or ``support`` of its template."""
    reason: str | None
    """Why there is no time, where anything is known."""
    time_us: float | None
    own_time_us: float
    """Of the best config of ``sku``."""
    cost: float | None
    """How many times as long the foreign config takes."""


@dataclass(frozen=True, kw_only=True)
class TransferPairRow(_Pair):
    """All common problems of two SKUs in a line."""

    num_common: int
    num_timed: int
    """Problems on which the foreign config has a time."""
    num_failed: int
    """Problems on which the foreign config was tried and did not work."""
    num_not_valid: int
    """Problems on which it cannot run on ``sku``."""
    num_not_tried: int
    geomean_cost: float | None
    largest_cost: float | None


@dataclass(frozen=True, kw_only=True)
class TransferMissingRow(_Pair):
    """Problems without a figure, by what stands in the way."""

    status: str
    constraint: str | None
    num_problems: int
    num_common: int
    reasons: str
    """The commonest with its count."""


def transfer_rows(searches: Iterable[Search], skus: Sequence[str]) -> Iterator[TransferRow]:
    """Every ordered pair of SKUs on every common problem; the winner is the most trusted one's."""
    for by_sku in side_by_side(searches):
        present = [sku for sku in skus if sku in by_sku]
        for from_sku in present:
            for sku in present:
                if from_sku != sku:
                    yield _transfer(by_sku[from_sku][0], by_sku[sku])


def _transfer(source: Search, targets: Sequence[Search]) -> TransferRow:
    """``targets`` are the searches on the other SKU, the most trusted first."""
    assert source.best is not None
    config = source.best.evaluation.config
    tried = [target for target in targets if config in target.by_config]
    timed = [t for t in tried if t.by_config[config].evaluation.time_us is not None]
    target = (timed or tried or list(targets))[0]
    key = target.key
    evaluation = target.by_config[config].evaluation if tried else None
    refused = None if tried else refusal(key.problem, config, key.device)
    time_us = evaluation.time_us if evaluation is not None else None
    own_us = best_us(target)
    untried = Refusal(None, None) if refused is None else refused
    return TransferRow(
        op=key.problem.op,
        problem=str(key.problem),
        policy=str(key.policy),
        from_sku=source.sku,
        from_provenance=source.key.provenance.value,
        sku=target.sku,
        device=key.device.name,
        provenance=key.provenance.value,
        versions=versions_text(key.toolchain),
        date=iso_time(target.last_change),
        config=str(config),
        status=(
            evaluation.status.value
            if evaluation is not None
            else NOT_TRIED
            if refused is None
            else NOT_VALID
        ),
        constraint=untried.constraint,
        reason=evaluation.reason or None if evaluation is not None else untried.reason,
        time_us=time_us,
        own_time_us=own_us,
        cost=time_us / own_us if time_us is not None else None,
    )


def transfer_pair_rows(found: Iterable[TransferRow]) -> Iterator[TransferPairRow]:
    """One row an operation, policy and ordered pair of SKUs."""
    for group in _pairs(found):
        costs = [row.cost for row in group if row.cost is not None]
        untimed = Counter(row.status for row in group if row.cost is None)
        yield TransferPairRow(
            **_about(group),
            num_common=len(group),
            num_timed=len(costs),
            num_failed=untimed.total() - untimed[NOT_VALID] - untimed[NOT_TRIED],
            num_not_valid=untimed[NOT_VALID],
            num_not_tried=untimed[NOT_TRIED],
            geomean_cost=geometric_mean(costs) if costs else None,
            largest_cost=max(costs, default=None),
        )


def transfer_missing_rows(found: Iterable[TransferRow]) -> Iterator[TransferMissingRow]:
    """One row a pair of SKUs and way of having no figure."""
    for group in _pairs(found):
        ways: dict[tuple[str, str | None], list[TransferRow]] = {}
        for row in group:
            if row.cost is None:
                ways.setdefault((row.status, row.constraint), []).append(row)
        for (status, constraint), rows in ways.items():
            reasons = Counter(row.reason or "no reason given" for row in rows)
            if status == NOT_TRIED:
                reasons = Counter({"the search there has no trial of it": len(rows)})
            reason, count = reasons.most_common(1)[0]
            yield TransferMissingRow(
                **_about(rows),
                status=status,
                constraint=constraint,
                num_problems=len(rows),
                num_common=len(group),
                reasons=f"{reason} ({count})",
            )


def _pairs(found: Iterable[TransferRow]) -> Iterator[list[TransferRow]]:
    grouped: dict[tuple[str, ...], list[TransferRow]] = {}
    for row in found:
        place = (row.op, row.policy, row.from_sku, row.from_provenance, row.sku)
        grouped.setdefault(place, []).append(row)
    yield from grouped.values()


def _about(group: Sequence[TransferRow]) -> dict[str, str]:
    """The fields of ``_Pair`` for several problems."""
    first = group[0]
    kinds = Counter(row.provenance for row in group if row.cost is not None)
    provenance = next(iter(kinds), first.provenance)
    if len(kinds) > 1:
        provenance = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    return {
        "op": first.op,
        "policy": first.policy,
        "from_sku": first.from_sku,
        "from_provenance": first.from_provenance,
        "sku": first.sku,
        "device": first.device,
        "provenance": provenance,
        "versions": "; ".join(dict.fromkeys(row.versions for row in group)),
        "date": max(row.date for row in group),
    }
