"""The store: one committed row a trial, decisions over them, in SQLite or PostgreSQL.

Trials are the only truth; ``winners`` can be rebuilt from them. Several processes may write the
same database, even the same study.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import IntegrityError

from ...errors import StoreError, UsageError
from ..records import Evaluation, StudyKey, TrialStatus
from .codec import from_milliseconds, to_milliseconds
from .engine import open_engine, writing_engine
from .location import Location, translated_errors
from .models import StudyRow, TrialRow
from .reading import Reader, study_filter
from .records import StudyRecord, TrialRecord, WinnerRecord
from .schema import check_schema, migrate
from .sqlite_file import connect_for_writing, leave_wal, use_wal
from .writing import Writer, as_stored

__all__ = ["Store"]

_Result = TypeVar("_Result")
# Each retry means that another writer inserted the same shared row first; that cannot go on long.
_MAX_ATTEMPTS = 10
_SHIPPED_PAGE_BYTES = 2048


class Store:
    """Trials and winners of one database; a context manager that closes it."""

    def __init__(self, location: Location, *, read_only: bool, timeout_s: float) -> None:
        self._location = location
        self._read_only = read_only
        self._timeout_s = timeout_s
        self._damaged: dict[str, None] = {}
        self._has_parts = True
        with self._translated():
            self._engine = open_engine(location, read_only=read_only, timeout_s=timeout_s)
            self._writing_engine = writing_engine(self._engine)
        try:
            self._prepare_schema()
        except BaseException:
            self._engine.dispose()
            raise

    @classmethod
    def open(
        cls,
        location: str | Path | None = None,
        *,
        read_only: bool = False,
        timeout_s: float = 30.0,
    ) -> Self:
        """The database at a path or URL (sqlite, postgresql); None is the user's own.

        Unless ``read_only``, missing folders and schema are created and an older schema is
        migrated. A read-only store changes and creates no file, and reads older schemas too.
        ``timeout_s`` is how long to wait for the lock of another process.

        Raises:
            StoreError: the database cannot be used; the message names the repair.
            UsageError: the location is none.
        """
        return cls(Location.parse(location), read_only=read_only, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return str(self._location)

    @property
    def damaged_rows(self) -> tuple[str, ...]:
        """Rows that could not be read so far and were left out, each with its reason."""
        return tuple(self._damaged)

    def study(self, key: StudyKey, *, seed: int) -> StudyRecord:
        """The study of this key, created with ``seed`` where there is none."""
        found = self.find_study(key)
        if found is None:
            self.transaction(lambda writer: writer.study(key, seed, datetime.now(UTC)))
            found = self.find_study(key)
            assert found is not None
        return found

    def find_study(self, key: StudyKey) -> StudyRecord | None:
        """The study of this key, or None."""
        query = (
            select(StudyRow.id, StudyRow.seed, StudyRow.created_ms, func.count(TrialRow.id))
            .outerjoin(TrialRow, TrialRow.study_id == StudyRow.id)
            .where(StudyRow.digest == key.digest)
            .group_by(StudyRow.id, StudyRow.seed, StudyRow.created_ms)
        )
        with self._connected() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        study_id, seed, created_ms, num_trials = row
        created_at = from_milliseconds(f"created_ms of study {study_id}", created_ms)
        return StudyRecord(study_id, key, seed, created_at, num_trials)

    def studies(
        self, *, op: str | None = None, skus: Sequence[str] | None = None
    ) -> list[StudyRecord]:
        """All searches of the operation and SKUs, oldest first.

        Studies of parts and of baselines are left out.
        """
        return [s for s in self._studies(op, skus) if not s.key.part and not s.key.is_baseline]

    def baselines(
        self, *, op: str | None = None, skus: Sequence[str] | None = None
    ) -> list[StudyRecord]:
        """What other libraries did: each trial of such a study is one library's time."""
        return [study for study in self._studies(op, skus) if study.key.is_baseline]

    def _studies(self, op: str | None, skus: Sequence[str] | None) -> list[StudyRecord]:
        with self.reading() as reader:
            return reader.studies(*study_filter(op, skus))

    def studies_with_parts(
        self, *, skus: Sequence[str] | None = None
    ) -> tuple[list[StudyRecord], dict[str, list[StudyRecord]]]:
        """``studies``, and those of parts by the digest of the study that they belong to."""
        found = [study for study in self._studies(None, skus) if not study.key.is_baseline]
        parts: dict[str, list[StudyRecord]] = {}
        for study in found:
            if study.key.part:
                parts.setdefault(replace(study.key, part="").digest, []).append(study)
        return [study for study in found if not study.key.part], parts

    def num_trials(self) -> int:
        """How many trials there are of all studies."""
        with self._connected() as connection:
            return connection.execute(select(func.count()).select_from(TrialRow)).scalar_one()

    def part_studies(self, study: StudyRecord) -> list[StudyRecord]:
        """The studies of parts that belong to the study of an operation, oldest first."""
        key = study.key
        with self.reading() as reader:
            found = reader.studies(*study_filter(key.problem.op, [key.device.sku]))
        return [s for s in found if s.key.part and replace(s.key, part="").digest == key.digest]

    def trials(self, study_id: int) -> list[TrialRecord]:
        """All trials of a study in the order of their numbers."""
        with self.reading() as reader:
            return reader.trials(TrialRow.study_id == study_id)

    def trials_by_study(
        self, study_ids: Sequence[int], *, with_samples: bool = True
    ) -> dict[int, list[TrialRecord]]:
        """Like ``trials`` for many studies at one moment: what they share is decoded once.

        Without samples the timings have only the number of them.
        """
        with self.reading() as reader:
            return reader.trials_by_study(study_ids, with_samples=with_samples)

    def winners(
        self, *, op: str | None = None, skus: Sequence[str] | None = None
    ) -> list[WinnerRecord]:
        """All decisions about the operation and SKUs, oldest first; one a study."""
        with self.reading() as reader:
            return reader.winners(op, skus)

    def add_trial(self, study_id: int, evaluation: Evaluation) -> TrialRecord:
        """Commits a trial; one of the same config that is there already is returned unchanged."""
        return self.add_trials(study_id, [evaluation])[0]

    def add_trials(self, study_id: int, evaluations: Sequence[Evaluation]) -> list[TrialRecord]:
        """Like ``add_trial`` for many, all in one transaction."""
        created_at = from_milliseconds("now", to_milliseconds(datetime.now(UTC)))

        def add(connection: Connection) -> list[TrialRecord]:
            writer, reader = Writer(connection), self._reader(connection)
            added = []
            for evaluation in evaluations:
                trial_id, number, is_new = writer.trial(study_id, evaluation, created_at)
                if is_new:
                    kept = as_stored(evaluation, keep_samples=False)
                    added.append(TrialRecord(trial_id, study_id, number, kept, created_at))
                else:
                    added.append(reader.trial(trial_id))
            return added

        return self._write(add)

    def decide(self, study_id: int, finals: Sequence[Evaluation]) -> WinnerRecord:
        """Makes the first of ``finals``, which are in final order, the winner of the study.

        Their trials take over the final status, timing and all samples, in the same transaction.

        Raises:
            UsageError: no finals, a first one that is not ok, or one that is no trial of the study.
        """
        if not finals or finals[0].status is not TrialStatus.OK:
            status = finals[0].status.value if finals else "missing"
            raise UsageError(f"the first final of study {study_id} is {status}: it must be ok")
        winner = self.record_finals(study_id, finals)
        assert winner is not None
        return winner

    def record_finals(self, study_id: int, finals: Sequence[Evaluation]) -> WinnerRecord | None:
        """Like ``decide``, but none of the finals need be ok: then the study has no winner.

        An earlier decision of the study is taken back in that case.

        Raises:
            UsageError: no finals, an ok one behind one that is not, one that is no trial of the
                study, or a study of a part: what is decided is the operation.
        """
        if not finals:
            raise UsageError(f"the finals of study {study_id} are missing: name at least one")
        is_ok = [final.status is TrialStatus.OK for final in finals]
        if is_ok != sorted(is_ok, reverse=True):
            raise UsageError(f"the finals of study {study_id} must begin with those that are ok")
        decided_at = datetime.now(UTC)

        def record(connection: Connection) -> WinnerRecord | None:
            writer = Writer(connection)
            trial_ids = writer.finals(study_id, finals)
            if not is_ok[0]:
                writer.forget_winner(study_id)
                return None
            writer.winner(study_id, trial_ids[0], decided_at)
            return self._reader(connection).winner_of(study_id)

        return self._write(record)

    def rebuild_winners(self) -> int:
        """Derives all winners from the trials again; returns how many rows were wrong."""
        return self.transaction(lambda writer: writer.rebuild_winners(datetime.now(UTC)))

    def prepare_for_shipping(self) -> None:
        """Packs the file and leaves it in rollback-journal mode, with no file beside it.

        Raises:
            StoreError: another process has the database open.
        """
        self._require_writable()
        path = self._location.path
        if path is None:
            raise UsageError(f"{self} is no file: only a SQLite file can be shipped")
        self._engine.dispose()
        with self._translated():
            connection = connect_for_writing(path, self._timeout_s)
            try:
                if not leave_wal(connection):
                    raise StoreError(
                        f"database {self} is in use by another process: stop it, then try again"
                    )
                # Twenty small tables and indexes fill a page each, whatever its size.
                connection.execute(f"PRAGMA page_size = {_SHIPPED_PAGE_BYTES}")
                connection.execute("VACUUM")
            finally:
                connection.close()

    def close(self) -> None:
        """Ends all connections; the last one to write leaves a plain file behind."""
        self._engine.dispose()
        path = self._location.path
        if self._read_only or path is None or not path.exists():
            return
        with self._translated():
            connection = connect_for_writing(path, self._timeout_s)
            try:
                leave_wal(connection)
            finally:
                connection.close()

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Queries of one moment: what others commit meanwhile does not show."""
        with self._connected() as connection:
            yield self._reader(connection)

    def transaction(self, work: Callable[[Writer], _Result]) -> _Result:
        """What ``work`` returns; it runs in one transaction, again where it lost a race."""
        return self._write(lambda connection: work(Writer(connection)))

    def _reader(self, connection: Connection) -> Reader:
        return Reader(connection, self._damaged, has_parts=self._has_parts)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with translated_errors(self._location, self._timeout_s):
            yield

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self._translated(), self._engine.connect() as connection:
            yield connection

    def _require_writable(self) -> None:
        if self._read_only:
            raise StoreError(f"database {self} was opened read-only: open it for writing")

    def _write(self, work: Callable[[Connection], _Result]) -> _Result:
        self._require_writable()
        for attempt in range(_MAX_ATTEMPTS):
            try:
                with self._translated(), self._writing_engine.begin() as connection:
                    return work(connection)
            except IntegrityError:
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _prepare_schema(self) -> None:
        with self._connected() as connection:
            is_older = check_schema(connection, self._location, will_migrate=not self._read_only)
        if self._read_only:
            self._has_parts = not is_older
            return
        if self._location.path is not None:
            with self._translated(), self._engine.connect() as connection:
                raw = connection.connection.driver_connection
                assert isinstance(raw, sqlite3.Connection)
                use_wal(raw, self._location.path, self._timeout_s)
        if is_older:
            with self._translated(), self._writing_engine.begin() as connection:
                migrate(connection, self._location)
