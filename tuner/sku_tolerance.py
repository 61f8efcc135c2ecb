"""How far two devices may differ and still be one SKU; a leaf: look-ups load no catalogue."""

from __future__ import annotations

__all__ = ["MEMORY_TOLERANCE"]

MEMORY_TOLERANCE = 0.05
"""Two devices whose memory differs by no more may be the same SKU: ECC, carve-outs and vGPU
reserves take a few per cent, and no two SKUs of one chip are that close."""
