"""Opens the SQLAlchemy engine of a location and gives its transactions their SQLite meaning."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import QueuePool, StaticPool

from ...errors import StoreError, UsageError
from .location import Location
from .sqlite_file import connect_for_reading, connect_for_writing

__all__ = ["open_engine", "writing_engine"]

_IS_WRITE = "tilescout_is_write"


def open_engine(location: Location, *, read_only: bool, timeout_s: float) -> Engine:
    """An engine for the location; creates the folders of a file that is to be written.

    Raises:
        StoreError: there is no such file, or its place cannot be used.
        UsageError: the driver of the server is not installed.
    """
    if not location.is_sqlite:
        return _server_engine(location, read_only=read_only)
    path = location.path
    if path is None:
        if read_only:
            raise UsageError("a database in memory is empty: open it for writing")
        engine = create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"isolation_level": None}
        )
    else:
        _check_file(path, read_only=read_only)

        def connect() -> sqlite3.Connection:
            return (connect_for_reading if read_only else connect_for_writing)(path, timeout_s)

        engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "begin", _begin)
    return engine


def writing_engine(engine: Engine) -> Engine:
    """The same engine, whose transactions take the write lock at once.

    A transaction that reads first and writes later would fail where another wrote in between.
    """
    return engine.execution_options(**{_IS_WRITE: True})


def _begin(connection: Connection) -> None:
    is_write = connection.get_execution_options().get(_IS_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")


def _server_engine(location: Location, *, read_only: bool) -> Engine:
    try:
        engine = create_engine(location.url)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"database {location} needs the Python package {error.name!r}: "
            f"pip install {error.name}, or name another driver in the URL"
        ) from None
    return engine.execution_options(postgresql_readonly=True) if read_only else engine


def _check_file(path: Path, *, read_only: bool) -> None:
    if path.is_dir():
        raise StoreError(f"database {path} is a folder: name a file in it, e.g. {path}/results.db")
    try:
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.exists():
            raise StoreError(
                f"database {path} does not exist: 'tilescout tune' or 'tilescout import' makes "
                "one, or choose another one with --db"
            )
        else:
            path.open("rb").close()
    except OSError as error:
        raise StoreError(
            f"database {path} cannot be opened ({error.strerror}): check its folder and your "
            "rights there, or choose another file with --db"
        ) from error
