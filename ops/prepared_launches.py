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
from .overlap import is_in_place_of, reach_bytes

__all__ = ["LaunchedCall", "PreparedLaunches", "Role", "prepare_launches", "tensors_of_roles"]

MAX_ADDRESSES = 128
"""Sets of addresses that a prepared call remembers; beyond it they are forgotten together. Caches
differ by layer and allocators give the same blocks again, so one call meets few sets."""
_UNALIGNED = 15
"""Bits of an address that kernels are specialised on: whether it is a multiple of 16."""

_Arguments = tuple[tuple[Any, ...], ...]
"""Of every launch of a step."""
_address_of = torch.Tensor.data_ptr


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


@dataclass(frozen=True)
class _Step:
    """One launched call for other tensors."""

    owned: OwnedLauncher
    compiled: tuple[BoundLaunch, ...]
    """Empty: the launcher itself launches, on inputs and outputs made from the call's tensors."""
    relaunch: Callable[[Sequence[torch.Tensor]], None]

    def enqueue(self, given: Sequence[torch.Tensor], arguments: _Arguments) -> None:
        """Enqueues its launches for these tensors."""
        with self.owned.lock:
            self.owned.was_used = True
            if not self.compiled:
                self.relaunch(given)
                return
            for launch, values in zip(self.compiled, arguments, strict=True):
                launch.enqueue(values)


@dataclass(frozen=True)
class PreparedLaunches:
    """The launches of one call, and the conditions on its addresses."""

    steps: tuple[_Step, ...]
    owned: OwnedLauncher
    """That of the first step."""
    counted: tuple[LookupResult, ...]
    first: Callable[[tuple[Any, ...]], object] | None
    """Enqueues where there is one compiled launch."""
    remainders: list[int]
    """Of every address, by the alignment."""
    extra: tuple[Address, ...]
    """Addresses that follow those of the tensors."""
    apart: tuple[tuple[int, int, int, int], ...]
    """(a, b, bytes that a reaches, bytes that b reaches)."""
    in_place: tuple[tuple[int, int], ...]
    """(a, b) that start at the same address."""
    neighbours: tuple[tuple[int, int, int], ...]
    """(a, b, bytes from a to b)."""
    arguments_of: Callable[[tuple[int, ...]], tuple[_Arguments, ...]]
    """Takes the addresses of the tensors and the extra ones."""
    held: tuple[torch.Tensor, ...]
    """Constants that the launches read."""
    known: dict[tuple[int, ...], tuple[_Arguments, ...]] = field(default_factory=dict)
    """Arguments of every step's launches for addresses that meet the conditions."""

    def fits(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether the addresses of these tensors meet the conditions."""
        return self._arguments(tuple(map(_address_of, given))) is not None

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
        if capture.recorder is not None:
            for result in self.counted:
                capture.recorder.count(result)
        if self.first is not None:
            self.owned.was_used = True
            self.first(arguments[0][0])  # one launch cannot interleave with another
            return True
        for step, values in zip(self.steps, arguments, strict=True):
            step.enqueue(given, values)
        return True

    def _arguments(self, addresses: tuple[int, ...]) -> tuple[_Arguments, ...] | None:
        """What the launches take for new addresses; None where these break a condition."""
        if [address & _UNALIGNED for address in addresses] != self.remainders:
            return None
        for a, b, reach_a, reach_b in self.apart:
            if -reach_b < addresses[b] - addresses[a] < reach_a:
                return None
        for a, b in self.in_place:
            if addresses[a] != addresses[b]:
                return None
        for a, b, distance in self.neighbours:
            if addresses[b] - addresses[a] != distance:
                return None
        whole = addresses
        if self.extra:
            extra = [addresses[extra.index] + extra.offset_bytes for extra in self.extra]
            whole = (*addresses, *extra)
        arguments = self.arguments_of(whole)
        if len(self.known) >= MAX_ADDRESSES:
            self.known.clear()
        self.known[addresses] = arguments
        return arguments


def _arguments_getter(
    steps: Sequence[_Step],
) -> Callable[[tuple[int, ...]], tuple[_Arguments, ...]]:
    """What every step's launches take for addresses."""
    if [len(step.compiled) for step in steps] == [1]:
        only = steps[0].compiled[0].arguments
        return lambda addresses: ((only(addresses),),)
    return lambda addresses: tuple(
        [tuple([launch.arguments(addresses) for launch in step.compiled]) for step in steps]
    )


class _Argument(Protocol):
    """Makes a field of the inputs or outputs from the call's tensors."""

    def __call__(self, given: Sequence[torch.Tensor], /) -> torch.Tensor: ...


def prepare_launches(
    roles: Mapping[str, Role],
    tensors: Mapping[str, torch.Tensor],
    launched: Sequence[LaunchedCall],
    stream: int,
) -> PreparedLaunches | None:
    """What repeats the launched calls for other tensors.

    None where a field was copied from an argument, so that another call must copy, too, or where it
    is not known from which argument it comes.

    Args:
        roles: Of all tensor arguments, by name.
        tensors: The arguments that are given, then the outputs that were allocated, by name.
        launched: The calls, in order.
        stream: Where compiled kernels are to be enqueued.
    """
    given, places = list(tensors.values()), {name: i for i, name in enumerate(tensors)}
    held: dict[int, torch.Tensor] = {}
    fitted = []
    for call in launched:
        fields_of_call = _fitted(call, _owners(roles, places, call.step), given, held)
        if fields_of_call is None:
            return None
        fitted.append(fields_of_call)
    # One numbering of the addresses behind offsets for all steps.
    recorded = [
        record(call.owned.launcher, fit.inputs, fit.outputs, fit.addresses, held) or ()
        for call, fit in zip(launched, fitted, strict=True)
    ]
    flat, extra = without_offsets([launch for part in recorded for launch in part], len(given))
    total, launches = len(given) + len(extra), iter(flat)
    steps = tuple(
        _Step(
            call.owned,
            tuple([bound_launch(next(launches), total, stream) for _ in part]),
            _relaunch(call, fit.made),
        )
        for call, fit, part in zip(launched, fitted, recorded, strict=True)
    )
    apart, in_place = _apart(roles, places, given)
    return PreparedLaunches(
        steps=steps,
        owned=launched[0].owned,
        counted=tuple(result for call in launched for result in call.counted),
        first=steps[0].compiled[0].enqueue if [len(s.compiled) for s in steps] == [1] else None,
        remainders=[tensor.data_ptr() & _UNALIGNED for tensor in given],
        extra=extra,
        apart=apart,
        in_place=in_place,
        neighbours=tuple(_neighbours(roles, places, given)),
        arguments_of=_arguments_getter(steps),
        held=tuple(held.values()),
    )


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


def _owners(roles: Mapping[str, Role], places: Mapping[str, int], step: str) -> dict[str, int]:
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
class _Fitted:
    """A launched call with a tensor object of its own for every field that is the call's."""

    inputs: Any
    outputs: Any
    addresses: dict[int, Address]
    """By the identity of these tensors."""
    made: dict[str, _Argument]


def _fitted(
    launched: LaunchedCall,
    owners: Mapping[str, int],
    given: Sequence[torch.Tensor],
    held: dict[int, torch.Tensor],
) -> _Fitted | None:
    made: dict[str, _Argument] = {}
    aliases: dict[str, torch.Tensor] = {}
    addresses: dict[int, Address] = {}
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
    inputs = _with_tensors(launched.inputs, "inputs", aliases)
    return _Fitted(inputs, _with_tensors(launched.outputs, "outputs", aliases), addresses, made)


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
    roles: Mapping[str, Role], places: Mapping[str, int], given: Sequence[torch.Tensor]
) -> tuple[tuple[tuple[int, int, int, int], ...], tuple[tuple[int, int], ...]]:
    """Pairs that must lie apart, and those of which one is in the place of the other."""
    apart, in_place = [], []
    for name, role in roles.items():
        for other in role.apart_from:
            if name in places and other in places:
                a, b = places[name], places[other]
                if is_in_place_of(given[a], given[b]):
                    in_place.append((a, b))
                else:
                    apart.append((a, b, reach_bytes(given[a]), reach_bytes(given[b])))
    return tuple(apart), tuple(in_place)


def _neighbours(
    roles: Mapping[str, Role], places: Mapping[str, int], given: Sequence[torch.Tensor]
) -> Iterator[tuple[int, int, int]]:
    for name, role in roles.items():
        if role.behind is not None and role.behind in places and name in places:
            a, b = places[role.behind], places[name]
            yield a, b, given[b].data_ptr() - given[a].data_ptr()


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
