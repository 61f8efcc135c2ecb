"""Remembered constraints say what the constraints say, and are asked far less often."""

from __future__ import annotations

from typing import Any

import pytest
from tilescout.kernels.base import Config
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.parts import PartScope, other_algorithms, part_space
from tilescout.search_spaces.registry import joint_space
from tilescout.search_spaces.remembered import UNDECIDED, Remembered
from tilescout.tuner import catalog


def ask(remembered: Remembered, **values: Any) -> str | None:
    return remembered.check(values, lambda: Config.of("toy", values))


def test_only_what_is_read_decides() -> None:
    asked: list[Config] = []

    def check(config: Config) -> str | None:
        asked.append(config)
        if config["a"] == 1:
            return None
        return f"b is {config.get('b')}" if config.get("b") else "no b"

    known = Remembered.of(Constraint("toy", check))
    for c in range(10):
        assert ask(known, a=1, b=7, c=c) is None
        assert ask(known, a=1, c=c) is None
        assert ask(known, a=2, b=7, c=c) == "b is 7"
        assert ask(known, a=2, b=8, c=c) == "b is 8"
        assert ask(known, a=2, c=c) == "no b"
    assert len(asked) == 4


def test_a_value_that_is_missing_is_missing_in_the_answer_too() -> None:
    known = Remembered.of(Constraint("toy", lambda config: str(config["a"])))
    assert ask(known, a=1) == "1"
    with pytest.raises(KeyError):
        ask(known, b=1)


def test_one_that_looks_at_all_values_is_asked_each_time() -> None:
    known = Remembered.of(Constraint("toy", lambda c: None if len(c.values) == 2 else "no"))
    assert ask(known, a=1, b=2) is None
    assert ask(known, a=1) == "no"
    assert ask(known, a=1, b=3) is None


def test_what_is_known_of_some_of_the_values() -> None:
    check = Constraint("toy", lambda c: None if c["a"] == 1 or c.get("b") else "no")
    known = Remembered.of(check)
    assert known.known({"a": 1}, ["b"]) is UNDECIDED, "nobody has asked"
    ask(known, a=1, b=5)
    assert known.known({"a": 1}, ["b"]) is None, "b does not matter then"
    assert known.known({"a": 2}, ["b"]) is UNDECIDED
    ask(known, a=2, b=5)
    ask(known, a=2)
    assert known.known({"a": 2}, ["b"]) is UNDECIDED, "it depends on b"
    assert known.known({"a": 2}, []) == "no"
    assert known.known({"a": 2, "b": 5}, []) is None
    whole = Remembered.of(Constraint("whole", lambda c: None if len(c.values) == 1 else "no"))
    ask(whole, a=1)
    assert whole.known({"a": 1}, []) is UNDECIDED


def test_one_that_looks_at_nothing_is_asked_once() -> None:
    known = Remembered.of(Constraint("toy", lambda _: "never"))
    assert {ask(known, a=value) for value in range(3)} == {"never"}


def test_spaces_that_share_a_constraint_share_its_answers() -> None:
    first, second = (Constraint("toy", lambda _: None) for _ in range(2))
    assert Remembered.of(first) is Remembered.of(first)
    assert Remembered.of(first) is not Remembered.of(second)


@pytest.mark.parametrize("template", ["triton", "tilelang"])
def test_parts_have_the_configs_whose_whole_is_valid(h200: Any, template: str) -> None:
    problem = catalog.workload("gdn_chunk").problems[3].problem
    space = joint_space(problem, h200).of(template)
    for algorithm in [a for a, _ in zip(other_algorithms(space), range(3), strict=False)]:
        for part in algorithm.part_names:
            scope = PartScope.of(algorithm, part, algorithm.space.default)
            found = part_space(algorithm, scope)
            valid = [c for c in found._product() if space.check(scope.whole(c)) is None]
            assert list(found) == valid
            assert part == "gate" or len(valid) > 0
