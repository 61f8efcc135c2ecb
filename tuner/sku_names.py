"""SKU names as people write them, against the SKUs that databases and the catalogue know."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import UnknownNameError
from .catalog import gpu, gpu_names

__all__ = ["resolve_sku_names"]


def resolve_sku_names(names: Sequence[str], present: Collection[str]) -> tuple[str, ...]:
    """The short names of these SKUs, each once.

    Args:
        names: SKU names, or aliases of those in ``configs/gpus``.
        present: SKUs in the databases: a GPU that the catalogue lacks is named by its driver.

    Raises:
        UnknownNameError: neither the databases nor the catalogue know the name.
    """
    return tuple(dict.fromkeys(_resolve(name, present) for name in names))


def _resolve(name: str, present: Collection[str]) -> str:
    if name in present:
        return name
    try:
        return gpu(name).sku
    except UnknownNameError:
        known = {*present, *gpu_names()}
        raise UnknownNameError("GPU", name, known) from None
