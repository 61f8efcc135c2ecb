"""What the public functions ask of tensors, and the one form in which they say what is wrong.

Only shapes, dtypes, strides and devices are read, never values: no check waits for the device.
"""

from __future__ import annotations

import math
from numbers import Real

import torch

from ..errors import UsageError

__all__ = [
    "check_flags",
    "check_index",
    "check_shape",
    "check_tensor",
    "finite_number",
    "refuse_grad",
    "wrong",
]


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


def check_flags(function: str, **flags: object) -> None:
    """Raises UsageError unless each is a bool: a word or None would count as one, too."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            kind = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise UsageError(f"{name} of {function} is {kind}: must be True or False")


def finite_number(function: str, name: str, value: object) -> float:
    """The number; raises UsageError for others. Reading a tensor would wait for the device."""
    # A look at the type before the abstract class: ten times as fast.
    is_number = type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
    if not is_number:
        kind = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise UsageError(f"{name} of {function} is {kind}: must be a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an int has no bounds
        number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{name}={number!r} of {function} must be finite")
    return number


def check_index(function: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises UsageError unless the tensor is int32 or int64, contiguous and on the device."""
    if tensor.dtype not in (torch.int32, torch.int64) or not tensor.is_contiguous():
        raise wrong(function, f"dtype of {name}", tensor.dtype, "int32 or int64, contiguous")
    if tensor.device != device:
        raise wrong(function, f"device of {name}", str(tensor.device), str(device))


def refuse_grad(function: str, *tensors: object) -> None:
    """Raises UsageError where autograd would record the call: there is no backward.

    What is no tensor is left to other checks.
    """
    if torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in tensors
    ):
        raise UsageError(
            f"an argument of {function} requires grad, and there is no backward: call it under "
            "torch.no_grad(), or detach the argument"
        )
