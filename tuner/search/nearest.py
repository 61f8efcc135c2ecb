"""Finds the untried valid config that is nearest to a proposal.

A sampler proposes in the product of all parameters; constraints and what was tried before leave
holes in it. Moving a proposal to the nearest untried config keeps most of what the sampler meant,
always succeeds while one is left, and needs one vector operation over the enumerated space.
"""

from __future__ import annotations

import random
from functools import cached_property
from typing import Protocol

import numpy as np

from ...kernels.base import Config
from ...search_spaces.parameters import Parameter
from ...search_spaces.space import JointSpace, SearchSpace

__all__ = ["UntriedConfigs"]

_INACTIVE = -1


class UntriedConfigs:
    """The valid configs of a space that have not been handed out, by template."""

    def __init__(self, space: JointSpace) -> None:
        self._tables: dict[str, _Untried] = {
            part.template: _Table(part) if part.is_enumerated else _Sampled(part)
            for part in space.spaces
        }

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables.values())

    def __contains__(self, config: Config) -> bool:
        table = self._tables.get(config.template)
        return table is not None and config in table

    def remove(self, config: Config) -> None:
        """Marks a config as handed out; one outside the space is ignored."""
        table = self._tables.get(config.template)
        if table is not None:
            table.remove(config)

    def nearest(self, proposal: Config, rng: random.Random) -> Config | None:
        """The proposal itself if untried, else the nearest; None when no config is left.

        Of several at the same distance ``rng`` chooses. Where the template of the proposal is used
        up, a random config of another one.
        """
        table = self._tables.get(proposal.template)
        if table is None or not len(table):
            left = [other for other in self._tables.values() if len(other)]
            return rng.choice(left).any(rng) if left else None
        return proposal if proposal in table else table.nearest(proposal, rng)


class _Untried(Protocol):
    """What is left of one template's configs."""

    def __len__(self) -> int: ...

    def __contains__(self, config: Config) -> bool: ...

    def remove(self, config: Config) -> None: ...

    def any(self, rng: random.Random) -> Config: ...

    def nearest(self, proposal: Config, rng: random.Random) -> Config: ...


class _Sampled:
    """One template whose configs are too many to list: only what was handed out is held."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._tried: set[Config] = set()
        self._bound = space.count()

    def __len__(self) -> int:
        # Far more than any search tries: what counts is that some are left.
        return max(0, self._bound - len(self._tried))

    def __contains__(self, config: Config) -> bool:
        return config not in self._tried and self._space.check(config) is None

    def remove(self, config: Config) -> None:
        self._tried.add(config)

    def any(self, rng: random.Random) -> Config:
        while (config := self._space.sample(rng)) in self._tried:
            pass
        return config

    def nearest(self, proposal: Config, rng: random.Random) -> Config:
        """A valid one-step neighbour that is untried, else any untried config."""
        near = [c for c in self._space.neighbours(proposal) if c not in self._tried]
        return rng.choice(near) if near else self.any(rng)


class _Table:
    """One template's configs as rows of value indices."""

    def __init__(self, space: SearchSpace) -> None:
        self._configs = tuple(space)
        self._parameters = space.parameters
        self._row_of = {config: row for row, config in enumerate(self._configs)}
        self._is_untried = np.ones(len(self._configs), dtype=bool)
        self._num_untried = len(self._configs)

    @cached_property
    def _codes(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
        """A row a config; only for proposals that are not in the space or were tried."""
        return np.array([self._encode(c) for c in self._configs], dtype=np.int16)

    def __len__(self) -> int:
        return self._num_untried

    def __contains__(self, config: Config) -> bool:
        row = self._row_of.get(config)
        return row is not None and bool(self._is_untried[row])

    def remove(self, config: Config) -> None:
        if config in self:
            self._is_untried[self._row_of[config]] = False
            self._num_untried -= 1

    def any(self, rng: random.Random) -> Config:
        rows = np.flatnonzero(self._is_untried)
        return self._configs[int(rng.choice(rows))]

    def nearest(self, proposal: Config, rng: random.Random) -> Config:
        rows = np.flatnonzero(self._is_untried)
        distances = self._distances(self._encode(proposal), self._codes[rows])
        closest = rows[distances <= distances.min() + 1e-9]
        return self._configs[int(rng.choice(closest))]

    def _encode(self, config: Config) -> list[int]:
        values = config.as_dict()
        return [
            p.values.index(values[p.name]) if p.name in values else _INACTIVE
            for p in self._parameters
        ]

    def _distances(
        self, code: list[int], codes: np.ndarray[tuple[int, ...], np.dtype[np.int16]]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Sum over parameters: steps apart over the range if ordered, else 1 where they differ."""
        total = np.zeros(len(codes))
        for column, parameter in enumerate(self._parameters):
            mine, theirs = code[column], codes[:, column]
            differs = (theirs != mine).astype(float)
            if parameter.is_ordered and mine != _INACTIVE:
                steps = np.abs(theirs - mine) / _span(parameter)
                differs = np.where(theirs == _INACTIVE, differs, steps)
            total += differs
        return total


def _span(parameter: Parameter) -> int:
    return max(1, len(parameter.values) - 1)
