"""TileLang program factories with a space: tuned when asked, looked up like ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tilescout
import torch
import triton
from tilelang_factories import double, wrong_at_128
from tilescout.errors import NoWinnerError, UsageError
from tilescout.tuner import dispatch
from tilescout.tuner.adoption import live_search, program
from tilescout.tuner.paths import user_database_path
from tilescout.tuner.store import Store

TIMES_MS = {32: 3.0, 64: 1.0, 128: 0.5}
SPACE = {"block": (32, 64, 128), "threads": (32, 64)}


class Built:
    """Kernels that the CPU plays, in the place of those that TileLang would compile."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.last_block = 0

    def __call__(self, factory: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        values = dict(factory.signature.bind(*args, **kwargs).arguments)
        self.made.append(values)
        is_wrong = factory.func.__name__ == "wrong_at_128" and values["block"] == 128

        def kernel(x: torch.Tensor) -> torch.Tensor:
            assert x.shape == (values["n"],)
            self.last_block = values["block"]
            return (3 if is_wrong else 2) * x

        return kernel

    def timer(self, call: Callable[[], object]) -> list[float]:
        call()
        return [factor * TIMES_MS[self.last_block] for factor in (1.0, 0.9, 1.1)]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Built]:
    played = Built()

    def build(factory: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return played(factory, *args, **kwargs)

    monkeypatch.setattr(type(double), "__call__", build)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    dispatch.refresh()
    live_search.device_at_hand.cache_clear()
    yield played
    dispatch.refresh()
    live_search.device_at_hand.cache_clear()


def decorated(built: Built, factory: Any = double, **options: Any) -> Any:
    given = {"space": SPACE, "problem": ["n"], "do_bench": built.timer, **options}
    return tilescout.autotune(**given)(factory)


def test_untuned_it_runs_the_first_config_and_tunes_nothing(built: Built) -> None:
    program = decorated(built)(200)
    x = torch.randn(200)
    for _ in range(3):
        assert torch.equal(program(x), 2 * x)
    assert built.made == [{"n": 200, "block": 32, "threads": 32}]
    assert program.lookup().tier == "default"
    assert not user_database_path().exists()


def test_tuned_it_runs_the_winner_and_other_processes_find_it(built: Built) -> None:
    program = decorated(built)(200)
    x = torch.randn(200)
    with tilescout.tuning():
        assert torch.equal(program(x), 2 * x)
    assert torch.equal(program(x), 2 * x)
    assert built.last_block == 128
    with Store.open(user_database_path(), read_only=True) as store:
        (study,) = store.studies()
        assert len(list(store.trials(study.study_id))) == 6
    found = program.lookup()
    assert (found.tier, found.template, found.config["block"]) == ("exact", "tilelang", 128)
    # Decorated again, as in a new process; another size is another problem.
    again = decorated(built)
    assert again(200).lookup().config["block"] == 128
    assert again(300).lookup().tier == "default"
    with tilescout.policy("strict"), pytest.raises(NoWinnerError):
        again(300)(torch.randn(300))


@pytest.mark.parametrize(
    "reference", [None, lambda x: 2 * x, lambda x: {0: x}], ids=["none", "returned", "in place"]
)
def test_a_config_that_is_wrong_never_wins(built: Built, reference: Any) -> None:
    program = decorated(built, wrong_at_128, reference=reference)(200)
    x = torch.randn(200)
    with tilescout.tuning():
        program(x)
    expected = 128 if reference is not None and reference(x).__class__ is dict else 64
    assert program.lookup().config["block"] == expected


def test_on_miss_tunes_without_being_asked(built: Built) -> None:
    program = decorated(built, on_miss="tune")(200)
    program(torch.randn(200))
    assert program.lookup().config["block"] == 128


def test_a_capture_puts_the_search_off(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = decorated(built, on_miss="tune")(200)
    x = torch.randn(200)
    monkeypatch.setattr(program, "is_capturing", lambda: True)
    assert torch.equal(kernel(x), 2 * x)
    assert kernel.lookup().tier == "default"
    monkeypatch.setattr(program, "is_capturing", lambda: False)
    assert torch.equal(kernel(x), 2 * x)
    assert kernel.lookup().config["block"] == built.last_block == 128


def test_a_constraint_and_a_list_of_configs(built: Built) -> None:
    configs = [{"block": 128, "threads": 32}, {"block": 64, "threads": 32}]

    def small(values: Any) -> str | None:
        return "too large" if values["block"] > 64 else None

    for space in (SPACE, configs):
        program = decorated(built, space=space, constraint=small, on_miss="tune")(200)
        program(torch.randn(200))
        assert program.lookup().config["block"] == 64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"problem": ["m"]}, "'m' is no argument of double"),
        ({"space": {"tile": (1, 2)}}, "'tile' is no argument of double"),
        ({"problem": ["block"]}, "both in the space and of the problem"),
        ({"space": {"block": ()}}, "at least one value"),
        ({"space": []}, "no valid config"),
        ({"on_miss": "triton"}, "on_miss='triton' of double"),
        ({"restore_value": ["X"]}, "restore_value is of Triton's autotuner"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(built: Built, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        decorated(built, **options)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "needs 'n'"),
        ((200,), {"block": 64}, "'block' of double is a parameter"),
        ((200, 64), {}, "'block' of double is a parameter"),
        ((200,), {"m": 1}, "m"),
    ],
)
def test_sizes_are_checked(built: Built, args: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        decorated(built)(*args, **kwargs)
    assert not built.made


@pytest.mark.gpu
def test_a_program_is_tuned_on_the_gpu() -> None:
    live_search.device_at_hand.cache_clear()
    space = {"block": (64, 128), "threads": (64,)}  # few: each takes seconds to compile
    factory = tilescout.autotune(space=space, problem=["n"], reference=lambda x: 2 * x)(double)
    x = torch.randn(4096, device="cuda")
    program = factory(4096)
    assert torch.equal(program(x), 2 * x)
    with tilescout.tuning():
        assert torch.equal(program(x), 2 * x)
    assert program.lookup().tier == "exact"
    assert torch.equal(program(x), 2 * x)
