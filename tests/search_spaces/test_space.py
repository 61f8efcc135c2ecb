"""The space against brute force, and the properties that search relies on."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilescout.errors import UnknownNameError, UsageError
from tilescout.kernels.base import Config
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.parameters import ActiveWhen, Parameter, categorical, ordered
from tilescout.search_spaces.registry import joint_space
from tilescout.search_spaces.space import SearchSpace
from tilescout.tuner import catalog


def small_space(limit: int = 5, *, reverse: bool = False) -> SearchSpace:
    parameters = [
        ordered("a", 1, 2, 3),
        categorical("mode", "x", "y", "z"),
        ordered("b", 1, 2, 4, active_when=ActiveWhen("mode", ("y", "z"))),
        categorical("c", True, False, active_when=ActiveWhen("mode", ("z",))),
    ]
    return SearchSpace(
        template="t",
        parameters=tuple(
            Parameter(p.name, p.values[::-1] if reverse else p.values, p.is_ordered, p.active_when)
            for p in parameters
        ),
        constraints=(
            Constraint(
                "sum", lambda c: f"a + b > {limit}" if c["a"] + c.get("b", 0) > limit else None
            ),
        ),
        default=Config.of("t", {"a": 1, "mode": "x"}),
        seeds=(
            Config.of("t", {"a": 3, "mode": "y", "b": 4}),
            Config.of("t", {"a": 2, "mode": "z", "b": 2, "c": True}),
        ),
    )


def brute_force(limit: int) -> set[Config]:
    found = set()
    for a, mode, b, c in itertools.product((1, 2, 3), "xyz", (None, 1, 2, 4), (None, True, False)):
        if (b is None) != (mode == "x") or (c is None) != (mode != "z"):
            continue
        if a + (b or 0) > limit:
            continue
        values = {"a": a, "mode": mode, "b": b, "c": c}
        found.add(Config.of("t", {k: v for k, v in values.items() if v is not None}))
    return found


@pytest.mark.parametrize("limit", [2, 5, 100])
def test_enumeration_equals_brute_force(limit: int) -> None:
    space = small_space(limit)
    assert len(list(space)) == space.count() == len(brute_force(limit))
    assert set(space) == brute_force(limit)


@pytest.mark.parametrize(
    "workload", ["gdn_decode", "fp4_attention_emulated", "paged_decode_suites"]
)
def test_enumeration_is_the_product_less_what_is_refused_in_its_order(workload: str) -> None:
    device = catalog.gpu("h200")
    for space in joint_space(catalog.workload(workload).problems[0].problem, device).spaces:
        if not isinstance(space, SearchSpace) or space.product_size() > 100_000:
            continue
        asked = (
            config
            for config in space._product()
            if all(constraint.check(config) is None for constraint in space.constraints)
        )
        assert list(space) == list(asked)


def test_a_constraint_that_looks_at_all_values_is_asked_of_whole_configs() -> None:
    space = small_space(100)
    whole = Constraint("whole", lambda c: "three" if len(c.values) == 3 else None)
    odd = replace(space, constraints=(whole, *space.constraints))
    assert list(odd) == [c for c in space if len(c.values) != 3]


def test_every_enumerated_config_passes_check_and_refusals_add_up() -> None:
    space = small_space()
    assert all(space.check(config) is None for config in space)
    assert space.count() + sum(space.refusals().values()) == space.product_size() == 30


@given(st.integers(0, 10_000))
def test_samples_and_neighbours_stay_inside(seed: int) -> None:
    space = small_space()
    config = space.sample(random.Random(seed))
    assert space.check(config) is None
    for neighbour in space.neighbours(config):
        assert space.check(neighbour) is None
        assert neighbour != config
        assert config in space.neighbours(neighbour)


def test_check_names_what_is_wrong() -> None:
    space = small_space()
    assert "unknown" in space.check(Config.of("t", {"a": 1, "mode": "x", "q": 1}))
    assert "not active" in space.check(Config.of("t", {"a": 1, "mode": "x", "b": 1}))
    assert "no value" in space.check(Config.of("t", {"a": 1, "mode": "y"}))
    assert "not one of 1, 2, 3" in space.check(Config.of("t", {"a": 7, "mode": "x"}))
    assert "sum: a + b > 5" in space.check(Config.of("t", {"a": 3, "mode": "y", "b": 4}))
    with pytest.raises(UnknownNameError, match="'q'"):
        space.config({"a": 1, "mode": "x", "q": 1})
    with pytest.raises(UsageError, match="a \\+ b > 5"):
        space.config({"a": 3, "mode": "y", "b": 4})


def test_seeds_start_with_the_default_and_drop_what_is_invalid() -> None:
    seeds = small_space().valid_seeds()
    assert [str(s) for s in seeds] == ["a=1 mode=x", "a=2 b=2 c=True mode=z"]


def test_fingerprint_ignores_order_and_sees_values() -> None:
    assert small_space().fingerprint() == small_space(reverse=True).fingerprint()
    changed = SearchSpace(
        "t", (ordered("a", 1, 2), categorical("mode", "x")), (), small_space().default
    )
    assert changed.fingerprint() != small_space().fingerprint()


def huge_space(*, is_tight: bool = False) -> SearchSpace:
    """10^9 configs before constraints; tight ones leave a diagonal and its surroundings."""
    names = "abcdefghi"

    def near(config: Config) -> str | None:
        values = [int(config[name]) for name in names]
        return "uneven" if max(values) - min(values) > 1 else None

    return SearchSpace(
        template="t",
        parameters=tuple(ordered(name, *range(10)) for name in names),
        constraints=(Constraint("near", near),) if is_tight else (),
        default=Config.of("t", dict.fromkeys(names, 5)),
    )


@pytest.mark.parametrize("is_tight", [False, True], ids=["loose", "tight"])
def test_huge_space_is_sampled_and_never_enumerated(is_tight, monkeypatch):
    space = huge_space(is_tight=is_tight)

    def refuse(self):
        raise AssertionError("enumerated")

    monkeypatch.setattr(SearchSpace, "_product", refuse)
    assert not space.is_enumerated
    assert space.count() == space.product_size() == 10**9
    sampled = {space.sample(random.Random(seed)) for seed in range(20)}
    assert all(space.check(config) is None for config in sampled)
    assert len(sampled) > 15


def test_space_with_too_many_valid_configs_is_not_held(monkeypatch):
    monkeypatch.setattr("tilescout.search_spaces.space.MAX_ENUMERATED", 10)
    space = small_space(100)
    assert not space.is_enumerated
    assert space.count() == space.product_size()
    assert set(space) == brute_force(100)


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"a": 2, "mode": "y", "b": 2}, {"a": 2, "mode": "y", "b": 2}),
        # What hangs under another value is dropped, what is missing is filled.
        ({"a": 1, "mode": "x", "b": 4}, {"a": 1, "mode": "x"}),
        ({"a": 1, "mode": "z", "b": 4, "norm": 8}, {"a": 1, "mode": "z", "b": 4, "c": True}),
        ({"mode": "x"}, {"a": 1, "mode": "x"}),
        ({"a": 3, "mode": "y", "b": 4}, None),
        ({"a": 9, "mode": "x"}, None),
    ],
)
def test_a_config_of_another_space_is_made_to_fit(theirs, mine) -> None:
    found = small_space().adapted(Config.of("t", theirs))
    assert found == (None if mine is None else Config.of("t", mine))
    assert small_space().adapted(Config.of("u", theirs)) is None
