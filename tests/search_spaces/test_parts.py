"""Algorithms and parts of a space, by brute force."""

from __future__ import annotations

from typing import Any

import parts_toy_op
import pytest
import toy_op
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.parameters import ActiveWhen, categorical, ordered
from tilescout.search_spaces.parts import PartScope, algorithms, has_parts, part_space
from tilescout.search_spaces.space import SearchSpace


@pytest.fixture
def space(h200: DeviceSpec) -> SearchSpace:
    return parts_toy_op.parts_space(parts_toy_op.PartsToyProblem(64), h200)


@pytest.fixture
def split(space: SearchSpace) -> Any:
    return algorithms(space)[1]


def test_a_space_without_parts_has_none(h200: DeviceSpec, space: SearchSpace) -> None:
    assert has_parts(space)
    assert not has_parts(toy_op.toy_space(toy_op.ToyProblem(64), h200))


def test_algorithms_share_out_the_space(space: SearchSpace) -> None:
    found = algorithms(space)
    assert [str(algorithm) for algorithm in found] == [
        "triton algorithm=fused",
        "triton algorithm=split",
    ]
    assert [algorithm.part_names for algorithm in found] == [("all",), parts_toy_op.PARTS]
    configs = [config for algorithm in found for config in algorithm.space]
    assert len(configs) == len(set(configs))
    assert set(configs) == set(space)


def test_the_default_s_algorithm_is_first_then_those_of_seeds(space: SearchSpace) -> None:
    assert algorithms(space)[0].space.default == space.default
    assert algorithms(space)[1].space.default == space.seeds[0]


@pytest.mark.parametrize("part", parts_toy_op.PARTS)
def test_a_part_has_its_own_parameters_and_valid_wholes(split: Any, part: str) -> None:
    base = split.space.default.replace(scale_tile=256, scale_depth=3)
    scope = PartScope.of(split, part, base)
    configs = set(part_space(split, scope))
    assert configs == {scope.of_whole(c) for c in split.space if _beside(c, base, scope)}
    assert all(split.space.check(scope.whole(config)) is None for config in configs)
    assert scope.whole(scope.of_whole(base)) == base


def _beside(config: Config, base: Config, scope: PartScope) -> bool:
    return scope.whole(scope.of_whole(config)) == config and all(
        config[name] == value for name, value in base.values if name not in scope.own
    )


def test_an_algorithm_without_a_seed_begins_with_what_is_valid() -> None:
    space = SearchSpace(
        template="triton",
        parameters=(
            categorical("algorithm", "a", "b", "none"),
            ordered("chunk", 16, 32, active_when=ActiveWhen("algorithm", ("b",))),
            ordered("tile", 1, 2, 4, part="one"),
            ordered("depth", 1, 2, active_when=ActiveWhen("algorithm", ("b",)), part="two"),
        ),
        constraints=(
            Constraint("no", lambda c: "never" if c["algorithm"] == "none" else None),
            Constraint("b", lambda c: "small" if c.get("chunk") and c["tile"] != 4 else None),
        ),
        default=Config.of("triton", {"algorithm": "a", "tile": 2}),
    )
    found = {str(algorithm): algorithm for algorithm in algorithms(space)}
    assert list(found) == [
        "triton algorithm=a",
        "triton algorithm=b chunk=16",
        "triton algorithm=b chunk=32",
    ]
    assert found["triton algorithm=a"].part_names == ("one",)
    assert found["triton algorithm=b chunk=16"].part_names == ("one", "two")
    assert found["triton algorithm=b chunk=32"].space.default["tile"] == 4


def test_the_part_of_a_parameter_counts_in_the_fingerprint() -> None:
    def space(part: str) -> SearchSpace:
        default = Config.of("triton", {"tile": 1})
        return SearchSpace("triton", (ordered("tile", 1, 2, part=part),), (), default)

    assert len({space(part).fingerprint() for part in ("", "one", "two")}) == 3


def test_a_parameter_hangs_under_no_other_part() -> None:
    with pytest.raises(AssertionError, match="hangs under part"):
        SearchSpace(
            template="triton",
            parameters=(
                categorical("rule", "x", "y", part="one"),
                ordered("tile", 1, 2, active_when=ActiveWhen("rule", ("x",)), part="two"),
            ),
            constraints=(),
            default=Config.of("triton", {"rule": "y"}),
        )
