"""Version and creation of the schema: runs the Alembic migrations that lie beside this module."""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect

from ...errors import StoreError
from ..records import OLDEST_READ_SCHEMA, SCHEMA_VERSION
from .location import Location

__all__ = ["APPLICATION_ID", "check_schema", "migrate", "schema_version"]

APPLICATION_ID = 0x54494C45
"""``PRAGMA application_id`` of our SQLite files: the letters TILE."""
# Alembic keeps the migration it runs in a global variable.
_ALEMBIC_LOCK = threading.Lock()
MIGRATIONS = Path(__file__).parent / "migrations"


def schema_version(connection: Connection, location: Location) -> int:
    """Number of the schema, 0 for an empty database.

    Raises:
        StoreError: the database belongs to another program.
    """
    if connection.dialect.name == "sqlite":
        application = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        is_ours = application == APPLICATION_ID
        is_empty = not version and not inspect(connection).get_table_names()
    else:
        revision = MigrationContext.configure(connection).get_current_revision()
        version = int(revision or 0)
        is_ours = revision is not None
        is_empty = not inspect(connection).get_table_names()
    if not is_ours and not is_empty:
        raise StoreError(
            f"database {location} belongs to another program: it has tables but no mark of "
            "Tilescout; choose another place with --db"
        )
    return int(version)


def check_schema(connection: Connection, location: Location, *, will_migrate: bool) -> bool:
    """Whether the schema is older than ours: it must be migrated before it is written to.

    Raises:
        StoreError: the schema is newer, or absent or too old to read although ``will_migrate`` is
            False.
    """
    version = schema_version(connection, location)
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"database {location} has schema {version}, this Tilescout knows schemas up to "
            f"{SCHEMA_VERSION}: upgrade Tilescout, or choose another database with --db"
        )
    if version == SCHEMA_VERSION:
        return False
    if will_migrate or version >= OLDEST_READ_SCHEMA:
        return True
    if version == 0:
        raise StoreError(
            f"database {location} is empty: fill it with 'tilescout tune' or 'tilescout import', "
            "or choose another one with --db"
        )
    raise StoreError(
        f"database {location} has schema {version}, this Tilescout reads schemas from "
        f"{OLDEST_READ_SCHEMA} on: "
        "open it once for writing, e.g. with 'tilescout tune', which migrates it"
    )


def migrate(connection: Connection, location: Location) -> None:
    """Brings the schema up to date inside the write transaction that is open.

    Several processes may come here at once: the first does it, the others find it done.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({APPLICATION_ID})")
    if not check_schema(connection, location, will_migrate=True):
        return
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _ALEMBIC_LOCK:
        command.upgrade(config, "head")
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
