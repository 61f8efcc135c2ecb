"""Whether an output lies where it may be written: each element once, and in nobody else's place.

Only addresses and strides are read. Tensors that a call allocates need no such check.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UsageError

__all__ = ["check_written_once", "is_in_place_of", "reach_bytes", "shares_memory"]


def check_written_once(function: str, name: str, tensor: torch.Tensor) -> None:
    """Raises UsageError where elements of an output share memory: which one stays is chance."""
    expanded = any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if expanded:
        raise UsageError(
            f"{name} of {function} has strides {tensor.stride()}: its elements share memory, as "
            "after .expand(); pass a tensor with a place for each"
        )


def is_in_place_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same elements in the same order."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
    )


def shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have bytes in common.

    Slices of one wider tensor that interleave without touching have none; where strides are too
    irregular to tell, interleaving counts as sharing.
    """
    if not tensor.numel() or not other.numel():
        return False
    gap = other.data_ptr() - tensor.data_ptr()
    if gap >= reach_bytes(tensor) or -gap >= reach_bytes(other):
        return False
    return not any(
        _are_columns(tensor, other, gap, pitch) for pitch in set(tensor.stride()) if pitch > 0
    )


def _are_columns(tensor: torch.Tensor, other: torch.Tensor, gap: int, pitch: int) -> bool:
    """Whether both repeat every ``pitch`` elements and are apart within such a period."""
    both = (tensor, other)
    size = tensor.element_size()
    if other.element_size() != size or gap % size:
        return False
    if any(stride >= pitch and stride % pitch for t in both for stride in t.stride()):
        return False
    start = gap // size % pitch
    width, other_width = (_reach(t, below=pitch) for t in both)
    return width <= start and start + other_width <= pitch


def reach_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element, that one included."""
    return _reach(tensor) * tensor.element_size()


def _reach(tensor: torch.Tensor, below: int | None = None) -> int:
    """Elements from the first to the last one, in the dimensions of strides below a bound."""
    dimensions: Sequence[tuple[int, int]] = list(zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum(
        (size - 1) * stride for size, stride in dimensions if below is None or stride < below
    )
