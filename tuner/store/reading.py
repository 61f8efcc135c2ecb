"""Queries: rows back into records, in one transaction, around rows that make no sense.

A row that cannot be read (an unknown operation, broken JSON) is left out and named in ``damaged``;
its neighbours are returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, func, literal, select

from ...errors import StoreError, UsageError
from ...kernels.base import Problem
from ...kernels.device import DeviceSpec
from ..records import Evaluation, Provenance, StudyKey, Toolchain, TrialStatus
from .codec import (
    POLICIES,
    TIMING_COLUMNS,
    decode_device_row,
    decode_problem,
    decode_seconds,
    decode_timing,
    from_milliseconds,
)
from .fields import decode_json, is_integer, is_number
from .models import (
    DeviceRow,
    ProblemRow,
    StudyRow,
    StudyTemplateRow,
    TemplateRow,
    ToolchainRow,
    TrialRow,
    WinnerRow,
)
from .records import StudyRecord, TrialRecord, WinnerRecord
from .shared_rows import SharedRows, chunks

__all__ = ["Reader", "study_filter"]

_Record = TypeVar("_Record")
_STATUSES: dict[Hashable, TrialStatus] = {status.value: status for status in TrialStatus}
_PROVENANCES: dict[Hashable, Provenance] = {kind.value: kind for kind in Provenance}


def study_filter(op: str | None, skus: Sequence[str] | None) -> list[ColumnElement[bool]]:
    """Conditions on a query over studies, problems and devices."""
    conditions: list[ColumnElement[bool]] = []
    if op is not None:
        conditions.append(ProblemRow.op == op)
    if skus is not None:
        conditions.append(DeviceRow.sku.in_(list(skus)))
    return conditions


class Reader:
    """Reads inside one transaction; what it decoded once it keeps."""

    def __init__(
        self, connection: Connection, damaged: dict[str, None], *, has_parts: bool = True
    ) -> None:
        """``has_parts`` is whether the schema knows studies of parts."""
        self._connection = connection
        self._has_parts = has_parts
        self._damaged = damaged
        """Ordered set of notes, shared with the store."""
        self._problems: dict[int, Problem] = {}
        self._devices: dict[int, DeviceSpec] = {}
        self._shared = SharedRows(connection)

    def studies(self, *conditions: ColumnElement[bool]) -> list[StudyRecord]:
        """The studies that meet the conditions, oldest first."""
        rows = self._connection.execute(_studies_query(self._has_parts).where(*conditions)).all()
        templates = self._templates_of([row.study_id for row in rows])
        counts = self._trial_counts()
        found = []
        for row in rows:
            try:
                key = self._study_key(row, templates[row.study_id])
                created = from_milliseconds("created_ms", row.created_ms)
                seed = _integer("seed", row.seed)
            except UsageError as error:
                self._note(f"study {row.study_id}", error)
                continue
            count = counts.get(row.study_id, 0)
            found.append(StudyRecord(row.study_id, key, seed, created, count))
        return found

    def trials(
        self, *conditions: ColumnElement[bool], with_samples: bool = True
    ) -> list[TrialRecord]:
        """The trials that meet the conditions, by study and number.

        Without samples a timing has their number only.
        """
        query = _trials_query(with_samples).where(*conditions)
        rows = self._connection.execute(query).all()
        self._shared.read_configs({row.config_id for row in rows})
        self._shared.read_reasons({row.reason_id for row in rows})
        self._shared.read_binaries({row.binary_ids for row in rows})
        found = []
        for row in rows:
            try:
                found.append(self._trial(row))
            except UsageError as error:
                self._note(f"trial {row.id}", error)
        return found

    def trials_by_study(
        self, study_ids: Sequence[int], *, with_samples: bool = True
    ) -> dict[int, list[TrialRecord]]:
        """The trials of each study in the order of their numbers: few queries for many studies."""
        found: dict[int, list[TrialRecord]] = {study_id: [] for study_id in study_ids}
        for chunk in chunks(study_ids):
            for trial in self.trials(TrialRow.study_id.in_(chunk), with_samples=with_samples):
                found[trial.study_id].append(trial)
        return found

    def winners(self, op: str | None, skus: Sequence[str] | None) -> list[WinnerRecord]:
        """The decisions about the operation and SKUs, oldest first."""
        return self._winners(study_filter(op, skus))

    def trial(self, trial_id: int) -> TrialRecord:
        """One trial.

        Raises:
            StoreError: it cannot be read.
        """
        return self._only(self.trials(TrialRow.id == trial_id), f"trial {trial_id}")

    def winner_of(self, study_id: int) -> WinnerRecord:
        """The decision of a study that has one.

        Raises:
            StoreError: it cannot be read.
        """
        return self._only(self._winners([StudyRow.id == study_id]), f"winner of study {study_id}")

    def _only(self, found: list[_Record], what: str) -> _Record:
        if not found:
            notes = "; ".join(self._damaged)
            raise StoreError(
                f"{what} is in the database but cannot be read ({notes}): "
                "restore the database from a copy or an export, or start another one with --db"
            )
        return found[0]

    def _winners(self, conditions: list[ColumnElement[bool]]) -> list[WinnerRecord]:
        decided = StudyRow.id.in_(select(WinnerRow.study_id))
        studies = {study.study_id: study for study in self.studies(decided, *conditions)}
        rows = self._connection.execute(select(WinnerRow.__table__).order_by(WinnerRow.id)).all()
        rows = [row for row in rows if row.study_id in studies]
        trials = self._trials_by_id([row.trial_id for row in rows])
        finals = self._finals_of(studies)
        found = []
        for row in rows:
            try:
                decided_at = from_milliseconds("decided_ms", row.decided_ms)
                trial = trials.get(row.trial_id)
                if trial is None or trial.study_id != row.study_id:
                    raise UsageError(f"its trial {row.trial_id!r} is missing or cannot be read")
            except UsageError as error:
                self._note(f"winner {row.id}", error)
                continue
            places = finals[row.study_id] or [row.trial_id]
            study = studies[row.study_id]
            found.append(WinnerRecord(row.id, study, trial, tuple(places), decided_at))
        return found

    def _note(self, place: str, error: UsageError) -> None:
        self._damaged[f"{place}: {error}"] = None

    def _study_key(self, row: Row[Any], templates: Iterable[tuple[str, str]]) -> StudyKey:
        if row.problem_id not in self._problems:
            where = f"problem {row.problem_id}"
            values = decode_json(f"{where} problem_json", row.problem_json)
            self._problems[row.problem_id] = decode_problem(where, row.op, values)
        if row.device_id not in self._devices:
            where = f"device {row.device_id}"
            self._devices[row.device_id] = decode_device_row(where, row)
        if row.policy not in POLICIES:
            raise UsageError(f"policy={row.policy!r} must be one of {', '.join(POLICIES)}")
        versions = {name: str(getattr(row, name)) for name in Toolchain().as_dict()}
        return StudyKey(
            problem=self._problems[row.problem_id],
            device=self._devices[row.device_id],
            toolchain=Toolchain(**versions),
            provenance=_provenance(row.provenance),
            policy=POLICIES[row.policy],
            space_fingerprint=str(row.space_fingerprint),
            template_hashes=tuple(sorted(templates)),
            part=str(row.part),
        )

    def _templates_of(self, study_ids: Sequence[int]) -> dict[int, list[tuple[str, str]]]:
        found: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for chunk in chunks(study_ids):
            query = (
                select(StudyTemplateRow.study_id, TemplateRow.name, TemplateRow.source_hash)
                .join(TemplateRow, TemplateRow.id == StudyTemplateRow.template_id)
                .where(StudyTemplateRow.study_id.in_(chunk))
            )
            for study_id, name, source_hash in self._connection.execute(query):
                found[study_id].append((str(name), str(source_hash)))
        return found

    def _trial_counts(self) -> dict[int, int]:
        query = select(TrialRow.study_id, func.count()).group_by(TrialRow.study_id)
        return {row[0]: row[1] for row in self._connection.execute(query)}

    def _trial(self, row: Row[Any]) -> TrialRecord:
        # A hundred thousand rows come this way: unpacking is quicker than asking by name.
        columns: tuple[Any, ...] = tuple(row)
        (
            trial_id,
            study_id,
            number,
            provenance,
            config_id,
            binary_ids,
            status,
            reason_id,
            compile_ms,
            measure_ms,
            created_ms,
            max_abs_error,
            relative_rms_error,
            *timing,
        ) = columns
        if status not in _STATUSES:
            raise UsageError(f"status={status!r} must be one of {', '.join(TrialStatus)}")
        evaluation = Evaluation(
            self._shared.config(config_id),
            _STATUSES[status],
            _provenance(provenance),
            self._shared.reason(reason_id),
            decode_timing(timing),
            self._shared.facts(binary_ids),
            _error_size("max_abs_error", max_abs_error),
            _error_size("relative_rms_error", relative_rms_error),
            decode_seconds("compile_ms", compile_ms),
            decode_seconds("measure_ms", measure_ms),
        )
        created = from_milliseconds("created_ms", created_ms)
        return TrialRecord(trial_id, study_id, _integer("number", number), evaluation, created)

    def _trials_by_id(self, trial_ids: Sequence[int]) -> dict[int, TrialRecord]:
        found: dict[int, TrialRecord] = {}
        for chunk in chunks(trial_ids):
            found.update((trial.trial_id, trial) for trial in self.trials(TrialRow.id.in_(chunk)))
        return found

    def _finals_of(self, study_ids: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        query = (
            select(TrialRow.study_id, TrialRow.id)
            .where(TrialRow.final_rank.is_not(None))
            .order_by(TrialRow.study_id, TrialRow.final_rank)
        )
        wanted = set(study_ids)
        for study_id, trial_id in self._connection.execute(query):
            if study_id in wanted:
                found[study_id].append(trial_id)
        return found


def _studies_query(has_parts: bool) -> Select[Any]:
    columns: list[Any] = [
        StudyRow.id.label("study_id"),
        StudyRow.problem_id,
        StudyRow.device_id,
        StudyRow.provenance,
        StudyRow.policy,
        StudyRow.space_fingerprint,
        StudyRow.part if has_parts else literal("").label("part"),
        StudyRow.seed,
        StudyRow.created_ms,
        ProblemRow.op,
        ProblemRow.problem_json,
        DeviceRow.sku,
        DeviceRow.compute_capability,
        DeviceRow.num_sms,
        DeviceRow.memory_bytes,
        DeviceRow.spec_json,
        ToolchainRow.triton,
        ToolchainRow.tilelang,
        ToolchainRow.torch,
        ToolchainRow.cuda,
        ToolchainRow.driver,
    ]
    return (
        select(*columns)
        .join(ProblemRow, ProblemRow.id == StudyRow.problem_id)
        .join(DeviceRow, DeviceRow.id == StudyRow.device_id)
        .join(ToolchainRow, ToolchainRow.id == StudyRow.toolchain_id)
        .order_by(StudyRow.id)
    )


def _trials_query(with_samples: bool) -> Select[Any]:
    """Trials with the columns in the order that ``Reader._trial`` unpacks."""
    columns: list[Any] = [
        TrialRow.id,
        TrialRow.study_id,
        TrialRow.number,
        StudyRow.provenance,
        TrialRow.config_id,
        TrialRow.binary_ids,
        TrialRow.status,
        TrialRow.reason_id,
        TrialRow.compile_ms,
        TrialRow.measure_ms,
        TrialRow.created_ms,
        TrialRow.max_abs_error,
        TrialRow.relative_rms_error,
    ]
    timing = TIMING_COLUMNS if with_samples else TIMING_COLUMNS[:-1]
    columns += [getattr(TrialRow, name) for name in timing]
    return (
        select(*columns)
        .join(StudyRow, StudyRow.id == TrialRow.study_id)
        .order_by(TrialRow.study_id, TrialRow.number)
    )


def _provenance(value: Hashable) -> Provenance:
    if value not in _PROVENANCES:
        raise UsageError(f"provenance={value!r} must be one of {', '.join(Provenance)}")
    return _PROVENANCES[value]


def _integer(name: str, value: object) -> int:
    if not is_integer(value):
        raise UsageError(f"{name}={value!r} must be an integer")
    return value


def _error_size(name: str, value: object) -> float | None:
    """An error figure, which may be NaN or infinite where a kernel wrote rubbish."""
    if value is None or isinstance(value, float):
        return value
    if value == "nan":
        return float("nan")
    if not is_number(value):
        raise UsageError(f"{name}={value!r} must be a number")
    return float(value)
