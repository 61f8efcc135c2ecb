"""FP4 attention backward: problem, reference, template; all but the problem loaded on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy_operation import from_reference, lazy_operation
from .problem import Fp4AttentionBwdProblem

if TYPE_CHECKING:
    from .inputs import Fp4AttentionBwdInputs, Fp4AttentionBwdOutputs

__all__ = [
    "OPERATION",
    "Fp4AttentionBwdInputs",
    "Fp4AttentionBwdOutputs",
    "Fp4AttentionBwdProblem",
]

OPERATION = lazy_operation(
    __name__,
    Fp4AttentionBwdProblem,
    {"triton": ("triton_template", "Fp4AttentionBwdTriton")},
)


def __getattr__(name: str) -> Any:
    if name in ("Fp4AttentionBwdInputs", "Fp4AttentionBwdOutputs"):
        return from_reference(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
