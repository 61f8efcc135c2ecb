"""One prepared call: for which arguments it serves, and what it does then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..kernels.compiled_launch import has_launch_hooks
from ..tuner import dispatch
from ..tuner.dispatch_policy import policy_of_context
from .call_form import Leaves, Nest, Pick, by_name, flat_values, picker
from .debug_checks import is_debugging
from .launchers import keeps_launchers
from .prepared_launches import PreparedLaunches
from .prepared_results import Result
from .tensor_guard import tensor_guard

__all__ = ["MISSED", "Place", "PreparedCall", "Spelt", "Values", "spelt"]

MISSED: Final = object()
"""What is given where a call must go the long way."""

Values = tuple[Any, ...]
Place = tuple[int, int, bool]
"""Current device, its current stream, whether that is being captured."""


@dataclass(frozen=True)
class Spelt:
    """A call with its named arguments in an order of ours: tensors first, then options."""

    args: Values
    names: tuple[str, ...]
    values: Values


def spelt(args: Values, kwargs: Mapping[str, Any]) -> Spelt:
    """A call in that order."""
    names = sorted(kwargs, key=lambda name: not isinstance(kwargs[name], torch.Tensor))
    return Spelt(args, tuple(names), (*args, *[kwargs[name] for name in names]))


class PreparedCall:
    """One call, ready to be launched for tensors of the same kind."""

    # fmt: off
    __slots__ = (
        "__weakref__", "check", "generation", "has_numbers", "launches", "named", "needs_no_grad",
        "nests", "num_args", "num_named", "options", "pick_different", "pick_options",
        "pick_tensors", "place", "policy", "result", "twins", "types",
    )
    # fmt: on

    def __init__(self, spelt: Spelt, place: Place, leaves: Leaves, generation: int) -> None:
        self.num_args, self.num_named = len(spelt.args), len(spelt.names)
        self.named = by_name(spelt.names)
        self.place = place
        self.generation = generation
        self.policy = policy_of_context()
        self.nests: tuple[Nest, ...] = leaves.nests
        self.pick_tensors: Pick = picker([i for i, _ in leaves.tensors])
        self.pick_options: Pick = picker(leaves.option_places)
        self.options = leaves.options
        self.types = tuple(map(type, leaves.options))
        self.has_numbers = not {bool, int, float}.isdisjoint(self.types)
        given = [tensor for _, tensor in leaves.tensors]
        first = [next(i for i, x in enumerate(given) if x is tensor) for tensor in given]
        self.twins = tuple((i, place) for place, i in enumerate(first) if i != place)
        """Places of tensors that are one object: torch's guard takes each object once."""
        different = sorted(set(first))
        self.pick_different: Pick = picker(different)
        self.check: Callable[..., bool] = tensor_guard([given[i] for i in different])
        self.needs_no_grad = any(tensor.requires_grad for tensor in given)
        """Whether a tensor requires grad, which is refused where autograd would record."""
        self.result: Result | None = None
        self.launches: PreparedLaunches | None = None

    def given(self, args: Values, kwargs: Mapping[str, Any], place: Place) -> Values | None:
        """The tensors of a call of the same kind; None: it is another kind."""
        if place != self.place:
            return None
        values = self._flat(args, kwargs)
        if values is None:
            return None
        if self.options:
            options = self.pick_options(values)
            # Types first: 1 is True and 1.0, and to compare a number with a tensor would wait for
            # the device.
            if self.has_numbers and tuple(map(type, options)) != self.types:
                return None
            if options != self.options:
                return None
        tensors = self.pick_tensors(values)
        different = tensors
        if self.twins:
            if not all(tensors[a] is tensors[b] for a, b in self.twins):
                return None
            different = self.pick_different(tensors)
        return tensors if self.check(*different) else None

    def _flat(self, args: Values, kwargs: Mapping[str, Any]) -> Values | None:
        """All values in our order, with those that they hold; None where others are given."""
        if len(args) != self.num_args or len(kwargs) != self.num_named:
            return None
        try:
            values = (*args, *self.named(kwargs))
        except KeyError:
            return None
        return flat_values(values, self.nests) if self.nests else values

    def serve(self, given: Values) -> Any:
        """Enqueues the call for such tensors and returns its result; or ``MISSED``."""
        launches, result = self.launches, self.result
        if (
            launches is None
            or result is None
            or self.generation != dispatch.generation
            or self.policy is not policy_of_context()
            or (self.needs_no_grad and torch.is_grad_enabled())
            or is_debugging()
            or keeps_launchers()
            or has_launch_hooks()
        ):
            return MISSED
        if not result.allocations:
            return result.of(given) if launches.enqueue(given) else MISSED
        given = (*given, *[allocate() for allocate in result.allocations])
        return result.of((*given, None)) if launches.enqueue(given) else MISSED

    def release(self) -> None:
        """Never serves again: the launcher has another owner or is gone."""
        self.launches = None
