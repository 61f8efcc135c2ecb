"""How a call is spelt: which arguments are given in which form, and the tensors and options in it.

An argument is a tensor, an option, or holds some of either: a sequence, a page table. The parts of
those that hold some follow the arguments themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

__all__ = ["PLAIN", "Leaves", "Nest", "Pick", "by_name", "flat_values", "leaves_of", "picker"]

PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))
"""Types of options: equal values of one of these mean the same."""
_SEQUENCES = (tuple, list)

Pick = Callable[[Sequence[Any]], tuple[Any, ...]]


class Nest(NamedTuple):
    """An argument that holds others."""

    place: int
    kind: type
    size: int
    parts: Callable[[Any], tuple[Any, ...]] | None
    """None: it is a sequence of them."""


@dataclass(frozen=True)
class Leaves:
    """What a call gives, taken apart."""

    nests: tuple[Nest, ...]
    names: tuple[str, ...]
    """Of the tensors."""
    tensors: tuple[tuple[int, torch.Tensor], ...]
    """With their places among the values."""
    option_places: tuple[int, ...]
    options: tuple[Any, ...]


def leaves_of(names: Sequence[str], values: Sequence[Any]) -> Leaves | None:
    """The call, taken apart; None where an argument is of a kind that no call is prepared for."""
    nests: list[Nest] = []
    flat: list[tuple[str, Any]] = list(zip(names, values, strict=True))
    for place, (name, value) in enumerate(flat):  # which grows: parts may have parts
        if type(value) in _SEQUENCES:
            nests.append(Nest(place, type(value), len(value), None))
            # A sequence of one is what it holds: that is how operators spell a tensor.
            own = [name] if len(value) == 1 else [f"{name}[{i}]" for i in range(len(value))]
            flat += zip(own, value, strict=True)
        elif is_dataclass(value) and not isinstance(value, type):
            own = [known.name for known in fields(value)]
            parts = _fields_getter(own)
            nests.append(Nest(place, type(value), len(own), parts))
            flat += zip([f"{name}.{field}" for field in own], parts(value), strict=True)
    held = {nest.place for nest in nests}
    tensors: list[tuple[str, int, torch.Tensor]] = []
    options: list[tuple[int, Any]] = []
    for place, (name, value) in enumerate(flat):
        if isinstance(value, torch.Tensor):
            tensors.append((name, place, value))
        elif type(value) in PLAIN:
            options.append((place, value))
        elif place not in held:
            return None
    return Leaves(
        nests=tuple(nests),
        names=tuple(name for name, _, _ in tensors),
        tensors=tuple((place, tensor) for _, place, tensor in tensors),
        option_places=tuple(place for place, _ in options),
        options=tuple(value for _, value in options),
    )


def flat_values(values: tuple[Any, ...], nests: Sequence[Nest]) -> tuple[Any, ...] | None:
    """The values followed by those that they hold; None where they hold them in another form."""
    for place, kind, size, parts_of in nests:
        value = values[place]
        found: type = type(value)
        if found is not kind:
            return None
        parts = value if parts_of is None else parts_of(value)
        if len(parts) != size:
            return None
        values = (*values, *parts)
    return values


def picker(indices: Sequence[int]) -> Pick:
    """The elements at these places, as a tuple also where there is one or none.

    One getter in C: neighbours are a slice, which is a tuple of any length.
    """
    first = indices[0] if indices else 0
    if list(indices) == list(range(first, first + len(indices))):
        return itemgetter(slice(first, first + len(indices)))
    return itemgetter(*indices)


def by_name(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """The values of these names in a mapping, as a tuple; a KeyError where one is missing."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: tuple([values[name] for name in names])


def _fields_getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
