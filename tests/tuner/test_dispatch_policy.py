"""The policy of a look-up by argument, block and environment; each wins over the next."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tilescout
from tilescout.errors import NoWinnerError, UsageError
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import dispatch
from tilescout.tuner.dispatch_policy import current_policy
from toy_op import ToyProblem

pytestmark = pytest.mark.usefixtures("toy")


@pytest.fixture(autouse=True)
def _no_winners(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    dispatch.refresh()
    yield
    monkeypatch.undo()
    dispatch.refresh()


def test_nearest_is_the_policy_where_nobody_says_otherwise() -> None:
    assert current_policy() == "nearest"
    assert tilescout.lookup(ToyProblem(64), gpu="h200").tier == "default"


def test_a_block_makes_look_ups_strict_and_ends() -> None:
    problem = ToyProblem(64)
    assert tilescout.lookup(problem, gpu="h200").tier == "default"
    with tilescout.policy("strict"):
        with pytest.raises(NoWinnerError, match=r"strict found no winner of toy size=64.*tune"):
            tilescout.lookup(problem, gpu="h200")
        with tilescout.policy("nearest"):
            assert tilescout.lookup(problem, gpu="h200").tier == "default"
        assert tilescout.lookup(problem, gpu="h200", policy="nearest").tier == "default"
        with pytest.raises(NoWinnerError):
            tilescout.lookup(problem, gpu="h200")
    assert tilescout.lookup(problem, gpu="h200").tier == "default"


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILESCOUT_POLICY", "strict")
    problem = ToyProblem(64)
    dispatch.refresh()
    with pytest.raises(NoWinnerError):
        tilescout.lookup(problem, gpu="h200")
    with tilescout.policy("nearest"):
        assert tilescout.lookup(problem, gpu="h200").tier == "default"
    monkeypatch.setenv("TILESCOUT_POLICY", "nearest")
    assert current_policy() == "strict"
    dispatch.refresh()
    assert current_policy() == "nearest"


@pytest.mark.parametrize("name", ["closest", "Strict", "1"])
def test_a_policy_that_is_none_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = f"{name!r} is not one of nearest, strict"
    with pytest.raises(UsageError, match=f"policy={allowed}"), tilescout.policy(name):
        pass
    monkeypatch.setenv("TILESCOUT_POLICY", name)
    dispatch.refresh()
    with pytest.raises(UsageError, match=f"TILESCOUT_POLICY={allowed}"):
        tilescout.lookup(ToyProblem(64), gpu="h200")


def test_a_block_is_of_its_own_thread_only(h200: DeviceSpec) -> None:
    seen: list[str] = []
    with tilescout.policy("strict"):
        thread = threading.Thread(target=lambda: seen.append(current_policy()))
        thread.start()
        thread.join()
        assert (current_policy(), seen) == ("strict", ["nearest"])


def test_a_block_ends_with_an_error_too() -> None:
    with pytest.raises(RuntimeError), tilescout.policy("strict"):
        raise RuntimeError
    assert current_policy() == "nearest"


def test_a_block_holds_for_the_look_ups_of_operations_too(h200: DeviceSpec) -> None:
    snapshot, problem = dispatch.current_snapshot(), ToyProblem(64)
    assert snapshot.lookup(problem, h200).tier == "default"
    with tilescout.policy("strict"), pytest.raises(NoWinnerError):
        snapshot.lookup(problem, h200)
    assert snapshot.lookup(problem, h200).tier == "default"
