"""What every template asks of the tensors of FP4 attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Templates are loaded where there is no torch.
    from .inputs import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs

__all__ = ["unsupported_operands"]


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
