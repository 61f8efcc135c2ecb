"""Paged decode attention: problem, reference, template; all but the problem loaded on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy_operation import from_reference, lazy_operation
from .problem import PagedDecodeProblem

if TYPE_CHECKING:
    from .reference import PagedDecodeInputs, PagedDecodeOutputs

__all__ = ["OPERATION", "PagedDecodeInputs", "PagedDecodeOutputs", "PagedDecodeProblem"]

OPERATION = lazy_operation(
    __name__,
    PagedDecodeProblem,
    {
        "triton": ("triton_template", "PagedDecodeTriton"),
        "triton_nvfp4": ("triton_nvfp4_template", "PagedDecodeNvfp4"),
        "triton_mla": ("triton_mla_template", "PagedDecodeMla"),
        "tilelang_gather": ("tilelang_template", "PagedDecodeTileLangGather"),
        "tilelang_page": ("tilelang_template", "PagedDecodeTileLangPage"),
    },
)


def __getattr__(name: str) -> Any:
    if name in ("PagedDecodeInputs", "PagedDecodeOutputs"):
        return from_reference(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
