"""What a prepared call enqueues: compiled kernels with their arguments, or the launcher again.

``prepared`` owns the conditions but those on addresses, which are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from .launched_call import LaunchedCall, Role, fitted, owners_of, relaunch_of, storage_of
from .launchers import OwnedLauncher
from .overlap import is_in_place_of, reach_bytes

__all__ = ["PreparedLaunches", "prepare_launches"]

MAX_ADDRESSES = 128
"""Sets of addresses that a prepared call remembers; beyond it they are forgotten together. Caches
differ by layer and allocators give the same blocks again, so one call meets few sets."""
_UNALIGNED = 15
"""Bits of an address that kernels are specialised on: whether it is a multiple of 16."""
_unaligned_bits = _UNALIGNED.__and__

_Arguments = tuple[tuple[Any, ...], ...]
"""Of every launch of a step."""
_address_of = torch.Tensor.data_ptr


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
    are_aligned: bool
    """Whether all of these are 0."""
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
            if storage_of(given[a]) != storage_of(given[b]):
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
        if self.are_aligned:
            if any(map(_unaligned_bits, addresses)):
                return None
        elif [address & _UNALIGNED for address in addresses] != self.remainders:
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
        only = steps[0].compiled[0]
        pick, constants = only.pick, only.constants
        return lambda addresses: ((pick(addresses + constants),),)
    return lambda addresses: tuple(
        [tuple([launch.arguments(addresses) for launch in step.compiled]) for step in steps]
    )


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
    fits = []
    for call in launched:
        fields_of_call = fitted(call, owners_of(roles, places, call.step), given, held)
        if fields_of_call is None:
            return None
        fits.append(fields_of_call)
    # One numbering of the addresses behind offsets for all steps.
    recorded = [
        record(call.owned.launcher, fit.inputs, fit.outputs, fit.addresses, held) or ()
        for call, fit in zip(launched, fits, strict=True)
    ]
    flat, extra = without_offsets([launch for part in recorded for launch in part], len(given))
    total, launches = len(given) + len(extra), iter(flat)
    steps = tuple(
        _Step(
            call.owned,
            tuple([bound_launch(next(launches), total, stream) for _ in part]),
            relaunch_of(call.owned.launcher, fit),
        )
        for call, fit, part in zip(launched, fits, recorded, strict=True)
    )
    apart, in_place = _apart(roles, places, given)
    return PreparedLaunches(
        steps=steps,
        owned=launched[0].owned,
        counted=tuple(result for call in launched for result in call.counted),
        first=steps[0].compiled[0].enqueue if [len(s.compiled) for s in steps] == [1] else None,
        remainders=[tensor.data_ptr() & _UNALIGNED for tensor in given],
        are_aligned=not any(tensor.data_ptr() & _UNALIGNED for tensor in given),
        extra=extra,
        apart=apart,
        in_place=in_place,
        neighbours=tuple(_neighbours(roles, places, given)),
        arguments_of=_arguments_getter(steps),
        held=tuple(held.values()),
    )


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
