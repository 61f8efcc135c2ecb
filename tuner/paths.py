"""Where the databases live: the user's own and the one shipped with the package.

Leaf module of the standard library and platformdirs, so that dispatch can use it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import StoreError, UsageError

__all__ = [
    "DATABASE_VARIABLE",
    "readable_databases",
    "shipped_database_path",
    "user_database_path",
]

DATABASE_VARIABLE = "TILESCOUT_DB"
"""Environment variable that names the user's database file."""


def user_database_path() -> Path:
    """The user's database: ``$TILESCOUT_DB``, else a file in the user's data folder.

    The file need not exist.

    Raises:
        UsageError: the variable holds a database URL, which only ``--db`` takes.
    """
    chosen = os.environ.get(DATABASE_VARIABLE, "").strip()
    if not chosen:
        from platformdirs import user_data_path  # dispatch is imported in less time without it

        return user_data_path("tilescout", appauthor=False) / "results.db"
    if "://" in chosen:
        raise UsageError(
            f"{DATABASE_VARIABLE}={chosen!r} must be the path of a SQLite file: dispatch reads no "
            "server; pass the URL to --db instead"
        )
    return Path(chosen).expanduser()


def shipped_database_path() -> Path:
    """The database that came with the package; the file need not exist."""
    return Path(__file__).resolve().parents[1] / "results.db"


def readable_databases() -> tuple[Path, ...]:
    """The databases read where none is named: shipped, then the user's, where they exist.

    Raises:
        StoreError: there is none.
    """
    found = tuple(p for p in (shipped_database_path(), user_database_path()) if p.exists())
    if not found:
        raise StoreError(
            f"no database yet: {str(user_database_path())!r} does not exist; make one with "
            "`tilescout tune`, or name one with --db"
        )
    return found
