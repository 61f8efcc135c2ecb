"""Chunked gated-delta-net forward: problem, reference, templates; most of it loaded on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy_operation import from_reference, lazy_operation
from .problem import GdnChunkProblem

if TYPE_CHECKING:
    from .inputs import GdnChunkInputs, GdnChunkOutputs

__all__ = ["OPERATION", "GdnChunkInputs", "GdnChunkOutputs", "GdnChunkProblem"]

OPERATION = lazy_operation(
    __name__,
    GdnChunkProblem,
    {
        "triton": ("triton_template", "GdnChunkTriton"),
        "tilelang": ("tilelang_template", "GdnChunkTileLang"),
        # Of those with a backward the first that is installed serves what autograd records.
        "flash_qla": ("external_template", "GdnChunkFlashQla"),
        "fla": ("external_template", "GdnChunkFla"),
        "flashinfer": ("external_template", "GdnChunkFlashInfer"),
    },
)


def __getattr__(name: str) -> Any:
    if name in ("GdnChunkInputs", "GdnChunkOutputs"):
        return from_reference(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
