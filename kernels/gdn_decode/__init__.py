"""Gated-delta-net decode: problem, reference, templates; all but the problem loaded on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy_operation import from_reference, lazy_operation
from .problem import GdnDecodeProblem

if TYPE_CHECKING:
    from .reference import GdnDecodeInputs, GdnDecodeOutputs

__all__ = ["OPERATION", "GdnDecodeInputs", "GdnDecodeOutputs", "GdnDecodeProblem"]

OPERATION = lazy_operation(
    __name__,
    GdnDecodeProblem,
    {
        "triton": ("triton_template", "GdnDecodeTriton"),
        "triton_stream": ("triton_stream_template", "GdnDecodeTritonStream"),
        "tilelang": ("tilelang_template", "GdnDecodeTileLang"),
        "fla": ("external_template", "GdnDecodeFla"),
        "flashinfer": ("external_template", "GdnDecodeFlashInfer"),
    },
    is_in_place=True,
)


def __getattr__(name: str) -> Any:
    if name in ("GdnDecodeInputs", "GdnDecodeOutputs"):
        return from_reference(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
