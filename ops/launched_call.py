"""A call that was launched the long way, and which of its fields are tensors of the caller.

Which tensor of the call a field of the launcher's inputs and outputs is, the roles say; how far
behind its start, follows from the launch that was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch

from ..kernels.base import Launcher
from ..kernels.compiled_launch import Address
from ..tuner.dispatch import LookupResult
from .launchers import OwnedLauncher
from .own_memory import kept_copy

__all__ = [
    "Fitted",
    "LaunchedCall",
    "Role",
    "fitted",
    "owners_of",
    "relaunch_of",
    "storage_of",
    "tensors_of_roles",
]


@dataclass(frozen=True)
class Role:
    """What a tensor argument is to the launch."""

    paths: tuple[str, ...] = ()
    """Fields of inputs and outputs that are it, or a view of it whose place follows from its shape
    and strides: ``inputs.q``, ``outputs.out``, ``inputs.outs[0]``; with ``STEP:`` before it only in
    the launch of that name. None: only the checks look at it."""
    is_output: bool = False
    """It is allocated where the caller gives none."""
    apart_from: tuple[str, ...] = ()
    """Arguments with which it may have no byte in common, unless it was in the place of one."""
    behind: str | None = None
    """An argument of the same storage at whose side it must lie."""


@dataclass(frozen=True)
class LaunchedCall:
    """A call that was checked, resolved and launched the long way."""

    inputs: Any
    outputs: Any
    owned: OwnedLauncher
    counted: tuple[LookupResult, ...]
    """The look-ups of it, which a capture counts."""
    generation: int
    """``dispatch.generation`` from before it was resolved."""
    constants: frozenset[str] = frozenset()
    """Tensor fields that, where no argument is theirs, follow from the options and shapes."""
    step: str = ""
    """Tells the launches of a call apart, where it makes several."""


class _Argument(Protocol):
    """Makes a field of the inputs or outputs from the call's tensors."""

    def __call__(self, given: Sequence[torch.Tensor], /) -> torch.Tensor: ...


def tensors_of_roles(
    roles: Mapping[str, Role], launched: Sequence[LaunchedCall]
) -> dict[str, torch.Tensor]:
    """The tensor of each role, of those that have one in the launches."""
    found: dict[str, torch.Tensor] = {}
    for call in launched:
        tensors = dict(_tensors_of(call))
        for name, role in roles.items():
            for path in role.paths:
                tensor = tensors.get(_path_in(path, call.step) or "")
                if tensor is not None:
                    found.setdefault(name, tensor)
    return found


def owners_of(roles: Mapping[str, Role], places: Mapping[str, int], step: str) -> dict[str, int]:
    """Which tensor of the call a field of this step is."""
    return {
        own: places[name]
        for name, role in roles.items()
        if name in places
        for path in role.paths
        if (own := _path_in(path, step)) is not None
    }


def _path_in(path: str, step: str) -> str | None:
    """The path where it is one of this step."""
    of_step, is_of_one, own = path.rpartition(":")
    return None if is_of_one and of_step != step else own


@dataclass(frozen=True)
class Fitted:
    """A launched call with a tensor object of its own for every field that is the call's."""

    inputs: Any
    outputs: Any
    addresses: dict[int, Address]
    """By the identity of these tensors."""
    made: dict[str, _Argument]


def fitted(
    launched: LaunchedCall,
    owners: Mapping[str, int],
    given: Sequence[torch.Tensor],
    held: dict[int, torch.Tensor],
) -> Fitted | None:
    """The call with its tensors told apart; None where one is neither given nor constant.

    Args:
        launched: The call.
        owners: Which of the given tensors a path of it is.
        given: The call's tensors.
        held: Takes copies of the constants, by identity: the call's own may lie in memory that its
            caller wants back.
    """
    copies: dict[int, torch.Tensor] = {}
    made: dict[str, _Argument] = {}
    aliases: dict[str, torch.Tensor] = {}
    addresses: dict[int, Address] = {}
    for path, tensor in _tensors_of(launched):
        if path not in owners:
            if path not in launched.constants:
                return None  # given in a form that has no role
            if id(tensor) not in copies:
                copies[id(tensor)] = kept_copy(tensor)
            aliases[path] = copies[id(tensor)]
            if aliases[path].stride() != tensor.stride():
                return None
            held[id(aliases[path])] = aliases[path]
            continue
        place = owners[path]
        if storage_of(tensor) != storage_of(given[place]):
            return None
        offset = tensor.data_ptr() - given[place].data_ptr()
        # A tensor object of its own for every field, so that each can be told from the others.
        aliases[path] = tensor.detach()
        addresses[id(aliases[path])] = Address(place, offset)
        made[path] = _argument(place, tensor, given[place], offset)
    inputs = _with_tensors(launched.inputs, "inputs", aliases)
    return Fitted(inputs, _with_tensors(launched.outputs, "outputs", aliases), addresses, made)


def _tensors_of(launched: LaunchedCall) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _fields_of(launched.inputs, "inputs")
    yield from _fields_of(launched.outputs, "outputs")


def _fields_of(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for i, inner in enumerate(value):
            yield from _fields_of(inner, f"{path}[{i}]")
    elif is_dataclass(value):
        for known in fields(value):
            yield from _fields_of(getattr(value, known.name), f"{path}.{known.name}")


def _with_tensors(value: Any, path: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Inputs or outputs with the tensors at these paths in the place of their own."""
    if path in tensors:
        return tensors[path]
    if type(value) is tuple:
        return tuple(_with_tensors(v, f"{path}[{i}]", tensors) for i, v in enumerate(value))
    if not is_dataclass(value) or not any(name.startswith(f"{path}.") for name in tensors):
        return value
    changes = {
        known.name: _with_tensors(getattr(value, known.name), f"{path}.{known.name}", tensors)
        for known in fields(value)
    }
    return replace(value, **changes)  # type: ignore[type-var]


def relaunch_of(launcher: Launcher, fit: Fitted) -> Callable[[Sequence[torch.Tensor]], None]:
    """Launches by the launcher itself, on inputs and outputs made of a call's tensors."""
    # Without the tensors of the call at hand, which would be kept alive.
    made = fit.made
    inputs = _with_tensors(fit.inputs, "inputs", dict.fromkeys(made, _NO_TENSOR))
    outputs = _with_tensors(fit.outputs, "outputs", dict.fromkeys(made, _NO_TENSOR))
    launch = launcher.launch

    def relaunch(given: Sequence[torch.Tensor]) -> None:
        tensors = {path: make(given) for path, make in made.items()}
        launch(_with_tensors(inputs, "inputs", tensors), _with_tensors(outputs, "outputs", tensors))

    return relaunch


_NO_TENSOR = torch.empty(0)


def _argument(
    place: int, tensor: torch.Tensor, source: torch.Tensor, offset_bytes: int
) -> _Argument:
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    is_same = (shape, stride, dtype) == (source.shape, source.stride(), source.dtype)
    if is_same and offset_bytes == 0:
        return lambda given: given[place]
    offset = offset_bytes // tensor.element_size()

    def view(given: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = given[place] if given[place].dtype == dtype else given[place].view(dtype)
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    return view


def storage_of(tensor: torch.Tensor) -> int:
    """Where the memory behind a tensor begins."""
    return tensor.untyped_storage().data_ptr()
