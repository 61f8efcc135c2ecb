"""Winners as look-ups need them: read from a database file with sqlite3, each row checked alone.

Reads the view ``dispatch_winners``, which the store's migrations own. A row that cannot serve is
set aside with its reason and never hides its neighbours; a file that cannot be read is an error.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from ..errors import StoreError, UsageError
from ..kernels.base import Config, ParameterValue, Problem
from ..kernels.registry import operation, operation_names, template
from .read_only_sqlite import reading_parameters
from .records import SCHEMA_VERSION, Provenance, Toolchain

__all__ = [
    "DatabaseRead",
    "DatabaseSource",
    "SkippedRow",
    "Winner",
    "check_row",
    "database_file",
    "problem_of_row",
    "read_database",
    "unknown_operation",
]

Role = Literal["shipped", "user", "explicit", "lock"]
Row = Mapping[str, object]
_Values = tuple[object, ...]

VIEW = "dispatch_winners"
LOCK_TIMEOUT_S = 2.0
"""How long a first look-up waits for a writer that holds the whole file."""


@dataclass(frozen=True)
class DatabaseSource:
    """A database file and why it is read."""

    path: Path
    role: Role
    """``shipped`` and ``user`` files may be absent, an ``explicit`` one must exist."""


@dataclass(frozen=True)
class DatabaseRead:
    """One database file and the rows of its view."""

    source: DatabaseSource
    is_present: bool
    columns: tuple[str, ...] = ()
    values: tuple[_Values, ...] = ()
    """Rows as SQLite gave them; a mapping of each would take most of the reading time."""

    @cached_property
    def rows_by_op(self) -> Mapping[object, tuple[int, ...]]:
        """Positions of the rows of each operation."""
        column = self.columns.index("op") if self.columns else 0
        found: dict[object, list[int]] = {}
        for position, row in enumerate(self.values):
            found.setdefault(row[column], []).append(position)
        return {op: tuple(positions) for op, positions in found.items()}

    def row(self, position: int) -> Row:
        """One row by column."""
        return dict(zip(self.columns, self.values[position], strict=True))


@dataclass(frozen=True)
class SkippedRow:
    """A winner that cannot be handed out by this version of the code."""

    database: Path
    trial_id: object
    """As it stands in the row; normally an integer."""
    reason: str


@dataclass(frozen=True)
class Winner:
    """A checked row: the best verified or predicted config of one problem on one SKU."""

    database: Path
    rank: int
    """Position of the database in the reading order; a later one overlays an earlier one."""
    trial_id: int
    problem: Problem
    sku: str
    compute_capability: str
    num_sms: int
    memory_bytes: int
    policy: str
    """Measurement policy, e.g. ``cuda_graph/cold_l2``."""
    config: Config
    provenance: Provenance
    time_us: float
    toolchain: Toolchain
    decided_at: str
    """ISO date and time."""


class _RefusedRow(Exception):  # noqa: N818 - a short fact for check_row, never seen outside
    pass


def database_file(database: str | Path) -> Path:
    """The file of a database that a call names.

    Raises:
        UsageError: a URL that names no SQLite file.
    """
    text = str(database)
    if text.startswith("sqlite:///"):
        return Path(text.removeprefix("sqlite:///"))
    if "://" in text:
        raise UsageError(
            f"database {text!r} is not a file: look-ups read SQLite files only; write one with "
            "`tilescout export --db URL | tilescout import - --db FILE`"
        )
    return Path(text).expanduser()


def read_database(source: DatabaseSource) -> DatabaseRead:
    """All rows of the view, unchecked; a missing shipped or user file is simply absent.

    Raises:
        StoreError: an explicit file is missing; a file is corrupt, locked or of another schema.
    """
    path = source.path
    if not path.exists() and source.role != "explicit":
        return DatabaseRead(source, is_present=False)
    if not path.is_file():
        raise StoreError(f"no database file at {str(path)!r}: check the path, or tune with --db")
    try:
        with closing(_connect(source)) as connection:
            _require_schema(connection, path)
            columns, values = _fetch(connection)
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error
    except OSError as error:
        raise StoreError(
            f"database {str(path)!r} cannot be opened ({error.strerror}): check the permissions of "
            "the file and its folder"
        ) from error
    return DatabaseRead(source, is_present=True, columns=columns, values=values)


def _connect(source: DatabaseSource) -> sqlite3.Connection:
    path = source.path.resolve()
    log = path.with_name(path.name + "-wal")
    has_log = log.exists() and log.stat().st_size > 0
    # Nobody changes such a file: it needs no lock. But a write-ahead log would be ignored.
    is_frozen = source.role == "shipped" or not os.access(path.parent, os.W_OK)
    options = "mode=ro&immutable=1" if is_frozen and not has_log else reading_parameters(path)
    return sqlite3.connect(f"file:{quote(str(path))}?{options}", uri=True, timeout=LOCK_TIMEOUT_S)


def _fetch(connection: sqlite3.Connection) -> tuple[tuple[str, ...], tuple[_Values, ...]]:
    """(columns, rows) of the view."""
    try:
        cursor = connection.execute(f"SELECT * FROM {VIEW}")
        values = tuple(cursor.fetchall())
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
        # One badly encoded text must not stop the reading of its neighbours. Decoding each text in
        # Python takes three times as long, so that is for such files only.
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        cursor = connection.execute(f"SELECT * FROM {VIEW}")
        values = tuple(cursor.fetchall())
    return tuple(column[0] for column in cursor.description), values


def _require_schema(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"database {str(path)!r} has schema {version}, this Tilescout reads up to "
            f"{SCHEMA_VERSION}: upgrade Tilescout, or take its winners over with `tilescout "
            "export` and `tilescout import` from the version that wrote it"
        )
    is_there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (VIEW,)).fetchone()
    if version < 1 or is_there is None:
        raise StoreError(
            f"{str(path)!r} is not a Tilescout database (schema {version}, no view {VIEW!r}): "
            "check the path, or move the file away and tune again"
        )


def _unreadable(path: Path, error: sqlite3.Error) -> StoreError:
    name, code = str(path), error.sqlite_errorcode & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(
            f"database {name!r} is locked by another process for longer than "
            f"{LOCK_TIMEOUT_S:g} s: wait until that process ends, or end it, and try again"
        )
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        return StoreError(
            f"database {name!r} cannot be opened ({error}): check the permissions of the file "
            "and its folder"
        )
    return StoreError(
        f"database {name!r} is damaged ({error}): restore it from a copy or from the JSON that "
        "`tilescout export` wrote, or move it away"
    )


def check_row(read: DatabaseRead, rank: int, position: int) -> Winner | SkippedRow:
    """The winner in a row, or why the row cannot serve.

    Args:
        read: Database of the row.
        rank: Position of the database in the reading order.
        position: Of the row in the database.
    """
    row = read.row(position)
    try:
        return _winner(row, read.source.path, rank)
    except _RefusedRow as refusal:
        return SkippedRow(read.source.path, row.get("trial_id"), f"{refusal}")


def unknown_operation(read: DatabaseRead, position: int) -> SkippedRow:
    """Why a row of an operation that this version does not know cannot serve."""
    checked = check_row(read, 0, position)
    assert isinstance(checked, SkippedRow), "the operation is known"
    return checked


def problem_of_row(read: DatabaseRead, position: int) -> Problem | None:
    """The problem of a row, or None where the row names none that this version knows."""
    row = read.row(position)
    try:
        return _problem(_text(row, "op"), _json_object(row, "problem"))
    except _RefusedRow:
        return None


def _winner(row: Row, database: Path, rank: int) -> Winner:
    op = _text(row, "op")
    if op not in operation_names():
        raise _RefusedRow(f"unknown op {op!r}: known are {', '.join(operation_names())}")
    name = _text(row, "template")
    known = operation(op).template_names
    if name not in known:
        raise _RefusedRow(f"unknown template {name!r} of {op}: known are {', '.join(known)}")
    problem = _problem(op, _json_object(row, "problem"))
    config = _config(name, _json_list(row, "parameters"), _json_list(row, "config_values"))
    _require_current_source(op, name, _text(row, "template_hash"))
    return Winner(
        database=database,
        rank=rank,
        trial_id=_integer(row, "trial_id"),
        problem=problem,
        sku=_text(row, "sku"),
        compute_capability=_text(row, "compute_capability"),
        num_sms=_integer(row, "num_sms"),
        memory_bytes=_integer(row, "memory_bytes"),
        policy=_text(row, "policy"),
        config=config,
        provenance=_provenance(_text(row, "provenance")),
        time_us=_time(row),
        toolchain=Toolchain(**{f.name: _text(row, f.name) for f in fields(Toolchain)}),
        decided_at=_text(row, "decided_at"),
    )


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise _RefusedRow(f"{name}={value!r} is not text")
    return value


def _integer(row: Row, name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or value < 0:
        raise _RefusedRow(f"{name}={value!r} is not an integer of at least 0")
    return value


def _time(row: Row) -> float:
    value = row.get("time_us")
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise _RefusedRow(f"time_us={value!r} is not a positive time")
    return float(value)


def _json(row: Row, name: str) -> object:
    text = _text(row, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _RefusedRow(f"{name} is malformed JSON ({error}): {text[:60]!r}") from error


def _json_object(row: Row, name: str) -> dict[str, object]:
    value = _json(row, name)
    if not isinstance(value, dict):
        raise _RefusedRow(f"{name} is not a JSON object: {_text(row, name)[:60]!r}")
    return value


def _json_list(row: Row, name: str) -> list[object]:
    value = _json(row, name)
    if not isinstance(value, list):
        raise _RefusedRow(f"{name} is not a JSON list: {_text(row, name)[:60]!r}")
    return value


def _problem(op: str, values: Mapping[str, object]) -> Problem:
    try:
        return operation(op).problem_type.from_dict(values)
    except UsageError as error:
        raise _RefusedRow(f"problem is not one of {op}: {error}") from error


def _config(name: str, parameters: Sequence[object], values: Sequence[object]) -> Config:
    if len(parameters) != len(values):
        raise _RefusedRow(f"config has {len(values)} values for {len(parameters)} parameters")
    checked: dict[str, ParameterValue] = {}
    for parameter, value in zip(parameters, values, strict=True):
        if not isinstance(parameter, str):
            raise _RefusedRow(f"config has a parameter {parameter!r}: not text")
        if not isinstance(value, bool | int | str):
            raise _RefusedRow(f"config has {parameter}={value!r}: not an integer, text or boolean")
        checked[parameter] = value
    return Config.of(name, checked)


def _provenance(text: str) -> Provenance:
    allowed = (Provenance.MEASURED, Provenance.PREDICTED)
    if text not in allowed:
        raise _RefusedRow(f"provenance {text!r} is not one of {', '.join(allowed)}")
    return Provenance(text)


@cache
def _source_hash(op: str, name: str) -> str:
    return template(op, name).source_hash()


def _require_current_source(op: str, name: str, recorded: str) -> None:
    try:
        current = _source_hash(op, name)
    except ImportError as error:
        raise _RefusedRow(f"template {name!r} of {op} cannot be loaded: {error}") from error
    if recorded != current:
        raise _RefusedRow(
            f"template {op}/{name} has changed since (source {recorded[:12]}, now {current[:12]})"
        )
