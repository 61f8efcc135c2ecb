"""What the FP4 functions ask of their tensors; shapes are read, never values."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..errors import UsageError
from ..kernels.fp4_attention.problem import HEAD_DIMS, OUT_DTYPE_BYTES
from .checks import check_shape, check_tensor, finite_number, refuse_grad, wrong
from .on_device import dtype_name

__all__ = [
    "check_operand",
    "check_qkv",
    "check_word",
    "check_words",
    "checked_out",
    "checked_sm_scale",
    "last_contiguous",
    "swapped",
]


def check_qkv(function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises UsageError unless q, k and v ``[B, heads, tokens, D]`` go together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(function, name, tensor)
    refuse_grad(function, q, k, v)
    if q.dim() != 4:
        raise wrong(function, "shape of q", tuple(q.shape), "of four axes")
    batch, heads, _, head_dim = q.shape
    if head_dim not in HEAD_DIMS:
        allowed = f"{' or '.join(map(str, HEAD_DIMS))}: pad q, k and v with zeros, keep sm_scale"
        raise wrong(function, "head dimension of q", head_dim, allowed)
    if k.dim() != 4 or k.shape[0] != batch or k.shape[3] != head_dim or not k.shape[2]:
        allowed = f"[{batch}, Hkv, Sk, {head_dim}] with at least one key"
        raise wrong(function, "shape of k", tuple(k.shape), allowed)
    if not k.shape[1] or heads % k.shape[1]:
        raise wrong(function, "heads of k", k.shape[1], f"a divisor of those of q, {heads}")
    check_shape(function, "v", v, tuple(k.shape))
    if dtype_name(q.dtype) not in OUT_DTYPE_BYTES:
        raise wrong(function, "dtype of q", q.dtype, "bf16, fp16 or fp32")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise wrong(function, f"dtype of {name}", tensor.dtype, f"that of q, {q.dtype}")
        if tensor.device != q.device:
            raise wrong(function, f"device of {name}", str(tensor.device), f"{q.device}")


def check_operand(  # noqa: PLR0917  (a tensor and all that is asked of it)
    function: str,
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raises UsageError unless the tensor is contiguous, of this shape, dtype and device."""
    check_shape(function, name, tensor, shape)
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise wrong(function, f"dtype of {name}", tensor.dtype, f"{dtype}, contiguous")
    if tensor.device != device:
        raise wrong(function, f"device of {name}", str(tensor.device), str(device))


def checked_out(
    function: str,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The output to write: the one given, checked, or a new one."""
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    check_shape(function, "out", out, shape)
    if dtype_name(out.dtype) not in OUT_DTYPE_BYTES or out.stride(-1) != 1:
        allowed = "bf16, fp16 or fp32, contiguous in the last axis"
        raise wrong(function, "dtype of out", out.dtype, allowed)
    if out.device != device:
        raise wrong(function, "device of out", str(out.device), str(device))
    return out


def check_word(function: str, name: str, value: str, allowed: Collection[str]) -> None:
    """Raises UsageError unless the argument is one of the allowed words."""
    if value not in allowed:
        raise UsageError(f"{name}={value!r} of {function}: one of {', '.join(allowed)}")


def check_words(function: str, name: str, values: object, allowed: Collection[str]) -> None:
    """Raises UsageError unless the argument is a collection of allowed words."""
    if not isinstance(values, str | tuple | list | set | frozenset):
        kind = type(values).__name__
        raise wrong(function, f"type of {name}", kind, f"a tuple of any of {', '.join(allowed)}")
    for value in [values] if isinstance(values, str) else values:
        check_word(function, name, value, allowed)


def checked_sm_scale(function: str, q: torch.Tensor, sm_scale: float | None) -> float:
    """The factor of the logits; raises UsageError unless it is above 0."""
    scale = (
        q.shape[3] ** -0.5 if sm_scale is None else finite_number(function, "sm_scale", sm_scale)
    )
    if not scale > 0.0:
        raise wrong(function, "sm_scale", sm_scale, "above 0")
    return scale


def swapped(function: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with heads and tokens swapped, a view."""
    check_tensor(function, name, tensor)
    if tensor.dim() != 4:
        raise wrong(function, f"shape of {name}", tuple(tensor.shape), "of four axes")
    return tensor.transpose(1, 2)


def last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose last axis is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
