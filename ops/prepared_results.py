"""What a prepared call returns: which of its tensors, and what it allocates for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from .call_form import picker
from .launched_call import LaunchedCall, Role, tensors_of_roles

__all__ = ["Result", "result_of"]


@dataclass(frozen=True)
class Result:
    """The result of a call, of its tensors."""

    allocations: tuple[Callable[[], torch.Tensor], ...]
    """What the function allocates; these follow the given tensors."""
    of: Callable[[Sequence[Any]], Any]
    """Takes the given and allocated tensors, and None behind them where there are allocations."""


def result_of(
    result: Any,
    roles: Mapping[str, Role],
    given: Mapping[str, torch.Tensor],
    launched: Sequence[LaunchedCall],
) -> tuple[Result | None, dict[str, torch.Tensor]]:
    """How the result follows from the tensors of a call, and what was allocated, by name.

    None where a part of it is neither given nor written by the launches.

    Args:
        result: None, a tensor, or a tuple of tensors and None.
        roles: Of tensor arguments.
        given: The call's tensors by name.
        launched: What the call came to.
    """
    made = {
        name: tensor
        for name, tensor in tensors_of_roles(roles, launched).items()
        if roles[name].is_output and name not in given
    }
    parts = result if isinstance(result, tuple) else (result,)
    names: list[str | None] = []
    for i, part in enumerate(parts):
        name = None if part is None else _name_of(part, given, made)
        if part is not None and name is None:
            if not isinstance(part, torch.Tensor) or part.numel():
                return None, {}
            name = f"result {i}"  # an operator returns it for want of None
        if name is not None and name not in given:
            made[name] = part  # a view of the same start serves as well, and is what is returned
        names.append(name)
    allocations = tuple(_allocation_like(tensor) for tensor in made.values())
    places = {name: i for i, name in enumerate((*given, *made))}
    if result is None:
        return Result(allocations, _nothing), made
    indices = [len(places) if name is None else places[name] for name in names]
    if not isinstance(result, tuple):
        return Result(allocations, itemgetter(indices[0])), made
    if not allocations and None in names:
        pick = picker(indices)
        return Result((), lambda tensors: pick((*tensors, None))), made
    return Result(allocations, picker(indices)), made


def _name_of(
    part: object, given: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]
) -> str | None:
    for name, tensor in given.items():
        if part is tensor:
            return name
    if isinstance(part, torch.Tensor) and part.numel():
        for name, tensor in made.items():
            if part.data_ptr() == tensor.data_ptr() and part.numel() == tensor.numel():
                return name
    return None


def _allocation_like(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _nothing(tensors: Sequence[Any]) -> None:
    del tensors
