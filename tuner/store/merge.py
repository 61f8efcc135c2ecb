"""One export over several databases, as look-ups read them: later over earlier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...errors import UnknownNameError
from ...kernels.registry import operation_names
from ..sku_names import resolve_sku_names
from .store import Store
from .transfer import export_json, import_json

__all__ = ["export_databases"]


def export_databases(
    locations: Sequence[str | Path], *, op: str | None = None, gpus: Sequence[str] | None = None
) -> dict[str, Any]:
    """What ``export_json`` gives for all the databases together.

    Ids are unique in one database only: those of a single database are kept; several are merged
    and their trials numbered anew, beginning with the last database.

    Args:
        locations: paths or URLs, later ones over earlier.
        op: only this operation.
        gpus: only these SKUs, by name or alias.

    Raises:
        StoreError: a database cannot be used.
        UnknownNameError: no such operation or SKU.
    """
    if op is not None and op not in operation_names():
        raise UnknownNameError("operation", op, operation_names())
    with ExitStack() as stack:
        stores = [stack.enter_context(Store.open(path, read_only=True)) for path in locations]
        skus = None
        if gpus is not None:
            present = {study.key.device.sku for store in stores for study in store.studies()}
            skus = resolve_sku_names(gpus, present)
        exports = [export_json(store, op=op, skus=skus) for store in stores]
    return exports[0] if len(exports) == 1 else _merged(exports)


def _merged(exports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    with Store.open(":memory:") as store:
        for data in reversed(exports):
            import_json(store, data)
        return export_json(store)
