"""Covering samples: every possible pair, nothing invalid, equal seeds equal samples."""

from __future__ import annotations

import itertools

import pytest
from tilescout.kernels.base import Config
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.covering import covering_sample, pairs_of
from tilescout.search_spaces.parameters import ActiveWhen, Parameter, categorical, ordered
from tilescout.search_spaces.space import SearchSpace


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


def kernels(config: Config) -> tuple[tuple[object, ...], ...]:
    """The number of splits is no matter of compiling, and the merge is a kernel of its own."""
    tile = tuple(config.get(name) for name in ("tile", "swap", "warps", "split"))
    return (tile, ("merge", config["merge"])) if "merge" in config.as_dict() else (tile,)


def num_kernels(configs: tuple[Config, ...]) -> int:
    return len({kernel for config in configs for kernel in kernels(config)})


def test_configs_share_kernels_where_these_are_told_and_cover_as_much(space) -> None:
    possible = set().union(*map(pairs_of, small_space()))
    sample = covering_sample(space, 60, seed=0, kernels=kernels)
    covering = sample.configs[: sample.num_covering]
    assert set().union(*map(pairs_of, covering)) == possible
    assert len(set(sample.configs)) == 60
    assert all(space.check(config) is None for config in sample.configs)
    plain = covering_sample(space, 60, seed=0)
    assert num_kernels(covering) < num_kernels(plain.configs[: plain.num_covering])
    assert num_kernels(sample.configs) < 0.8 * num_kernels(plain.configs)
    assert sample == covering_sample(space, 60, seed=0, kernels=kernels)


def test_what_was_checked_before_comes_first_and_counts(space) -> None:
    before = covering_sample(space, 0, seed=3).configs[1:]
    sample = covering_sample(space, 0, seed=0, start=before, kernels=kernels)
    assert sample.configs[: len(before)] == before
    assert sample.configs[len(before)] == space.default
    assert sample.num_pairs == len(set().union(*map(pairs_of, small_space())))
    assert len(sample.configs) < len(before) + 3  # the default's pairs were all that was left


def test_parts_are_exchanged_whole() -> None:
    def own(part: str) -> tuple[Parameter, ...]:
        return tuple(ordered(f"{part}_{n}", 1, 2, 3, 4, part=part) for n in ("tile", "warps"))

    names = ("first", "second")
    parameters = (categorical("form", "a", "b"), *(p for n in names for p in own(n)))
    default = Config.of("toy", {p.name: p.values[0] for p in parameters})
    space = SearchSpace("toy", parameters, (), default)

    def parts(config: Config) -> tuple[tuple[object, ...], ...]:
        return tuple(
            (part, config["form"], config[f"{part}_tile"], config[f"{part}_warps"])
            for part in names
        )

    sample = covering_sample(space, 0, seed=0, kernels=parts)
    assert set().union(*map(pairs_of, sample.configs)) == set().union(*map(pairs_of, space))
    compiled = {kernel for config in sample.configs for kernel in parts(config)}
    # All pairs of a part's own values, and each value under both forms, need 16 kernels a part.
    assert 32 <= len(compiled) < len(sample.configs) * 1.5
