"""Finds the rows that may serve a problem without reading all of them.

A row is checked when it is first needed: of 100,000 winners a look-up needs a handful. Rows are
told apart by the text of their problem, its dynamic fields cut out; each such text is parsed once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from .records import Provenance
from .winner_rows import DatabaseRead, SkippedRow, Winner, check_row, problem_of_row

__all__ = ["WinnerIndex"]


class _Place(NamedTuple):
    """A row: the rank of its database and its position there."""

    rank: int
    position: int


@dataclass
class _Family:
    """Rows whose problems differ in dynamic fields only."""

    places: dict[tuple[int, ...], list[_Place]] = field(default_factory=dict)
    """By the values of the dynamic fields."""


class WinnerIndex:
    """The rows of one operation in all databases, by problem."""

    def __init__(self, reads: Sequence[DatabaseRead], problem_type: type[Problem]) -> None:
        self._reads = reads
        self._op = problem_type.op
        self._fields = tuple(sorted(problem_type.dynamic_fields))
        names = "|".join(map(re.escape, self._fields))
        self._dynamic = re.compile(rf'"({names})":(\d+),?') if names else None
        self._families: dict[str, _Family] = {}
        self._checked: dict[_Place, Winner | SkippedRow] = {}
        self._place_all()

    def exact(self, problem: Problem) -> tuple[Winner, ...]:
        """The sound winners of this very problem, whatever their SKU."""
        family = self._families.get(problem.static_key(), _Family())
        return self._sound(family.places.get(self._values(problem), ()))

    def within(self, problem: Problem, factor: float) -> tuple[Winner, ...]:
        """The sound winners of problems with each dynamic field within this factor."""
        family = self._families.get(problem.static_key(), _Family())
        wanted = self._values(problem)
        return self._sound(
            place
            for values, places in family.places.items()
            if _is_in_range(wanted, values, factor)
            for place in places
        )

    def count_farther(self, problem: Problem, factor: float, device: DeviceSpec) -> int:
        """Measured rows of the SKU with the same static fields, but out of range; unchecked."""
        family = self._families.get(problem.static_key(), _Family())
        wanted = self._values(problem)
        return sum(
            self._is_measured_on(place, device)
            for values, places in family.places.items()
            if not _is_in_range(wanted, values, factor)
            for place in places
        )

    def _is_measured_on(self, place: _Place, device: DeviceSpec) -> bool:
        row = self._reads[place.rank].row(place.position)
        return (row.get("compute_capability"), row.get("num_sms"), row.get("provenance")) == (
            device.compute_capability_text,
            device.num_sms,
            Provenance.MEASURED,
        )

    def all(self) -> tuple[Winner, ...]:
        """Every sound winner of the operation; checks all rows."""
        return self._sound(self._everywhere())

    def skipped(self) -> tuple[SkippedRow, ...]:
        """Every row that cannot serve; checks all rows."""
        checked = (self._check(place) for place in self._everywhere())
        return tuple(row for row in checked if isinstance(row, SkippedRow))

    def _everywhere(self) -> list[_Place]:
        return [
            _Place(rank, position)
            for rank, read in enumerate(self._reads)
            for position in read.rows_by_op.get(self._op, ())
        ]

    def _values(self, problem: Problem) -> tuple[int, ...]:
        return tuple(getattr(problem, name) for name in self._fields)

    def _sound(self, places: Iterable[_Place]) -> tuple[Winner, ...]:
        checked = (self._check(place) for place in places)
        return tuple(row for row in checked if isinstance(row, Winner))

    def _check(self, place: _Place) -> Winner | SkippedRow:
        if place not in self._checked:
            read = self._reads[place.rank]
            self._checked[place] = check_row(read, place.rank, place.position)
        return self._checked[place]

    def _place_all(self) -> None:
        known: dict[str, _Family] = {}
        for rank, read in enumerate(self._reads):
            column = read.columns.index("problem") if "problem" in read.columns else None
            for position in read.rows_by_op.get(self._op, ()):
                text = None if column is None else read.values[position][column]
                self._place(_Place(rank, position), text, known)

    def _place(self, place: _Place, text: object, known: dict[str, _Family]) -> None:
        if self._dynamic is not None and isinstance(text, str):
            found = dict(self._dynamic.findall(text))
            family = known.get(self._dynamic.sub("", text))
            if family is not None and len(found) == len(self._fields):
                values = tuple(int(found[name]) for name in self._fields)
                family.places.setdefault(values, []).append(place)
                return
        problem = problem_of_row(self._reads[place.rank], place.position)
        if problem is None:
            return  # it cannot serve; ``skipped`` says why
        family = self._families.setdefault(problem.static_key(), _Family())
        family.places.setdefault(self._values(problem), []).append(place)
        if self._dynamic is not None and isinstance(text, str):
            known[self._dynamic.sub("", text)] = family


def _is_in_range(wanted: tuple[int, ...], values: tuple[int, ...], factor: float) -> bool:
    return all(b <= a * factor and a <= b * factor for a, b in zip(wanted, values, strict=True))
