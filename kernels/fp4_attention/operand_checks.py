"""What every template asks of the tensors of FP4 attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Templates are loaded where there is no torch.
    from .inputs import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs

__all__ = ["unaligned_rows", "unsupported_operands"]

ELEMENTS_PER_STRIDE = 8


def unsupported_operands(
    inputs: Fp4AttentionFwdInputs, outputs: Fp4AttentionFwdOutputs | None = None
) -> str | None:
    """None, or why these tensors cannot be served: operands must be contiguous and plain."""
    tensors = {"delta": inputs.delta, "lse": outputs.lse if outputs is not None else None}
    operands: dict[str, Any] = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    for name, operand in operands.items():
        if not hasattr(operand, "codes"):  # e4m3 without blocks
            tensors[name] = operand
            continue
        if operand.scale_layout != "plain":
            return f"scales of {name} are {operand.scale_layout}: only plain ones are read"
        tensors[f"codes of {name}"] = operand.codes
        tensors[f"scales of {name}"] = operand.scales
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            return f"{name}: not contiguous"
        if tensor.data_ptr() % 16:
            return f"{name}: starts at no multiple of 16 bytes; clone it"
    if outputs is not None and outputs.out.stride(-1) != 1:
        return "the last axis of out is not contiguous"
    return None


def unaligned_rows(outputs: Fp4AttentionFwdOutputs | None) -> str | None:
    """None, or why rows of the output cannot be written in pieces of 16 bytes."""
    if outputs is None:
        return None
    out = outputs.out
    if any(stride % ELEMENTS_PER_STRIDE for stride in out.stride()[:3]):
        return f"out has strides {out.stride()}, no multiples of {ELEMENTS_PER_STRIDE}"
    if out.data_ptr() % 16:
        return f"out starts {out.data_ptr() % 16} bytes after a multiple of 16"
    return None
