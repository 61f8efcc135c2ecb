"""Predicates that several spaces share; each returns None or the reason of a refusal."""

from __future__ import annotations

from ..kernels.device import DeviceSpec

__all__ = ["TILE_REGISTERS", "fits_shared_memory"]

TILE_REGISTERS = 224
"""Registers of a thread that a tile may take; the limit is 255, the rest is addresses."""


def fits_shared_memory(needed_bytes: int, device: DeviceSpec) -> str | None:
    """Whether one block may ask for so much shared memory."""
    if needed_bytes > device.smem_per_block_bytes:
        return f"{needed_bytes} bytes a block, {device.sku} allows {device.smem_per_block_bytes}"
    return None
