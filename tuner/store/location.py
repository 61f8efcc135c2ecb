"""Where a database is, as the user said it: a file, memory, or a server.

Turns what goes wrong there into ``StoreError`` with the place and the repair.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError

from ...errors import StoreError, UsageError
from ..paths import user_database_path

__all__ = ["Location", "is_locked", "translated_errors"]


@dataclass(frozen=True)
class Location:
    """A place for a database."""

    url: URL
    path: Path | None
    """The SQLite file; None for a server and for a database in memory."""

    @classmethod
    def parse(cls, location: str | Path | None) -> Location:
        """The place that a path, URL or None (the user's own database) names.

        Raises:
            UsageError: a URL that is malformed or of a database that is not supported.
        """
        if location is None:
            location = user_database_path()
        if isinstance(location, Path) or "://" not in location:
            if str(location) == ":memory:":
                return cls(make_url("sqlite://"), None)
            return cls._of_file(Path(location).expanduser())
        try:
            url = make_url(location)
        except (ArgumentError, ValueError):
            raise UsageError(
                f"database {_without_password(location)!r} is not a valid URL: "
                "give a path, sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME"
            ) from None
        backend = url.get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise UsageError(
                f"database {url!r} is of kind {backend!r}: supported are sqlite and postgresql"
            )
        if backend == "sqlite" and url.database not in (None, "", ":memory:"):
            return cls._of_file(Path(str(url.database)))
        return cls(url, None)

    @classmethod
    def _of_file(cls, path: Path) -> Location:
        return cls(URL.create("sqlite", database=str(path)), path)

    @property
    def is_sqlite(self) -> bool:
        """Whether SQLite keeps it, in a file or in memory."""
        return self.url.get_backend_name() == "sqlite"

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return "the database in memory" if self.is_sqlite else repr(self.url)


def _without_password(url: str) -> str:
    return re.sub("//[^/]*@", "//***@", url)


def _sqlite_code(error: BaseException) -> int:
    """SQLite's primary result code, 0 for another error."""
    original = error.orig if isinstance(error, DBAPIError) else error
    return int(getattr(original, "sqlite_errorcode", 0)) & 0xFF


def is_locked(error: BaseException) -> bool:
    """Whether another connection stood in the way."""
    return _sqlite_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _advice(location: Location, code: int, timeout_s: float) -> str | None:
    """What is wrong and what to do, by SQLite's result code."""
    damaged = "restore it from a copy or an export, or choose another file with --db"
    texts = {
        sqlite3.SQLITE_BUSY: f"is locked by another process for longer than {timeout_s:g} s: "
        "wait until that run ends or stop it, then start again",
        sqlite3.SQLITE_READONLY: "cannot be written: give its file and folder write permission, "
        "or choose another file with --db",
        sqlite3.SQLITE_CANTOPEN: "cannot be opened: check its folder and your rights there, "
        "or choose another file with --db",
        sqlite3.SQLITE_CORRUPT: f"is damaged: {damaged}",
        sqlite3.SQLITE_NOTADB: f"is not a SQLite database, or it is damaged: {damaged}",
        sqlite3.SQLITE_FULL: "cannot grow, the disk is full: free some space; "
        "what was committed is kept",
        sqlite3.SQLITE_IOERR: "cannot be read or written: check the disk, "
        "or choose another file with --db",
    }
    texts[sqlite3.SQLITE_LOCKED] = texts[sqlite3.SQLITE_BUSY]
    texts[sqlite3.SQLITE_PERM] = texts[sqlite3.SQLITE_CANTOPEN]
    return texts.get(code) if location.is_sqlite else None


@contextmanager
def translated_errors(location: Location, timeout_s: float) -> Iterator[None]:
    """Raises ``StoreError`` for what the database refuses inside.

    A violated constraint passes: the caller knows whether it lost a race or made a mistake.
    """
    try:
        yield
    except IntegrityError:
        raise
    except (DBAPIError, sqlite3.Error) as error:
        original = error.orig if isinstance(error, DBAPIError) else error
        code = _sqlite_code(error)
        advice = _advice(location, code, timeout_s)
        what = advice or "cannot be used: check the address, the server and your rights there"
        raise StoreError(f"database {location} {what} ({original})") from error
