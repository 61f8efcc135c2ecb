"""A sample of a space in which every pair of parameter values that can occur together does.

Faults of a kernel mostly come from one value or from two together, so such a sample finds them with
few configs. It is greedy and depends on nothing but the space, the seed, the configs that it starts
with and, where compiling is what costs, the kernels that configs share.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from ..kernels.base import Config, ParameterValue
from .parameters import Parameter, filled
from .space import SearchSpace

__all__ = ["CoveringSample", "KernelsOf", "Pair", "covering_sample", "pairs_of"]

Value = tuple[str, ParameterValue]
Pair = tuple[Value, Value]
"""Values of two parameters, by the parameters' names in sorted order."""
KernelsOf = Callable[[Config], Collection[Hashable]]
"""The kernels that a config has to be compiled for; equal ones are compiled once."""

_NUM_CANDIDATES = 24
"""Random configs from which a greedy step takes the best; as many again of kernels known."""
_MIN_GAIN = 8
"""Below this, random configs are a waste: each pair left is aimed at."""
_NUM_AIMED = 4
_MAX_REJECTIONS = 400
_MAX_REPEATS = 100
_CHECK_PRICE = 0.25
"""Of checking a config on the device, over that of compiling one kernel on one of 16 cores."""


@dataclass(frozen=True)
class CoveringSample:
    """Distinct configs, those that cover pairs first, and the pairs that none of them has."""

    configs: tuple[Config, ...]
    num_covering: int
    """How many of the first configs already cover every pair."""
    num_pairs: int
    """Pairs that are covered."""
    impossible: tuple[Pair, ...]
    """Pairs that no config has, or that none was found with where the space is not enumerated."""


def pairs_of(config: Config) -> set[Pair]:
    """Every pair of parameter values of a config."""
    return set(itertools.combinations(config.values, 2))


def covering_sample(
    space: SearchSpace,
    num_configs: int,
    *,
    seed: int,
    start: Sequence[Config] = (),
    kernels: KernelsOf | None = None,
) -> CoveringSample:
    """At least as many configs as cover every pair, and ``num_configs`` where the space has them.

    Args:
        space: where the configs come from.
        num_configs: wanted; filled up at random beyond what the pairs need.
        seed: of all choices.
        start: configs of the space that were checked before, for what they cover; the sample
            begins with them, and their kernels count as not compiled.
        kernels: with it, configs are preferred that cover much for few kernels more.
    """
    # Parameters and values are visited in a fixed order: sets of text are not.
    chosen = _Chosen(space, random.Random(seed), kernels)
    for config in start:
        chosen.add(config, is_compiled=False)
    if space.default not in chosen.configs:
        chosen.add(space.default)
    todo = dict.fromkeys(_candidate_pairs(space))
    impossible: list[Pair] = []
    if space.is_enumerated:
        possible = _possible_pairs(space)
        impossible = [pair for pair in todo if pair not in possible]
        _drop(todo, set(impossible))
    _drop(todo, chosen.covered)
    while todo:
        config = chosen.best(chosen.candidates(), todo)
        if chosen.worth(config, todo) < min(_MIN_GAIN, len(todo)):
            pair = next(iter(todo))
            aimed = chosen.candidates_with(pair)
            if not aimed:
                impossible.append(pair)
                del todo[pair]
                continue
            config = chosen.best(aimed, todo)
        chosen.add(config)
        _drop(todo, pairs_of(config))
    num_covering = len(chosen.configs)
    chosen.fill(num_configs)
    return CoveringSample(
        tuple(chosen.configs), num_covering, len(chosen.covered), tuple(impossible)
    )


class _Chosen:
    """The configs of a sample so far, and where further ones come from."""

    def __init__(self, space: SearchSpace, rng: random.Random, kernels: KernelsOf | None) -> None:
        self._space, self._rng, self._kernels = space, rng, kernels
        self.configs: dict[Config, None] = {}
        self.covered: set[Pair] = set()
        self._compiled: set[Hashable] = set()

    def add(self, config: Config, *, is_compiled: bool = True) -> None:
        """Takes a config into the sample."""
        self.configs[config] = None
        self.covered |= pairs_of(config)
        if self._kernels is not None and is_compiled:
            self._compiled.update(self._kernels(config))

    def price(self, config: Config) -> float:
        """What a config costs to check, by the kernels that are not compiled yet."""
        if self._kernels is None:
            return 1.0
        return _CHECK_PRICE + len(set(self._kernels(config)) - self._compiled)

    def worth(self, config: Config, todo: dict[Pair, None]) -> float:
        """New pairs for the price."""
        gain = sum(pair in todo for pair in pairs_of(config))
        return gain / self.price(config) if gain else 0.0

    def best(self, configs: Sequence[Config], todo: dict[Pair, None]) -> Config:
        """The config that is worth most."""
        return max(configs, key=lambda config: self.worth(config, todo))

    def candidates(self) -> list[Config]:
        """Random configs; where kernels count, relatives of the chosen ones too."""
        found = [self._space.sample(self._rng) for _ in range(_NUM_CANDIDATES)]
        return found + self._relatives({}) if self._kernels is not None else found

    def candidates_with(self, pair: Pair) -> list[Config]:
        """A few valid configs that have both values; none where none was found."""
        relatives = self._relatives(dict(pair)) if self._kernels is not None else []
        has_both = [c for c in relatives if all(value in c.values for value in pair)]
        return has_both + _configs_with(self._space, pair, self._rng)

    def fill(self, num_configs: int) -> None:
        """Adds configs that are not there yet: at random, of known kernels where these count."""
        space = self._space
        if space.is_enumerated and space.count() <= num_configs:
            self.configs.update(dict.fromkeys(space))
            return
        repeats = 0
        while len(self.configs) < num_configs and repeats < _MAX_REPEATS:
            drawn = [space.sample(self._rng)]
            if self._kernels is not None:
                drawn += self._relatives({})
            fresh = [config for config in drawn if config not in self.configs]
            repeats = 0 if fresh else repeats + 1
            if fresh:
                self.add(min(fresh, key=self.price))

    def _relatives(self, fixed: dict[str, ParameterValue]) -> list[Config]:
        """Valid configs close to chosen ones: such share kernels with them."""
        chosen = list(self.configs)
        found = []
        for _ in range(_NUM_CANDIDATES):
            base = self._rng.choice(chosen)
            wanted = self._changes(base, chosen, fixed)
            given = {**base.as_dict(), **wanted}
            config = _filled(self._space, given, self._rng)
            if config not in self.configs and self._space.check(config) is None:
                found.append(config)
        return found

    def _changes(
        self, base: Config, chosen: Sequence[Config], fixed: dict[str, ParameterValue]
    ) -> dict[str, ParameterValue]:
        """Values in place of the base's: some other part whole, or any value of a parameter."""
        if fixed and self._rng.random() < 0.5:
            return fixed
        parts = sorted({p.part for p in self._space.parameters if p.part})
        if parts and self._rng.random() < 0.5:
            taken = {part for part in parts if self._rng.random() < 0.5}
            own = {p.name for p in self._space.parameters if p.part in taken}
            # Kernels of a part are those of its own parameters under the shared ones.
            other = self._rng.choice([c for c in chosen if self._shared(c) == self._shared(base)])
            return {**{n: v for n, v in other.values if n in own}, **fixed}
        parameter = self._rng.choice(self._space.parameters)
        return {parameter.name: self._rng.choice(parameter.values), **fixed}

    def _shared(self, config: Config) -> list[ParameterValue | None]:
        return [config.get(p.name) for p in self._space.parameters if not p.part]


def _candidate_pairs(space: SearchSpace) -> list[Pair]:
    """Pairs of values of all parameters; not all of them need be possible."""
    pairs: list[Pair] = []
    by_name = sorted(space.parameters, key=lambda p: p.name)
    for first, second in itertools.combinations(by_name, 2):
        for x, y in itertools.product(first.values, second.values):
            pairs.append(((first.name, x), (second.name, y)))
    return pairs


def _possible_pairs(space: SearchSpace) -> set[Pair]:
    """The pairs of an enumerated space, two columns of values at a time."""
    columns: dict[tuple[str, ...], list[tuple[ParameterValue, ...]]] = {}
    for config in space:
        names, values = zip(*config.values, strict=True)
        columns.setdefault(names, []).append(values)
    possible: set[Pair] = set()
    for names, rows in columns.items():
        by_name = zip(names, zip(*rows, strict=True), strict=True)
        for (a, left), (b, right) in itertools.combinations(by_name, 2):
            possible.update(((a, x), (b, y)) for x, y in set(zip(left, right, strict=True)))
    return possible


def _drop(todo: dict[Pair, None], pairs: set[Pair]) -> None:
    for pair in pairs:
        todo.pop(pair, None)


def _configs_with(space: SearchSpace, pair: Pair, rng: random.Random) -> list[Config]:
    """A few valid configs that have both values; none where there is none, or none was found."""
    for fixed in _with_parents(space, dict(pair)):
        found: list[Config] = []
        for _ in range(_MAX_REJECTIONS):
            config = _draw(space, fixed, rng)
            if config is not None and space.check(config) is None:
                found.append(config)
                if len(found) == _NUM_AIMED:
                    break
        if found:
            return found
    if space.is_enumerated:
        return [c for c in space if all(value in c.values for value in pair)][:_NUM_AIMED]
    return []


def _with_parents(
    space: SearchSpace, fixed: dict[str, ParameterValue]
) -> list[dict[str, ParameterValue]]:
    """The ways to complete these values by values of the parameters that they hang under."""
    conditions = {p.name: p.active_when for p in space.parameters}
    ways, done = [fixed], False
    while not done:
        done = True
        for way in ways:
            missing = next(
                (
                    condition
                    for name in way
                    if (condition := conditions[name]) and condition.parent not in way
                ),
                None,
            )
            if missing is not None:
                more = [{**way, missing.parent: value} for value in missing.values]
                ways = [*(w for w in ways if w is not way), *more]
                done = False
                break
    return ways


def _draw(
    space: SearchSpace, fixed: dict[str, ParameterValue], rng: random.Random
) -> Config | None:
    """A config with these values and random others; None where a fixed value is not active."""
    config = _filled(space, fixed, rng)
    return config if fixed.keys() <= config.as_dict().keys() else None


def _filled(space: SearchSpace, given: Mapping[str, ParameterValue], rng: random.Random) -> Config:
    """A config with these values where they are active, and random others."""

    def choose(parameter: Parameter) -> ParameterValue:
        value = given.get(parameter.name)
        return rng.choice(parameter.values) if value is None else value

    return Config.of(space.template, filled(space.parameters, choose))
