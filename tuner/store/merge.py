"""One export over several databases, as look-ups read them: later over earlier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .store import Store
from .transfer import export_json, import_json

__all__ = ["export_databases"]


def export_databases(
    locations: Sequence[str | Path], *, op: str | None = None, skus: Sequence[str] | None = None
) -> dict[str, Any]:
    """What ``export_json`` gives for all the databases together.

    Ids are unique in one database only: those of a single database are kept, several are merged
    and their trials numbered anew, beginning with the last database.

    Raises:
        StoreError: a database cannot be used.
    """
    exports = []
    for location in locations:
        with Store.open(location, read_only=True) as store:
            exports.append(export_json(store, op=op, skus=skus))
    if len(exports) == 1:
        return exports[0]
    with Store.open(":memory:") as merged:
        for data in reversed(exports):
            import_json(merged, data)
        return export_json(merged)
