"""Covering samples: every possible pair, nothing invalid, equal seeds equal samples."""

from __future__ import annotations

import itertools

import pytest
from tilescout.kernels.base import Config
from tilescout.search_spaces.covering import covering_sample, pairs_of
from tilescout.search_spaces.parameters import ActiveWhen, categorical, ordered
from tilescout.search_spaces.space import Constraint, SearchSpace


def small_space() -> SearchSpace:
    def no_large_swapped(config: Config) -> str | None:
        return "too large" if config["swap"] and int(config["tile"]) > 32 else None

    return SearchSpace(
        template="toy",
        parameters=(
            ordered("tile", 16, 32, 64, 128),
            categorical("swap", True, False),
            ordered("warps", 1, 2, 4, 8),
            categorical("split", "none", "count", "size"),
            ordered("splits", 2, 3, 4, 8, active_when=ActiveWhen("split", ("count",))),
            ordered("tokens", 64, 128, active_when=ActiveWhen("split", ("size",))),
            categorical("merge", "a", "b", active_when=ActiveWhen("split", ("count", "size"))),
        ),
        constraints=(Constraint("tile", no_large_swapped),),
        default=Config.of("toy", {"tile": 16, "swap": False, "warps": 1, "split": "none"}),
    )


class NotEnumerated(SearchSpace):
    """As a space with too many configs to hold."""

    _valid = None


@pytest.fixture(params=["enumerated", "sampled"])
def space(request) -> SearchSpace:
    made = small_space()
    if request.param == "enumerated":
        return made
    fields = ("template", "parameters", "constraints", "default")
    return NotEnumerated(**{name: getattr(made, name) for name in fields})


def test_every_possible_pair_is_covered_by_far_fewer_configs(space) -> None:
    possible = set().union(*map(pairs_of, small_space()))
    sample = covering_sample(space, 0, seed=0)
    assert set().union(*map(pairs_of, sample.configs)) == possible
    assert sample.num_pairs == len(possible)
    assert sample.num_covering == len(sample.configs) < small_space().count() / 3
    assert not possible & set(sample.impossible)
    every = {
        ((a.name, x), (b.name, y))
        for a, b in itertools.combinations(sorted(space.parameters, key=lambda p: p.name), 2)
        for x in a.values
        for y in b.values
    }
    assert every == possible | set(sample.impossible)


def test_the_sample_is_filled_with_distinct_valid_configs(space) -> None:
    sample = covering_sample(space, 80, seed=1)
    assert len(sample.configs) == len(set(sample.configs)) == 80
    assert sample.configs[0] == space.default
    assert all(space.check(config) is None for config in sample.configs)
    assert sample == covering_sample(space, 80, seed=1)
    assert sample != covering_sample(space, 80, seed=2)


def test_a_small_space_is_given_whole() -> None:
    space = small_space()
    assert set(covering_sample(space, 10_000, seed=0).configs) == set(space)
