"""URI parameters that open a SQLite file for reading without creating a file beside it.

Shared by the store and by look-ups, which import nothing of the store.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import StoreError

__all__ = ["reading_parameters"]

_WAL_FORMAT = 2
_FORMAT_OFFSET = 18


def reading_parameters(path: Path) -> str:
    """URI parameters by what lies beside the file.

    A plain read-only connection to a file in WAL mode would create ``-shm`` and ``-wal``.

    Raises:
        StoreError: the file has a write-ahead log but not the index that belongs to it.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        header = file.read(_FORMAT_OFFSET + 1)
    if len(header) <= _FORMAT_OFFSET or header[_FORMAT_OFFSET] != _WAL_FORMAT:
        return "mode=ro"
    if path.with_name(path.name + "-shm").exists():
        return "mode=ro&readonly_shm=1"
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size:
        raise StoreError(
            f"database {path} has a write-ahead log {log.name} without its index: trials in the "
            "log would be missed; open the database once for writing, e.g. with 'tilescout tune'"
        )
    return "mode=ro&immutable=1"
