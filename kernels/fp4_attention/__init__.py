"""FP4 attention forward: problem, reference, templates; all but the problem loaded on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy_operation import from_reference, lazy_operation
from .problem import Fp4AttentionFwdProblem

if TYPE_CHECKING:
    from .reference import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs

__all__ = [
    "OPERATION",
    "Fp4AttentionFwdInputs",
    "Fp4AttentionFwdOutputs",
    "Fp4AttentionFwdProblem",
]

OPERATION = lazy_operation(
    __name__,
    Fp4AttentionFwdProblem,
    {
        "triton_native": ("triton_template", "Fp4AttentionNative"),
        "triton_emulated": ("triton_template", "Fp4AttentionEmulated"),
        "tilelang_native": ("tilelang_native_template", "Fp4AttentionTileLangNative"),
        "tilelang_emulated": ("tilelang_template", "Fp4AttentionTileLang"),
    },
)


def __getattr__(name: str) -> Any:
    if name in ("Fp4AttentionFwdInputs", "Fp4AttentionFwdOutputs"):
        return from_reference(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
