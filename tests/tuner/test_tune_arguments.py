"""What ``tune`` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tilescout
from tilescout.errors import UsageError
from tilescout.tuner.progress import LoggingListener
from tilescout.tuner.tune_arguments import check_run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"db": 5}, "db=5 must be a path"),
        ({"db": b"results.db"}, "db=b'results.db' must be a path"),
        ({"budget": 5}, "budget=5 must be the name of a budget"),
        ({"budget": ["quick"]}, "must be the name of a budget"),
        ({"listener": 5}, "listener=5 must be an object with the methods study_started"),
        ({"listener": print}, "must be an object with the methods"),
        ({"listener": LoggingListener}, "must be an object with the methods"),
        ({"dry_run": "no"}, "dry_run='no' must be True or False"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["predict", "measure"])
def test_wrong_types_are_named(
    arguments: dict[str, Any], said: str, mode: Any, tmp_path: Path
) -> None:
    given = {"gpus": ["h200"], "db": tmp_path / "results.db", **arguments}
    with pytest.raises(UsageError, match=said):
        tilescout.tune(mode=mode, trials=1, **given)
    assert not list(tmp_path.iterdir())


def test_a_policy_that_the_environment_misspells_is_refused_in_every_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TILESCOUT_EXTERNAL", "bogus")
    tilescout.use_external(None)  # the variable is read again
    try:
        for mode, dry_run in (("predict", False), ("predict", True), ("auto", True)):
            with pytest.raises(UsageError, match=r"'bogus' \(TILESCOUT_EXTERNAL\)"):
                tilescout.tune(
                    gpus=["h200"], mode=mode, dry_run=dry_run, db=tmp_path / "results.db"
                )
    finally:
        monkeypatch.delenv("TILESCOUT_EXTERNAL")
        tilescout.use_external(None)
    assert not list(tmp_path.iterdir())


def test_what_is_right_is_let_through(tmp_path: Path) -> None:
    for db in (None, "results.db", "sqlite:///results.db", tmp_path):
        check_run(db, LoggingListener(), dry_run=True)
        check_run(db, None, dry_run=False)
