"""Predicates that several spaces share; each returns None or the reason of a refusal."""

from __future__ import annotations

from ..kernels.device import DeviceSpec

__all__ = ["fits_shared_memory"]


def fits_shared_memory(needed_bytes: int, device: DeviceSpec) -> str | None:
    """Whether one block may ask for so much shared memory."""
    if needed_bytes > device.smem_per_block_bytes:
        return f"{needed_bytes} bytes a block, {device.sku} allows {device.smem_per_block_bytes}"
    return None
