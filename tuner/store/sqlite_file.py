"""How a SQLite file is opened: journal modes, locks, and reading without leaving a trace.

WAL lets one process write while others read, but needs two more files and shared memory, so a file
is in that mode only while a run writes it on a local disk, and rests in rollback mode.
"""

from __future__ import annotations

import os
import sqlite3
import time
from functools import partial
from pathlib import Path
from urllib.parse import quote

from ..read_only_sqlite import reading_parameters
from .location import is_locked

__all__ = ["connect_for_reading", "connect_for_writing", "leave_wal", "use_wal"]

_NETWORK_FILE_SYSTEMS = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs")
)
MOUNTS = Path("/proc/self/mounts")
"""The kernel's list of mounted disks."""


def connect_for_writing(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection that may write, without implicit transactions."""
    connection = _connect(path, "mode=rwc", timeout_s)
    connection.execute("PRAGMA foreign_keys = ON")
    # In WAL mode a crash of the process loses nothing, one of the machine at most the last trials.
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def connect_for_reading(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection that neither writes nor creates a file.

    Raises:
        StoreError: the file has a write-ahead log but not the index that belongs to it.
    """
    return _connect(path, reading_parameters(path), timeout_s)


def _connect(path: Path, parameters: str, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{parameters}",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    # A badly encoded text would otherwise stop the query it is in. A partial, because a lambda
    # would take as long as all the rest of reading a row.
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    return connection


def use_wal(connection: sqlite3.Connection, path: Path, timeout_s: float) -> None:
    """Lets others read and write side by side from now on; does nothing on a network disk."""
    if _is_on_network(path):
        return
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            # SQLite does not always wait here: two processes that change the mode would deadlock.
            if not is_locked(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def leave_wal(connection: sqlite3.Connection) -> bool:
    """Moves the log into the file and removes it; False where others still use the file."""
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        mode = connection.execute("PRAGMA journal_mode = DELETE").fetchone()[0]
    except sqlite3.OperationalError as error:
        if not is_locked(error):
            raise
        return False
    return str(mode) == "delete"


def _is_on_network(path: Path) -> bool:
    """Whether the file lies on a network disk, where WAL's shared memory does not work."""
    if not MOUNTS.exists():
        return False
    place = path.absolute().resolve()
    longest, kind = "", ""
    for line in MOUNTS.read_text(errors="replace").splitlines():
        _, mount_point, file_system, *_ = line.split(" ")
        folder = mount_point.encode().decode("unicode_escape")
        is_inside = os.path.commonpath([folder, place]) == folder
        if is_inside and len(folder) >= len(longest):
            longest, kind = folder, file_system
    return kind in _NETWORK_FILE_SYSTEMS
