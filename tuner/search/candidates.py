"""The configs that a surrogate model scores, as rows of numbers.

A space that one fit may score whole is encoded once. Where it is larger, and where it is only
sampled, the candidates are what is near the best and random configs, encoded as they are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import numpy as np

from ...kernels.base import Config, ParameterValue
from ...search_spaces.parameters import Parameter
from ...search_spaces.space import JointSpace

__all__ = ["Candidates", "Encoder", "Matrix"]

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float32]]
MAX_SCORED = 20_000
"""Configs of an enumerated space that one fit scores."""
NUM_DRAWN = 1_000
"""Random configs that one fit scores where a space is only sampled."""
_INACTIVE = -1.0


class Encoder:
    """Configs as rows: the index of an ordered value, a column for each value of a nominal one.

    Of two values the index serves for a nominal parameter too. A parameter that a config lacks is
    -1, or all zeros where it has several columns. What has one value everywhere takes no column.
    """

    def __init__(self, space: JointSpace) -> None:
        self._absent: list[float] = []
        self._cells: dict[tuple[str, str, ParameterValue], tuple[int, float]] = {}
        self._template_column: dict[str, int] = {}
        for part in space.spaces:
            if len(space.spaces) > 1:
                self._template_column[part.template] = self._column(0.0)
            for parameter in part.parameters:
                if len(parameter.values) > 1 or parameter.active_when:
                    self._add(part.template, parameter)

    def _column(self, absent: float) -> int:
        self._absent.append(absent)
        return len(self._absent) - 1

    def _add(self, template: str, parameter: Parameter) -> None:
        values = parameter.values
        # One column where there are two values: twice would give them twice the weight.
        if parameter.is_ordered or len(values) == 2:
            column = self._column(_INACTIVE)
            cells = [(column, float(index)) for index in range(len(values))]
        else:
            cells = [(self._column(0.0), 1.0) for _ in values]
        for value, cell in zip(values, cells, strict=True):
            self._cells[template, parameter.name, value] = cell

    def rows(self, configs: Sequence[Config]) -> Matrix:
        """One row a config, in order."""
        absent = self._absent or [0.0]
        matrix = np.tile(np.array(absent, dtype=np.float32), (len(configs), 1))
        for row, config in enumerate(configs):
            if self._template_column:
                matrix[row, self._template_column[config.template]] = 1.0
            for name, value in config.values:
                cell = self._cells.get((config.template, name, value))
                if cell is not None:
                    matrix[row, cell[0]] = cell[1]
        return matrix


class Candidates:
    """Hands out untried configs with their rows."""

    def __init__(self, space: JointSpace, rng: random.Random) -> None:
        self._space = space
        self._rng = rng
        self._encoder = Encoder(space)
        self._configs = tuple(space) if space.is_enumerated else ()
        whole = self._configs if len(self._configs) <= MAX_SCORED else ()
        self._row_of = {config: row for row, config in enumerate(whole)}
        self._matrix = self._encoder.rows(whole)

    def rows(self, configs: Sequence[Config]) -> Matrix:
        """One row a config, in order."""
        if all(config in self._row_of for config in configs):
            return self._matrix[[self._row_of[config] for config in configs]]
        return self._encoder.rows(configs)

    def untried(
        self, tried: Collection[Config], around: Sequence[Config]
    ) -> tuple[list[Config], Matrix]:
        """Configs that are not ``tried``: all, or what is near ``around`` and random ones."""
        if self._row_of:
            is_left = np.ones(len(self._configs), dtype=bool)
            is_left[[self._row_of[config] for config in tried if config in self._row_of]] = False
            return [self._configs[row] for row in np.flatnonzero(is_left)], self._matrix[is_left]
        drawn = dict.fromkeys(self.near(tried, around))
        if self._configs:
            drawn |= dict.fromkeys(self._rng.sample(self._configs, MAX_SCORED))
        else:
            drawn |= dict.fromkeys(self.draw(NUM_DRAWN))
        found = [config for config in drawn if config not in tried]
        return found, self.rows(found)

    def near(self, tried: Collection[Config], centres: Sequence[Config]) -> list[Config]:
        """Untried configs one step away from one of ``centres``, without repeats."""
        found = (config for centre in centres for config in self._space.neighbours(centre))
        return [config for config in dict.fromkeys(found) if config not in tried]

    def draw(self, n: int) -> list[Config]:
        """Random valid configs, tried or not, without repeats; fewer where there are few.

        Templates take turns where their spaces are only sampled: their sizes are not known.
        """
        if self._configs:
            return self._rng.sample(self._configs, min(n, len(self._configs)))
        parts = self._space.spaces
        drawn = (parts[index % len(parts)].sample(self._rng) for index in range(n))
        return list(dict.fromkeys(drawn))
