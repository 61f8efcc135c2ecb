"""Whether tensors are of the same kind as others were: everything but addresses and values.

Kind: Python type, dispatch keys (so also functorch, inference mode and dispatch modes), dtype,
device, shape, strides and whether grad is required. torch's own guard, which torch.compile is
built on, looks at all of it in one call, ten times as fast as Python; it is private, so where it is
missing plain attributes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["attribute_guard", "tensor_guard"]

_guards: Any = getattr(torch._C._dynamo, "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)

Guard = Callable[..., bool]


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """A function of as many arguments: whether they are tensors of the same kind."""
    if _TensorGuards is None:
        return attribute_guard(tensors)
    guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Guard = guards.check
    return check


def attribute_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """The same by plain attributes; dispatch keys are compared where Python shows them."""
    kinds = [_kind(tensor) for tensor in tensors]

    def check(*given: Any) -> bool:
        return [_kind(value) for value in given] == kinds

    return check


def _kind(tensor: Any) -> tuple[object, ...]:
    if not isinstance(tensor, torch.Tensor):
        return (type(tensor),)
    return (
        type(tensor),
        torch._C._dispatch_keys(tensor).raw_repr(),
        torch.is_inference_mode_enabled(),
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
    )
