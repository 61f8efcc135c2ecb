"""Two sets of results against each other: what a driver, a compiler or a change of ours did.

Searches are paired by problem, SKU, provenance and policy. A measured time has changed where the
95% intervals of both medians are apart; a predicted one has no noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Literal

from ...errors import UsageError
from ...kernels.base import Problem
from ..records import Provenance, Timing, TrialStatus
from .rows import num_samples
from .searches import Search, load_searches, resolve_skus, shown
from .wording import (
    SAME_CONFIG,
    changed_parameters,
    common_fields,
    iso_time,
    problem_text,
    versions_text,
)

if TYPE_CHECKING:
    from ..store import Store

__all__ = ["ChangeRow", "Changes", "Selection", "StoppedRow", "compare_results"]

Verdict = Literal[
    "faster",
    "slower",
    "within noise",
    "noise unknown",
    "no longer works",
    "works now",
    "nothing works",
    "only before",
    "only after",
]
_PARTS = ("triton", "tilelang", "torch", "cuda", "driver")
_DATES = ("since", "until")
_RIGHT = (TrialStatus.OK, TrialStatus.PRUNED)


@dataclass(frozen=True)
class Selection:
    """Which searches of a database take part: those that meet every condition."""

    conditions: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Selection:
        """``triton=3.9.0``, ``driver=580.95``, ``since=2026-11-30`` and so on.

        Raises:
            UsageError: another name, or a date that is none.
        """
        conditions = []
        for text in texts:
            name, sign, value = text.partition("=")
            if not sign or not value or name not in (*_PARTS, *_DATES):
                allowed = ", ".join((*_PARTS, *_DATES))
                raise UsageError(f"{text!r} is no condition: write NAME=VALUE, NAME of {allowed}")
            if name in _DATES:
                _day(value)
            conditions.append((name, value))
        return cls(tuple(conditions))

    def takes(self, search: Search) -> bool:
        """Whether the search meets the conditions; dates are of its last change, inclusive."""
        versions = search.key.toolchain.as_dict()
        changed = search.last_change.date()
        for name, value in self.conditions:
            if name == "since" and changed < _day(value):
                return False
            if name == "until" and changed > _day(value):
                return False
            if name in versions and versions[name] != value:
                return False
        return True


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is no date: write it as 2026-11-30") from None


@dataclass(frozen=True, kw_only=True)
class ChangeRow:
    """One problem on one SKU, before and after."""

    op: str
    problem: str
    name: str
    """The problem without what all share and what is at its default."""
    sku: str
    provenance: str
    policy: str
    verdict: Verdict
    base_time_us: float | None
    time_us: float | None
    change_percent: float | None
    """Of the time: above 0 it takes longer."""
    same_config_percent: float | None
    """The same for the config that won before, where it was timed again."""
    winner: str
    """What changed in the winner; ``same config`` where nothing did."""
    num_stopped: int
    """Configs that worked before and do not any more."""
    base_versions: str
    versions: str
    base_date: str
    date: str


@dataclass(frozen=True, kw_only=True)
class StoppedRow:
    """A config that worked before and does not any more."""

    op: str
    problem: str
    name: str
    sku: str
    template: str
    config: str
    was_winner: bool
    status: str
    reason: str


@dataclass(frozen=True)
class Changes:
    """All differences."""

    rows: tuple[ChangeRow, ...]
    stopped: tuple[StoppedRow, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Number of problems by verdict, with another winner, and of configs that stopped."""
        found: dict[str, int] = {}
        for row in self.rows:
            found[row.verdict] = found.get(row.verdict, 0) + 1
        others = sum(row.winner not in ("", SAME_CONFIG) for row in self.rows)
        return {
            **found,
            "another winner": others,
            "configs that stopped working": len(self.stopped),
        }

    @property
    def telling(self) -> tuple[ChangeRow, ...]:
        """The rows that say more than that nothing happened."""
        return tuple(
            row
            for row in self.rows
            if row.verdict != "within noise" or row.winner != SAME_CONFIG or row.num_stopped
        )

    def failures(self, percent: float) -> tuple[ChangeRow, ...]:
        """What a guard refuses: times longer by more than that beyond the noise, and lost ones."""
        return tuple(
            row
            for row in self.rows
            if row.verdict == "no longer works"
            or (row.verdict == "slower" and (row.change_percent or 0.0) > percent)
        )


def compare_results(
    base: Store,
    other: Store,
    *,
    gpus: Sequence[str] | None = None,
    op: str | None = None,
    base_selection: Selection = Selection(),
    selection: Selection = Selection(),
) -> Changes:
    """What differs between the searches of two databases, or of one under two selections.

    Args:
        base: how it was.
        other: how it is.
        gpus: only these SKUs; None for all.
        op: only this operation; None for all.
        base_selection: which searches of ``base`` take part.
        selection: which searches of ``other`` take part.

    Raises:
        UsageError: no problem has results on both sides.
    """
    skus = resolve_skus([base, other], gpus)
    before = _selected(base, skus, op, base_selection)
    after = _selected(other, skus, op, selection)
    if not before.keys() & after.keys():
        present = sorted({search.key.problem.op for search in load_searches([base, other], skus)})
        if op is not None and op not in present:
            known = ", ".join(present) or "none"
            raise UsageError(f"{base} and {other} have no results of op={op!r}; they have: {known}")
        raise UsageError(
            f"{base} ({len(before)} results) and {other} ({len(after)} results) have no problem in "
            "common on the same SKU, provenance and policy: there is nothing to compare"
        )
    places = dict.fromkeys([*before, *after])
    names = _names([*before.values(), *after.values()])
    rows = [_change(before.get(place), after.get(place), names) for place in places]
    pairs = [
        (before[place], after[place]) for place in places if place in before and place in after
    ]
    return Changes(
        tuple(sorted(rows, key=_urgency)),
        tuple(row for pair in pairs for row in _stopped(*pair, names)),
    )


def _urgency(row: ChangeRow) -> tuple[bool, float]:
    """What got lost first, then what got slower."""
    return row.verdict != "no longer works", -(row.change_percent or 0.0)


def _names(searches: Iterable[Search]) -> Mapping[Problem, str]:
    by_op: dict[str, dict[Problem, None]] = {}
    for search in searches:
        by_op.setdefault(search.key.problem.op, {})[search.key.problem] = None
    shared = {op: common_fields(problems) for op, problems in by_op.items()}
    return {p: problem_text(p, shared[op]) for op, problems in by_op.items() for p in problems}


def _selected(
    store: Store, skus: Sequence[str] | None, op: str | None, selection: Selection
) -> dict[tuple[object, ...], Search]:
    found = [
        search
        for search in load_searches([store], skus)
        if op in (None, search.key.problem.op) and selection.takes(search)
    ]
    return {(s.key.problem, s.sku, s.key.provenance, s.key.policy): s for s in shown(found)}


def _change(before: Search | None, after: Search | None, names: Mapping[Problem, str]) -> ChangeRow:
    present = after or before
    assert present is not None
    key = present.key
    base_us, time_us = _time_us(before), _time_us(after)
    return ChangeRow(
        op=key.problem.op,
        problem=str(key.problem),
        name=names[key.problem],
        sku=present.sku,
        provenance=key.provenance.value,
        policy=str(key.policy),
        verdict=_verdict(before, after),
        base_time_us=base_us,
        time_us=time_us,
        change_percent=_percent(base_us, time_us),
        same_config_percent=_percent(base_us, _same_config_us(before, after)),
        winner=_winner_text(before, after),
        num_stopped=sum(1 for _ in _stopped(before, after, names)) if before and after else 0,
        base_versions=versions_text(before.key.toolchain) if before else "",
        versions=versions_text(after.key.toolchain) if after else "",
        base_date=iso_time(before.last_change) if before else "",
        date=iso_time(after.last_change) if after else "",
    )


def _verdict(before: Search | None, after: Search | None) -> Verdict:
    if before is None or after is None:
        return "only after" if before is None else "only before"
    old, new = _timing(before), _timing(after)
    if old is None or new is None:
        if old is None and new is None:
            return "nothing works"
        return "no longer works" if new is None else "works now"
    if before.key.provenance is Provenance.MEASURED and not (num_samples(old) and num_samples(new)):
        return "noise unknown"
    if new.ci_low_us > old.ci_high_us:
        return "slower"
    return "faster" if new.ci_high_us < old.ci_low_us else "within noise"


def _timing(search: Search | None) -> Timing | None:
    return search.best.evaluation.timing if search is not None and search.best else None


def _time_us(search: Search | None) -> float | None:
    timing = _timing(search)
    return timing.median_us if timing else None


def _same_config_us(before: Search | None, after: Search | None) -> float | None:
    if before is None or before.best is None or after is None:
        return None
    again = after.by_config.get(before.best.evaluation.config)
    return again.evaluation.time_us if again is not None else None


def _percent(base_us: float | None, time_us: float | None) -> float | None:
    return 100.0 * (time_us / base_us - 1.0) if base_us and time_us else None


def _winner_text(before: Search | None, after: Search | None) -> str:
    if before is None or after is None or before.best is None or after.best is None:
        return ""
    return changed_parameters(before.best.evaluation.config, after.best.evaluation.config)


def _stopped(before: Search, after: Search, names: Mapping[Problem, str]) -> Iterator[StoppedRow]:
    best = before.best.evaluation.config if before.best is not None else None
    for config, old in before.by_config.items():
        new = after.by_config.get(config)
        if new is None or old.evaluation.status not in _RIGHT:
            continue
        if new.evaluation.status not in _RIGHT:
            yield StoppedRow(
                op=before.key.problem.op,
                problem=str(before.key.problem),
                name=names[before.key.problem],
                sku=before.sku,
                template=config.template,
                config=str(config),
                was_winner=config == best,
                status=new.evaluation.status.value,
                reason=new.evaluation.reason,
            )
