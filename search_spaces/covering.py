"""A sample of a space in which every pair of parameter values that can occur together does.

Faults of a kernel mostly come from one value or from two together, so such a sample finds them with
few configs. It is greedy and depends on nothing but the space and the seed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from ..kernels.base import Config, ParameterValue
from .space import SearchSpace

__all__ = ["CoveringSample", "Pair", "covering_sample", "pairs_of"]

Value = tuple[str, ParameterValue]
Pair = tuple[Value, Value]
"""Values of two parameters, by the parameters' names in sorted order."""

_NUM_CANDIDATES = 24
"""Random configs from which a greedy step takes the best."""
_MIN_GAIN = 8
"""Below this, random configs are a waste: each pair left is aimed at."""
_NUM_AIMED = 4
_MAX_REJECTIONS = 400
_MAX_REPEATS = 100


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


def covering_sample(space: SearchSpace, num_configs: int, *, seed: int) -> CoveringSample:
    """At least as many configs as cover every pair, and ``num_configs`` where the space has them.

    Args:
        space: where the configs come from.
        num_configs: wanted; filled up at random beyond what the pairs need.
        seed: of all choices.
    """
    # Parameters and values are visited in a fixed order: sets of text are not.
    rng = random.Random(seed)
    chosen: dict[Config, None] = {space.default: None}
    todo = dict.fromkeys(_candidate_pairs(space))
    covered = pairs_of(space.default)
    impossible: list[Pair] = []
    if space.is_enumerated:
        possible = _possible_pairs(space)
        impossible = [pair for pair in todo if pair not in possible]
        _drop(todo, set(impossible))
    _drop(todo, covered)
    while todo:
        config = _best([space.sample(rng) for _ in range(_NUM_CANDIDATES)], todo)
        if _gain(config, todo) < min(_MIN_GAIN, len(todo)):
            pair = next(iter(todo))
            aimed = _configs_with(space, pair, rng)
            if not aimed:
                impossible.append(pair)
                del todo[pair]
                continue
            config = _best(aimed, todo)
        chosen[config] = None
        covered |= pairs_of(config)
        _drop(todo, pairs_of(config))
    num_covering = len(chosen)
    _fill(space, chosen, num_configs, rng)
    return CoveringSample(tuple(chosen), num_covering, len(covered), tuple(impossible))


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


def _gain(config: Config, todo: dict[Pair, None]) -> int:
    return sum(pair in todo for pair in pairs_of(config))


def _best(configs: list[Config], todo: dict[Pair, None]) -> Config:
    return max(configs, key=lambda config: _gain(config, todo))


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
    values: dict[str, ParameterValue] = {}
    for parameter in space.parameters:
        condition = parameter.active_when
        if condition is None or values.get(condition.parent) in condition.values:
            value = fixed.get(parameter.name)
            values[parameter.name] = rng.choice(parameter.values) if value is None else value
    return Config.of(space.template, values) if fixed.keys() <= values.keys() else None


def _fill(
    space: SearchSpace, chosen: dict[Config, None], num_configs: int, rng: random.Random
) -> None:
    """Adds random configs that are not there yet."""
    if space.is_enumerated and space.count() <= num_configs:
        chosen.update(dict.fromkeys(space))
        return
    repeats = 0
    while len(chosen) < num_configs and repeats < _MAX_REPEATS:
        config = space.sample(rng)
        repeats = repeats + 1 if config in chosen else 0
        chosen[config] = None
