"""Puts the times of other libraries into the database, as baselines that no look-up sees.

A baseline is a trial of template ``baseline`` whose config names the library. Its study is never
decided; ``Store.baselines`` hands such studies out, ``Store.studies`` does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...kernels.base import Config
from ..catalog import gpu
from ..prediction.roofline import roofline_us
from ..records import (
    BASELINE_TEMPLATE,
    Evaluation,
    MeasurementPolicy,
    Provenance,
    StudyKey,
    Timing,
    TrialStatus,
)
from .conditions import policy_of
from .dialect import dialect
from .table import TableRow, read_table

if TYPE_CHECKING:
    from ..store import Store
    from ..store.records import TrialRecord

__all__ = ["PublishedSummary", "Refusal", "import_published"]

LEAST_SHARE_OF_ROOFLINE_TIME = 0.05
"""A time below this share of what the device's peaks allow has the wrong unit: data that stays in
L2 is read a few times as fast as memory, not twenty times."""
MOST_ROOFLINE_TIMES = 1000
"""A time of more than this many times what the peaks allow, or 10 us where that is less, likewise:
launching takes microseconds, and kernels far from the peaks are tens of times slower."""
_LAUNCH_US = 10.0
_SAME_SHARE = 1e-6
"""Times are kept to 1 ns: two that differ by less, or by this share, are one."""


@dataclass(frozen=True)
class Refusal:
    """Rows that no problem of ours expresses, for one reason."""

    reason: str
    num_rows: int
    first_line: int


@dataclass(frozen=True)
class PublishedSummary:
    """What came of the rows of a table."""

    num_rows: int
    num_added: int
    num_present: int
    """Rows that the database had already."""
    refusals: tuple[Refusal, ...]

    @property
    def num_refused(self) -> int:
        """Rows that were left out."""
        return sum(refusal.num_rows for refusal in self.refusals)


@dataclass(frozen=True)
class _Baseline:
    line: int
    key: StudyKey
    evaluation: Evaluation


def import_published(
    store: Store,
    path: Path,
    *,
    source: str,
    date: datetime,
    provenance: Provenance = Provenance.PUBLISHED,
    policy: MeasurementPolicy | None = None,
) -> PublishedSummary:
    """Adds the rows of a CSV table that the database lacks, all in one transaction.

    Rows whose shape no problem expresses are left out and counted with their reasons. The same
    table twice adds nothing.

    Args:
        store: where to.
        path: the table; ``docs/published.md`` has its columns.
        source: where the figures are from, as reports will say it.
        date: when they were published or measured.
        provenance: ``published`` for the figures of others, ``measured`` for runs of one's own.
        policy: how it was timed, for rows that do not say so.

    Raises:
        UsageError: the table, a value in it or an argument is wrong; nothing was added.
    """
    if not source.strip():
        raise UsageError(f"source={source!r} must say where the figures are from")
    if provenance not in (Provenance.PUBLISHED, Provenance.MEASURED):
        raise UsageError(f"provenance={provenance.value!r} of a table: published or measured")
    rows = read_table(path)
    found: list[_Baseline] = []
    refused: list[tuple[str, int]] = []
    for row in rows:
        where = f"{path} line {row.line}"
        try:
            key, config = _identity(row, source.strip(), provenance, policy)
        except UsageError as error:
            refused.append((f"{row.op}: {error}", row.line))
            continue
        _check_unit(key, row, where)
        found.append(_Baseline(row.line, key, _evaluation(config, row, provenance)))
    _check_unique(found, str(path))
    missing = _missing(store, found, str(path))
    _write(store, missing, date)
    return PublishedSummary(
        len(rows), len(missing), len(found) - len(missing), tuple(_refusals(refused))
    )


def _identity(
    row: TableRow, source: str, provenance: Provenance, policy: MeasurementPolicy | None
) -> tuple[StudyKey, Config]:
    spelling = dialect(row.op)
    named = spelling.named(row.library)
    problem = spelling.problem(row.shape, named)
    key = StudyKey(
        problem=problem,
        device=gpu(row.gpu),
        toolchain=row.toolchain,
        provenance=provenance,
        policy=policy_of(row.conditions, problem, policy),
        space_fingerprint="",
        template_hashes=((BASELINE_TEMPLATE, source),),
    )
    said = {
        "library": named.library,
        "variant": named.variant,
        "version": row.library_version,
        "conditions": row.conditions,
    }
    config = Config.of(BASELINE_TEMPLATE, {name: text for name, text in said.items() if text})
    return key, config


def _evaluation(config: Config, row: TableRow, provenance: Provenance) -> Evaluation:
    time_us = row.time_us
    timing = Timing(time_us, time_us, time_us, time_us, time_us)
    return Evaluation(config, TrialStatus.OK, provenance, timing=timing)


def _check_unit(key: StudyKey, row: TableRow, where: str) -> None:
    bound_us = roofline_us(key.problem, key.device)
    too_fast = row.time_us < LEAST_SHARE_OF_ROOFLINE_TIME * bound_us
    if too_fast or row.time_us > MOST_ROOFLINE_TIMES * max(bound_us, _LAUNCH_US):
        times = bound_us / row.time_us if too_fast else row.time_us / bound_us
        raise UsageError(
            f"{where}: {row.time_us:g} us is {times:,.0f} times as "
            f"{'fast' if too_fast else 'long'} as the peaks of {key.device.sku} allow "
            f"({bound_us:.4g} us): is the unit of the column right?"
        )


def _check_unique(found: Iterable[_Baseline], where: str) -> None:
    lines: dict[tuple[str, Config], int] = {}
    for one in found:
        place = (one.key.digest, one.evaluation.config)
        if place in lines:
            raise UsageError(
                f"{where} line {one.line} repeats line {lines[place]}: the same GPU, shape, "
                f"library and conditions ({one.evaluation.config}); keep one of them"
            )
        lines[place] = one.line


def _missing(store: Store, found: Sequence[_Baseline], where: str) -> list[_Baseline]:
    """What the database lacks; refuses another time for what it has."""
    known: dict[str, dict[Config, TrialRecord]] = {}
    missing = []
    for one in found:
        digest = one.key.digest
        if digest not in known:
            study = store.find_study(one.key)
            trials = store.trials(study.study_id) if study is not None else []
            known[digest] = {trial.evaluation.config: trial for trial in trials}
        present = known[digest].get(one.evaluation.config)
        if present is None:
            missing.append(one)
        elif not _is_same(present.evaluation, one.evaluation):
            raise UsageError(
                f"{where} line {one.line}: {one.evaluation.time_us:g} us, but the database has "
                f"{present.evaluation.time_us:g} us for it from the same source: give the new "
                "figures another --source"
            )
    return missing


def _is_same(present: Evaluation, new: Evaluation) -> bool:
    old_us, new_us = present.time_us, new.time_us
    assert old_us is not None
    assert new_us is not None
    return abs(old_us - new_us) <= max(1e-3, _SAME_SHARE * new_us)


def _write(store: Store, missing: Sequence[_Baseline], date: datetime) -> None:
    if not missing:
        return
    store.transaction(
        lambda writer: [
            writer.trial(writer.study(one.key, 0, date)[0], one.evaluation, date) for one in missing
        ]
    )


def _refusals(refused: Iterable[tuple[str, int]]) -> Iterable[Refusal]:
    """One for each reason, the commonest first."""
    listed = list(refused)
    first = dict(reversed(listed))
    for reason, count in Counter(reason for reason, _ in listed).most_common():
        yield Refusal(reason, count, first[reason])
