"""What a constraint is, and predicates that several spaces share: None, or why they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..kernels.base import Config
from ..kernels.device import DeviceSpec

__all__ = ["TILE_REGISTERS", "Constraint", "fits_shared_memory"]

TILE_REGISTERS = 224
"""Registers of a thread that a tile may take; the limit is 255, the rest is addresses."""


@dataclass(frozen=True)
class Constraint:
    """A named predicate over a complete config; ``check`` returns the reason it fails, or None.

    It depends on nothing but the values of the config, so that its answers may be remembered.
    """

    name: str
    check: Callable[[Config], str | None]


def fits_shared_memory(needed_bytes: int, device: DeviceSpec) -> str | None:
    """Whether one block may ask for so much shared memory."""
    if needed_bytes > device.smem_per_block_bytes:
        return f"{needed_bytes} bytes a block, {device.sku} allows {device.smem_per_block_bytes}"
    return None
