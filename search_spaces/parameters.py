"""Tunable parameters: their values, order and the choice they hang under. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..kernels.base import ParameterValue

__all__ = ["ActiveWhen", "Parameter", "categorical", "filled", "ordered", "powers_of_two"]


@dataclass(frozen=True)
class ActiveWhen:
    """A parameter exists only where ``parent`` has one of ``values``."""

    parent: str
    values: tuple[ParameterValue, ...]


@dataclass(frozen=True)
class Parameter:
    """One tunable: its admissible values and how they relate."""

    name: str
    values: tuple[ParameterValue, ...]
    """All admissible values, in order where ``is_ordered``."""
    is_ordered: bool
    """Whether neighbours in ``values`` behave alike (a size) or not (a nominal choice)."""
    active_when: ActiveWhen | None = None
    """None for a parameter that every config has."""
    part: str = ""
    """Part of the template (``KernelTemplate.parts``) that alone it concerns; empty for a parameter
    that several share or that chooses the algorithm."""

    def __post_init__(self) -> None:
        assert self.values, f"parameter {self.name!r} has no values"
        assert len(set(self.values)) == len(self.values), f"{self.name!r} repeats a value"

    def is_active(self, values: Mapping[str, ParameterValue]) -> bool:
        """Whether it exists under these values; a parent that is not among them has none."""
        condition = self.active_when
        return condition is None or values.get(condition.parent) in condition.values

    def neighbours(self, value: ParameterValue) -> tuple[ParameterValue, ...]:
        """The values one step away: adjacent ones if ordered, else all others."""
        index = self.values.index(value)
        if not self.is_ordered:
            return tuple(v for v in self.values if v != value)
        return tuple(self.values[i] for i in (index - 1, index + 1) if 0 <= i < len(self.values))


def filled(
    parameters: Iterable[Parameter], choose: Callable[[Parameter], ParameterValue]
) -> dict[str, ParameterValue]:
    """A value for each parameter that exists under those before it; parents come first."""
    values: dict[str, ParameterValue] = {}
    for parameter in parameters:
        if parameter.is_active(values):
            values[parameter.name] = choose(parameter)
    return values


def ordered(
    name: str, *values: int, active_when: ActiveWhen | None = None, part: str = ""
) -> Parameter:
    """A parameter whose listed integers are sizes: adjacent values behave alike."""
    return Parameter(name, tuple(values), True, active_when, part)


def powers_of_two(
    name: str, low: int, high: int, *, active_when: ActiveWhen | None = None, part: str = ""
) -> Parameter:
    """Every power of two in [low, high]; both ends are powers of two."""
    assert 0 < low <= high
    assert low.bit_count() == high.bit_count() == 1
    values = tuple(1 << e for e in range(low.bit_length() - 1, high.bit_length()))
    return Parameter(name, values, True, active_when, part)


def categorical(
    name: str, *values: ParameterValue, active_when: ActiveWhen | None = None, part: str = ""
) -> Parameter:
    """A nominal choice: no value is nearer to another."""
    return Parameter(name, tuple(values), False, active_when, part)
