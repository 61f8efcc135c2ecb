"""Inserts and updates, each inside a transaction that the store opened.

What is shared is looked up by content before it is inserted. Another writer may insert the same in
between: the database then refuses ours, and the store runs the whole transaction again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Insert,
    Select,
    Table,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from ...errors import UsageError
from ...kernels.base import Config, canonical_json
from ..records import BASELINE_TEMPLATE, BinaryFacts, Evaluation, StudyKey, TrialStatus
from .codec import (
    content_digest,
    decode_seconds,
    decode_timing,
    device_columns,
    encode_binary,
    encode_seconds,
    encode_timing,
    named_values,
    to_milliseconds,
)
from .fields import is_integer
from .models import (
    Base,
    BinaryRow,
    ConfigRow,
    ConfigShapeRow,
    DeviceRow,
    KernelRow,
    ProblemRow,
    ReasonRow,
    StudyRow,
    StudyTemplateRow,
    TemplateRow,
    ToolchainRow,
    TrialRow,
    WinnerRow,
)

__all__ = ["Writer", "as_stored"]

# Statements that every trial needs are built once: building one takes longer than running it.
_TRIAL_OF_CONFIG = select(TrialRow.id, TrialRow.number).where(
    TrialRow.study_id == bindparam("study_id"), TrialRow.config_id == bindparam("config_id")
)
_HIGHEST_NUMBER = select(func.max(TrialRow.number)).where(
    TrialRow.study_id == bindparam("study_id")
)


@cache
def _by_digest(table: Any) -> Select[int]:
    return select(table.id).where(table.digest == bindparam("digest"))


@cache
def _insertion(table: type[Base]) -> Insert:
    assert isinstance(table.__table__, Table)
    return insert(table.__table__)


class Writer:
    """Writes inside one transaction; remembers the ids it has looked up."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[tuple[object, ...], int] = {}
        self._next_numbers: dict[int, int] = {}
        self._studies: dict[int, tuple[str, set[str]]] = {}

    def study(self, key: StudyKey, seed: int, created_at: datetime) -> tuple[int, bool]:
        """Id of the study with this key, and whether it is new."""
        found = self._connection.execute(
            select(StudyRow.id).where(StudyRow.digest == key.digest)
        ).scalar()
        if found is not None:
            return found, False
        names = [name for name, _ in key.template_hashes]
        if not names or len(set(names)) != len(names):
            raise UsageError(
                f"template_hashes={key.template_hashes!r} must name each template once"
            )
        if not is_integer(seed):
            raise UsageError(f"seed={seed!r} must be an integer of 64 bits")
        study_id = self._insert(
            StudyRow,
            digest=key.digest,
            problem_id=self._shared(ProblemRow, op=key.problem.op, problem_json=key.problem.key()),
            device_id=self._shared(DeviceRow, **device_columns(key.device)),
            toolchain_id=self._unique(ToolchainRow, **key.toolchain.as_dict()),
            provenance=key.provenance.value,
            policy=str(key.policy),
            space_fingerprint=key.space_fingerprint,
            part=key.part,
            seed=seed,
            created_ms=to_milliseconds(created_at),
        )
        for name, source_hash in key.template_hashes:
            template_id = self._unique(
                TemplateRow, op=key.problem.op, name=name, source_hash=source_hash
            )
            self._connection.execute(
                insert(StudyTemplateRow).values(study_id=study_id, template_id=template_id)
            )
        return study_id, True

    def trial(
        self,
        study_id: int,
        evaluation: Evaluation,
        created_at: datetime,
        *,
        number: int | None = None,
        keep_samples: bool = False,
    ) -> tuple[int, int, bool]:
        """Id and number of the config's trial in the study, and whether it is new.

        ``number`` is taken where it is free; None gives the next.

        Raises:
            UsageError: there is no such study, or the evaluation does not belong there.
        """
        self._check(study_id, evaluation)
        config_id = self._config(evaluation.config)
        found = self._connection.execute(
            _TRIAL_OF_CONFIG, {"study_id": study_id, "config_id": config_id}
        ).first()
        if found is not None:
            return found.id, found.number, False
        number = self._take_number(study_id, number)
        trial_id = self._insert(
            TrialRow,
            study_id=study_id,
            number=number,
            config_id=config_id,
            binary_ids=self._binary_ids(evaluation.facts),
            status=evaluation.status.value,
            reason_id=self._reason(evaluation.reason),
            **encode_timing(evaluation.timing, keep_samples=keep_samples),
            max_abs_error=evaluation.max_abs_error,
            relative_rms_error=evaluation.relative_rms_error,
            compile_ms=encode_seconds("compile_s", evaluation.compile_s),
            measure_ms=encode_seconds("measure_s", evaluation.measure_s),
            created_ms=to_milliseconds(created_at),
        )
        return trial_id, number, True

    def finals(self, study_id: int, finals: Sequence[Evaluation]) -> list[int]:
        """Ids of the study's trials of these configs, after their final figures replaced the old.

        Compile and measure time stay those of the first evaluation, so that deciding again does not
        count them twice.
        """
        self._require_operation(study_id)
        for evaluation in finals:
            self._check(study_id, evaluation)
        trial_ids = [self._trial_of(study_id, evaluation.config) for evaluation in finals]
        if len(set(trial_ids)) != len(trial_ids):
            raise UsageError(f"the finals of study {study_id} name a config twice")
        self._connection.execute(
            update(TrialRow).where(TrialRow.study_id == study_id).values(final_rank=None)
        )
        for rank, (trial_id, evaluation) in enumerate(zip(trial_ids, finals, strict=True), start=1):
            values: dict[str, Any] = {
                "final_rank": rank,
                "status": evaluation.status.value,
                "reason_id": self._reason(evaluation.reason),
                **encode_timing(evaluation.timing, keep_samples=True),
            }
            if evaluation.facts:
                values["binary_ids"] = self._binary_ids(evaluation.facts)
            for name in ("max_abs_error", "relative_rms_error"):
                if getattr(evaluation, name) is not None:
                    values[name] = getattr(evaluation, name)
            self._connection.execute(
                update(TrialRow).where(TrialRow.id == trial_id).values(**values)
            )
        return trial_ids

    def winner(self, study_id: int, trial_id: int, decided_at: datetime) -> None:
        """Makes the trial the winner of its study."""
        decided = {"trial_id": trial_id, "decided_ms": to_milliseconds(decided_at)}
        changed = self._connection.execute(
            update(WinnerRow).where(WinnerRow.study_id == study_id).values(**decided)
        )
        if not changed.rowcount:
            self._insert(WinnerRow, study_id=study_id, **decided)

    def _require_operation(self, study_id: int) -> None:
        part = self._connection.execute(
            select(StudyRow.part).where(StudyRow.id == study_id)
        ).scalar()
        if part:
            raise UsageError(
                f"study {study_id} is of the part {part!r}: only that of a whole operation is "
                "decided"
            )
        templates = (
            select(TemplateRow.name)
            .join(StudyTemplateRow, StudyTemplateRow.template_id == TemplateRow.id)
            .where(StudyTemplateRow.study_id == study_id)
        )
        if BASELINE_TEMPLATE in self._connection.execute(templates).scalars():
            raise UsageError(f"study {study_id} holds baselines: only a search is decided")

    def forget_winner(self, study_id: int) -> None:
        """Takes the decision of the study back, where there is one."""
        self._connection.execute(delete(WinnerRow).where(WinnerRow.study_id == study_id))

    def rebuild_winners(self, decided_at: datetime) -> int:
        """Makes ``winners`` say what the trials say; returns how many rows were wrong.

        Decisions that stand keep their date.
        """
        ranked = self._connection.execute(
            select(TrialRow.study_id, TrialRow.id)
            .where(TrialRow.final_rank.is_not(None), TrialRow.status == TrialStatus.OK.value)
            .order_by(TrialRow.study_id, TrialRow.final_rank.desc())
        )
        best = {row.study_id: row.id for row in ranked}
        rows = self._connection.execute(select(WinnerRow.study_id, WinnerRow.trial_id))
        present = {row.study_id: row.trial_id for row in rows}
        for study_id in present.keys() - best.keys():
            self.forget_winner(study_id)
        wrong = {key: value for key, value in best.items() if present.get(key) != value}
        for study_id, trial_id in wrong.items():
            self.winner(study_id, trial_id, decided_at)
        return len(wrong) + len(present.keys() - best.keys())

    def decided_ms(self, study_id: int) -> int | None:
        """When the study was decided, or None."""
        return self._connection.execute(
            select(WinnerRow.decided_ms).where(WinnerRow.study_id == study_id)
        ).scalar()

    def _check(self, study_id: int, evaluation: Evaluation) -> None:
        """Refuses what would mix provenances or name a template whose source is not known."""
        if study_id not in self._studies:
            query = (
                select(StudyRow.provenance, TemplateRow.name)
                .join(StudyTemplateRow, StudyTemplateRow.study_id == StudyRow.id)
                .join(TemplateRow, TemplateRow.id == StudyTemplateRow.template_id)
                .where(StudyRow.id == study_id)
            )
            rows = self._connection.execute(query).all()
            if not rows:
                raise UsageError(f"there is no study {study_id!r}: create it first")
            self._studies[study_id] = (rows[0].provenance, {row.name for row in rows})
        provenance, templates = self._studies[study_id]
        config = evaluation.config
        if evaluation.provenance.value != provenance:
            raise UsageError(
                f"a {evaluation.provenance.value} trial does not belong in study {study_id}, "
                f"whose trials are {provenance}"
            )
        if config.template not in templates:
            raise UsageError(
                f"template {config.template!r} takes no part in study {study_id}: "
                f"its templates are {', '.join(sorted(templates))}"
            )
        if evaluation.status is TrialStatus.OK and evaluation.timing is None:
            raise UsageError(f"config {config} of {config.template} is ok but has no timing")

    def _trial_of(self, study_id: int, config: Config) -> int:
        found = self._connection.execute(
            _TRIAL_OF_CONFIG, {"study_id": study_id, "config_id": self._config(config)}
        ).first()
        if found is None:
            raise UsageError(
                f"config {config} of {config.template} is no trial of study {study_id}: "
                "add the trial before deciding on it"
            )
        return int(found.id)

    def _take_number(self, study_id: int, wanted: int | None) -> int:
        """``wanted`` where it is free, or the next."""
        if study_id not in self._next_numbers:
            # Servers let others write meanwhile: they wait here, so that no number comes twice.
            self._connection.execute(
                select(StudyRow.id).where(StudyRow.id == study_id).with_for_update()
            )
            highest = self._connection.execute(_HIGHEST_NUMBER, {"study_id": study_id}).scalar()
            self._next_numbers[study_id] = 0 if highest is None else highest + 1
        following = self._next_numbers[study_id]
        if wanted is not None and wanted < following and not self._has_number(study_id, wanted):
            return wanted
        number = following if wanted is None else max(wanted, following)
        self._next_numbers[study_id] = number + 1
        return number

    def _has_number(self, study_id: int, number: int) -> bool:
        query = select(TrialRow.id).where(TrialRow.study_id == study_id, TrialRow.number == number)
        return self._connection.execute(query).first() is not None

    def _config(self, config: Config) -> int:
        names, values = named_values(config.as_dict())
        shape_id = self._unique(ConfigShapeRow, template=config.template, parameters_json=names)
        return self._shared(ConfigRow, shape_id=shape_id, values_json=values)

    def _binary_ids(self, facts: tuple[BinaryFacts, ...]) -> str | None:
        return canonical_json([self._binary(fact) for fact in facts]) if facts else None

    def _binary(self, facts: BinaryFacts) -> int:
        kernel, values = encode_binary(facts)
        return self._shared(BinaryRow, kernel_id=self._unique(KernelRow, **kernel), **values)

    def _reason(self, reason: str) -> int | None:
        text = _storable(reason)
        return self._shared(ReasonRow, reason=text) if text else None

    def _shared(self, table: type[Any], **values: Any) -> int:
        """Id of the row with this content in a table that has a ``digest``."""
        digest = content_digest(table.__tablename__, values)
        found = self._find(table, digest)
        if found is not None:
            return found
        return self._remember(table, digest, self._insert(table, **values, digest=digest))

    def _find(self, table: Any, digest: bytes) -> int | None:
        known = self._known.get((table, digest))
        if known is not None:
            return known
        found = self._connection.execute(_by_digest(table), {"digest": digest}).scalar()
        return None if found is None else self._remember(table, digest, found)

    def _remember(self, table: type[Base], content: object, row_id: int) -> int:
        self._known[table, content] = row_id
        return row_id

    def _unique(self, table: type[Any], **values: str) -> int:
        """Id of the row with these values in a small table."""
        content = tuple(values.values())
        known = self._known.get((table, content))
        if known is not None:
            return known
        conditions = [getattr(table, name) == value for name, value in values.items()]
        found = self._connection.execute(select(table.id).where(*conditions)).scalar()
        return self._remember(table, content, found or self._insert(table, **values))

    def _insert(self, table: type[Base], **values: Any) -> int:
        result = self._connection.execute(_insertion(table), values)
        assert result.inserted_primary_key is not None
        return int(result.inserted_primary_key[0])


def _storable(reason: str) -> str:
    """The text without what no database takes: a compiler's message may hold any byte."""
    return reason.replace("\0", "").encode(errors="replace").decode()


def as_stored(evaluation: Evaluation, *, keep_samples: bool) -> Evaluation:
    """The evaluation as reading will give it back: figures rounded, samples dropped or float32."""
    columns = encode_timing(evaluation.timing, keep_samples=keep_samples)
    return replace(
        evaluation,
        reason=_storable(evaluation.reason),
        timing=decode_timing(tuple(columns.values())),
        compile_s=_rounded(evaluation.compile_s),
        measure_s=_rounded(evaluation.measure_s),
    )


def _rounded(seconds: float) -> float:
    return decode_seconds("duration", encode_seconds("duration", seconds))
