"""What the public functions ask of tensors, and the one form in which they say what is wrong.

Only shapes, dtypes, strides and devices are read, never values: no check waits for the device.
"""

from __future__ import annotations

import torch

from ..errors import UsageError

__all__ = ["check_index", "check_shape", "check_tensor", "refuse_grad", "wrong"]


def wrong(function: str, what: str, value: object, allowed: str) -> UsageError:
    """The error for an argument of ``function``: what of it has which value and must be what."""
    return UsageError(f"{what} in {function} is {value!r}: must be {allowed}")


def check_tensor(function: str, name: str, value: object) -> None:
    """Raises UsageError unless the value is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise wrong(function, f"type of {name}", type(value).__name__, "torch.Tensor")


def check_shape(function: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises UsageError unless it is a tensor of this shape."""
    check_tensor(function, name, tensor)
    if tuple(tensor.shape) != shape:
        raise wrong(function, f"shape of {name}", tuple(tensor.shape), str(list(shape)))


def check_index(function: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises UsageError unless the tensor is int32 or int64, contiguous and on the device."""
    if tensor.dtype not in (torch.int32, torch.int64) or not tensor.is_contiguous():
        raise wrong(function, f"dtype of {name}", tensor.dtype, "int32 or int64, contiguous")
    if tensor.device != device:
        raise wrong(function, f"device of {name}", str(tensor.device), str(device))


def refuse_grad(function: str, *tensors: torch.Tensor | None) -> None:
    """Raises UsageError where autograd would record the call: there is no backward."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise UsageError(
            f"an argument of {function} requires grad, and there is no backward: call it under "
            "torch.no_grad(), or detach the argument"
        )
