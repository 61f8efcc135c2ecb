"""What a prepared call enqueues: compiled kernels with their arguments, or the launcher again.

Which tensor of the call a field of the launcher's inputs and outputs is, the roles say; how far
behind its start, follows from the launch that was made. ``prepared`` owns the conditions but those
on addresses, which are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol

import torch

from ..kernels.compiled_launch import (
    Address,
    BoundLaunch,
    bound_launch,
    record,
    without_offsets,
)
from ..tuner import capture
from ..tuner.dispatch import LookupResult
from .launchers import OwnedLauncher
from .overlap import reach_bytes

__all__ = ["LaunchedCall", "PreparedLaunches", "Role", "prepare_launches", "tensor_at"]

MAX_ADDRESSES = 128
"""Sets of addresses that a prepared call remembers; beyond it they are forgotten together. Caches
differ by layer and allocators give the same blocks again, so one call meets few sets."""
_ALIGNMENT_BYTES = 16
"""What kernels are specialised on: an address modulo this."""

_Arguments = tuple[tuple[Any, ...], ...]
"""Of every launch."""
_address_of = torch.Tensor.data_ptr


@dataclass(frozen=True)
class Role:
    """What a tensor argument is to the launch."""

    paths: tuple[str, ...] = ()
    """Fields of inputs and outputs that are it, or a view of it whose place follows from its shape
    and strides: ``inputs.q``, ``outputs.out``. None: only the checks look at it."""
    is_output: bool = False
    """It is allocated where the caller gives none, and the call returns it."""
    apart_from: int | None = None
    """An argument with which it may have no byte in common."""
    behind: int | None = None
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


@dataclass(frozen=True)
class PreparedLaunches:
    """The launches of one call, and the conditions on its addresses."""

    owned: OwnedLauncher
    counted: tuple[LookupResult, ...]
    compiled: tuple[BoundLaunch, ...] | None
    """None: the launcher itself launches, on inputs and outputs made from the call's tensors."""
    first: Callable[[tuple[Any, ...]], object] | None
    """Enqueues where there is one compiled launch."""
    relaunch: Callable[[Sequence[torch.Tensor]], None]
    remainders: list[int]
    """Of every address, by the alignment."""
    extra: tuple[Address, ...]
    """Addresses that follow those of the tensors."""
    apart: tuple[tuple[int, int, int, int], ...]
    """(a, b, bytes that a reaches, bytes that b reaches)."""
    neighbours: tuple[tuple[int, int, int], ...]
    """(a, b, bytes from a to b)."""
    held: tuple[torch.Tensor, ...]
    """Constants that the launches read."""
    known: dict[tuple[int, ...], _Arguments] = field(default_factory=dict)
    """Arguments of the launches for addresses that meet the conditions."""

    def enqueue(self, given: Sequence[torch.Tensor]) -> bool:
        """Enqueues for these tensors; False where their addresses break a condition."""
        addresses = tuple(map(_address_of, given))
        arguments = self.known.get(addresses)
        if arguments is None:
            arguments = self._arguments(addresses)
            if arguments is None:
                return False
        for a, b, _ in self.neighbours:
            if _storage_of(given[a]) != _storage_of(given[b]):
                return False
        owned = self.owned
        owned.was_used = True
        if capture.recorder is not None:
            for result in self.counted:
                capture.recorder.count(result)
        if self.first is not None:
            self.first(arguments[0])  # one launch cannot interleave with another
            return True
        with owned.lock:
            if self.compiled is None:
                self.relaunch(given)
                return True
            for launch, values in zip(self.compiled, arguments, strict=True):
                launch.enqueue(values)
        return True

    def _arguments(self, addresses: tuple[int, ...]) -> _Arguments | None:
        """What the launches take for new addresses; None where these break a condition."""
        if [address % _ALIGNMENT_BYTES for address in addresses] != self.remainders:
            return None
        for a, b, reach_a, reach_b in self.apart:
            if -reach_b < addresses[b] - addresses[a] < reach_a:
                return None
        for a, b, distance in self.neighbours:
            if addresses[b] - addresses[a] != distance:
                return None
        extra = [addresses[extra.index] + extra.offset_bytes for extra in self.extra]
        whole = (*addresses, *extra)
        arguments = tuple([launch.arguments(whole) for launch in self.compiled or ()])
        if len(self.known) >= MAX_ADDRESSES:
            self.known.clear()
        self.known[addresses] = arguments
        return arguments


class _Argument(Protocol):
    """Makes a field of the inputs or outputs from the call's tensors."""

    def __call__(self, given: Sequence[torch.Tensor], /) -> torch.Tensor: ...


def prepare_launches(
    roles: Sequence[Role],
    places: Mapping[int, int],
    given: Sequence[torch.Tensor],
    launched: LaunchedCall,
    stream: int,
) -> PreparedLaunches | None:
    """What repeats the launched call for other tensors.

    None where a field was copied from an argument, so that another call must copy, too, or where it
    is not known from which argument it comes.

    Args:
        roles: Of all tensor arguments.
        places: Of the arguments that are given, and the outputs that were allocated, by role.
        given: Those tensors.
        launched: The call.
        stream: Where compiled kernels are to be enqueued.
    """
    owners = {path: places[i] for i, role in enumerate(roles) for path in role.paths if i in places}
    made: dict[str, _Argument] = {}
    aliases: dict[str, torch.Tensor] = {}
    addresses: dict[int, Address] = {}
    held: dict[int, torch.Tensor] = {}
    for path, tensor in _tensors_of(launched):
        if path not in owners:
            if path not in launched.constants:
                return None  # given in a form that has no role
            held[id(tensor)] = tensor
            continue
        place = owners[path]
        if _storage_of(tensor) != _storage_of(given[place]):
            return None
        offset = tensor.data_ptr() - given[place].data_ptr()
        # A tensor object of its own for every field, so that each can be told from the others.
        aliases[path] = tensor.detach()
        addresses[id(aliases[path])] = Address(place, offset)
        made[path] = _argument(place, tensor, given[place], offset)
    owned = launched.owned
    recorded = record(
        owned.launcher,
        _with_tensors(launched.inputs, "inputs", aliases),
        _with_tensors(launched.outputs, "outputs", aliases),
        addresses,
        held,
    )
    launches, extra = without_offsets(recorded or (), len(given))
    total = len(given) + len(extra)
    compiled = tuple(bound_launch(launch, total, stream) for launch in launches)
    return PreparedLaunches(
        owned=owned,
        counted=launched.counted,
        compiled=compiled or None,
        first=compiled[0].enqueue if len(compiled) == 1 else None,
        relaunch=_relaunch(launched, made),
        remainders=[tensor.data_ptr() % _ALIGNMENT_BYTES for tensor in given],
        extra=extra,
        apart=tuple(_apart(roles, places, given)),
        neighbours=tuple(_neighbours(roles, places, given)),
        held=tuple(held.values()),
    )


def tensor_at(launched: LaunchedCall, path: str) -> torch.Tensor | None:
    """The field of inputs or outputs at this path."""
    value: Any = launched
    for name in path.split("."):
        value = getattr(value, name)
    return value if isinstance(value, torch.Tensor) else None


def _tensors_of(launched: LaunchedCall) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _fields_of(launched.inputs, "inputs")
    yield from _fields_of(launched.outputs, "outputs")


def _fields_of(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    for known in fields(value):
        inner = getattr(value, known.name)
        if isinstance(inner, torch.Tensor):
            yield f"{path}.{known.name}", inner
        elif is_dataclass(inner):
            yield from _fields_of(inner, f"{path}.{known.name}")


def _with_tensors(value: Any, path: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The dataclass with the tensors at these paths in the place of its own."""
    changes: dict[str, Any] = {}
    for known in fields(value):
        inner, at = getattr(value, known.name), f"{path}.{known.name}"
        if at in tensors:
            changes[known.name] = tensors[at]
        elif is_dataclass(inner) and any(name.startswith(f"{at}.") for name in tensors):
            changes[known.name] = _with_tensors(inner, at, tensors)
    return replace(value, **changes)


def _relaunch(
    launched: LaunchedCall, made: Mapping[str, _Argument]
) -> Callable[[Sequence[torch.Tensor]], None]:
    # Without the tensors of the call at hand, which would be kept alive.
    inputs = _with_tensors(launched.inputs, "inputs", dict.fromkeys(made, _NO_TENSOR))
    outputs = _with_tensors(launched.outputs, "outputs", dict.fromkeys(made, _NO_TENSOR))
    launch = launched.owned.launcher.launch

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


def _apart(
    roles: Sequence[Role], places: Mapping[int, int], given: Sequence[torch.Tensor]
) -> Iterator[tuple[int, int, int, int]]:
    for i, role in enumerate(roles):
        if role.apart_from is not None and role.apart_from in places and i in places:
            a, b = places[i], places[role.apart_from]
            yield a, b, reach_bytes(given[a]), reach_bytes(given[b])


def _neighbours(
    roles: Sequence[Role], places: Mapping[int, int], given: Sequence[torch.Tensor]
) -> Iterator[tuple[int, int, int]]:
    for i, role in enumerate(roles):
        if role.behind is not None and role.behind in places and i in places:
            a, b = places[role.behind], places[i]
            yield a, b, given[b].data_ptr() - given[a].data_ptr()


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
