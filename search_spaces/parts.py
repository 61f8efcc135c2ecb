"""Algorithms and parts of a template that launches independent kernels one after the other.

The parameters that belong to no part choose the algorithm. For a given algorithm each part is a
space of its own: its parameters vary, all others are held.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..kernels.base import Config, ParameterValue
from .constraints import Constraint
from .parameters import Parameter, filled
from .remembered import Remembered
from .space import SearchSpace

__all__ = [
    "Algorithm",
    "PartScope",
    "algorithms",
    "has_parts",
    "other_algorithms",
    "part_space",
    "seeded_algorithms",
]

_NUM_DRAWN = 500
"""Configs that are drawn to find a valid one of an algorithm that no seed belongs to."""


@dataclass(frozen=True)
class Algorithm:
    """A template under fixed values of its shared parameters."""

    space: SearchSpace
    """Valid configs of the algorithm; the shared parameters have one value each."""

    @property
    def shared(self) -> dict[str, ParameterValue]:
        """The parameters that belong to no part, with their values."""
        return {p.name: p.values[0] for p in self.space.parameters if not p.part}

    @property
    def part_names(self) -> tuple[str, ...]:
        """The parts that have parameters."""
        return tuple(dict.fromkeys(p.part for p in self.space.parameters if p.part))

    def __str__(self) -> str:
        values = " ".join(f"{name}={value}" for name, value in sorted(self.shared.items()))
        return f"{self.space.template} {values}".strip()


@dataclass(frozen=True)
class PartScope:
    """One part of an algorithm while all others are held.

    A config of the part has the shared parameters and its own; ``whole`` completes it.
    """

    part: str
    base: Config
    """Complete config that the other parts are held at."""
    own: frozenset[str]
    """Parameters of the part."""
    shared: frozenset[str]
    """Parameters of no part."""

    @classmethod
    def of(cls, algorithm: Algorithm, part: str, base: Config) -> PartScope:
        """The scope of a part beside ``base``, a config of the algorithm."""
        own = frozenset(p.name for p in algorithm.space.parameters if p.part == part)
        return cls(part, base, own, frozenset(algorithm.shared))

    def whole(self, config: Config) -> Config:
        """The complete config that has this part's values and holds the rest."""
        held = {name: value for name, value in self.base.values if name not in self.own}
        return Config.of(config.template, {**held, **config.as_dict()})

    def of_whole(self, config: Config) -> Config:
        """What a complete config says of the part."""
        names = self.own | self.shared
        return Config.of(config.template, {n: v for n, v in config.values if n in names})


def has_parts(space: SearchSpace) -> bool:
    """Whether any parameter belongs to a part."""
    return any(parameter.part for parameter in space.parameters)


def algorithms(space: SearchSpace) -> tuple[Algorithm, ...]:
    """The algorithms that have a valid config: the default's first, then those of seeds."""
    return tuple(seeded_algorithms(space)) + tuple(other_algorithms(space))


def seeded_algorithms(space: SearchSpace) -> Iterator[Algorithm]:
    """Those of the default and the seeds, in their order; made one after the other."""
    narrow = _Narrowing(space)
    return (
        Algorithm(found) for shared in narrow.seeded if (found := narrow.to(shared)) is not None
    )


def other_algorithms(space: SearchSpace, rng: random.Random | None = None) -> Iterator[Algorithm]:
    """The rest, made one after the other; in random order if ``rng`` is given.

    To find that one has no valid config takes milliseconds, and there may be hundreds: who wants a
    few of them takes no more.
    """
    narrow = _Narrowing(space)
    rest = [shared for shared in _choices(space) if shared not in narrow.seeded]
    if rng is not None:
        rng.shuffle(rest)
    return (Algorithm(found) for found in map(narrow.to, rest) if found is not None)


def part_space(algorithm: Algorithm, scope: PartScope) -> SearchSpace:
    """The configs of the part: valid are those whose ``whole`` is."""
    space = algorithm.space
    names = scope.own | scope.shared
    complete = _Completing(scope)
    constraints = tuple(_beside(complete, constraint) for constraint in space.constraints)
    default = scope.of_whole(scope.base)
    return SearchSpace(
        template=space.template,
        parameters=tuple(p for p in space.parameters if p.name in names),
        constraints=constraints,
        default=default,
        seeds=tuple(scope.of_whole(seed) for seed in space.valid_seeds()),
    )


class _Completing:
    """``PartScope.whole``, not done anew for each constraint of one config."""

    def __init__(self, scope: PartScope) -> None:
        self._scope = scope
        self._held = {n: value for n, value in scope.base.values if n not in scope.own}
        self._config: Config | None = None
        self._values: dict[str, ParameterValue] = {}

    def values(self, config: Config) -> dict[str, ParameterValue]:
        """Those of the complete config."""
        if self._config is not config:
            self._config, self._values = config, {**self._held, **dict(config.values)}
        return self._values

    def whole(self) -> Config:
        """The complete config of the one whose values were asked for last."""
        assert self._config is not None
        return Config.of(self._config.template, self._values)


def _beside(complete: _Completing, constraint: Constraint) -> Constraint:
    known = Remembered.of(constraint)
    return Constraint(
        constraint.name, lambda config: known.check(complete.values(config), complete.whole)
    )


def _shared_names(space: SearchSpace) -> list[str]:
    return [p.name for p in space.parameters if not p.part]


def _present(values: Mapping[str, ParameterValue | None]) -> dict[str, ParameterValue]:
    return {name: value for name, value in values.items() if value is not None}


def _choices(space: SearchSpace) -> Iterator[dict[str, ParameterValue]]:
    """Every combination of values of the shared parameters, constraints not applied."""
    shared = [p for p in space.parameters if not p.part]

    def extend(
        index: int, chosen: dict[str, ParameterValue]
    ) -> Iterator[dict[str, ParameterValue]]:
        if index == len(shared):
            yield chosen
            return
        parameter = shared[index]
        if not parameter.is_active(chosen):
            yield from extend(index + 1, chosen)
            return
        for value in parameter.values:
            yield from extend(index + 1, {**chosen, parameter.name: value})

    yield from extend(0, {})


class _Narrowing:
    """Makes the space of each algorithm."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._seeds = space.valid_seeds()
        names = _shared_names(space)
        shared = ({n: seed.get(n) for n in names} for seed in self._seeds)
        found = {str(values): values for values in map(_present, shared)}
        self.seeded = list(found.values())
        """Shared values of the default and the seeds, in their order, each once."""

    def to(self, chosen: dict[str, ParameterValue]) -> SearchSpace | None:
        """The space under these values of the shared parameters; None where nothing is valid."""
        space = self._space
        parameters = _under(space, chosen)
        seeds = tuple(seed for seed in self._seeds if _agrees(seed, chosen))
        start = next(iter(seeds), None) or _first_valid(space, parameters)
        if start is None:
            return None
        return SearchSpace(space.template, parameters, space.constraints, start, seeds)


def _under(space: SearchSpace, chosen: dict[str, ParameterValue]) -> tuple[Parameter, ...]:
    """The parameters that exist under these values of the shared ones."""
    parameters: list[Parameter] = []
    names: set[str] = set()
    for parameter in space.parameters:
        condition = parameter.active_when
        if parameter.name in chosen:
            kept = replace(parameter, values=(chosen[parameter.name],), active_when=None)
        elif not parameter.part or (condition is not None and condition.parent not in names):
            continue
        elif condition is not None and condition.parent in chosen:
            if not parameter.is_active(chosen):
                continue
            kept = replace(parameter, active_when=None)
        else:
            kept = parameter
        parameters.append(kept)
        names.add(kept.name)
    return tuple(parameters)


def _agrees(config: Config, chosen: Mapping[str, ParameterValue]) -> bool:
    return all(config.get(name) == value for name, value in chosen.items())


def _first_valid(space: SearchSpace, parameters: tuple[Parameter, ...]) -> Config | None:
    """A valid config: that with the default's values, middle ones elsewhere, or one by chance."""

    def usual(parameter: Parameter) -> ParameterValue:
        value = space.default.get(parameter.name)
        if value is not None and value in parameter.values:
            return value
        return parameter.values[len(parameter.values) // 2]

    rng = random.Random(0)

    def drawn(parameter: Parameter) -> ParameterValue:
        return rng.choice(parameter.values)

    chosen = itertools.chain([usual], itertools.repeat(drawn, _NUM_DRAWN))
    candidates = (Config.of(space.template, filled(parameters, choose)) for choose in chosen)
    return next((c for c in candidates if space.check(c) is None), None)
