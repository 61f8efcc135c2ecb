"""An operation with parts through the commands: what part studies must not change."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import parts_study
import parts_toy_op
import pytest
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import cli, dispatch
from tilescout.tuner.measure import MeasureSettings
from tilescout.tuner.records import Provenance
from tilescout.tuner.store import Store
from tilescout.tuner.store.transfer import export_json, import_json
from tilescout.tuner.tune import tune

WORKLOAD = """
name = "parts"
description = "One problem."
source = "made up"

[[problems]]
op = "parts_toy"
label = "parts {size}"
size = [4096]
"""


@pytest.fixture(autouse=True)
def _registered() -> None:
    parts_study.register()


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "parts.toml"
    path.write_text(WORKLOAD)
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command and returns what it printed."""

    def command(*arguments: object) -> str:
        dispatch.refresh()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert ended.value.code == 0, f"{out}\n{err}"
        return out

    return command


@pytest.fixture
def tuned(workload: str, tmp_path: Path, run: Any) -> Path:
    """A database with the parts searched, predicted by real compile processes."""
    database = tmp_path / "r.db"
    run("tune", workload, "--mode", "predict", "--gpu", "h200", "--trials", "60", "--db", database)
    return database


def part_trials(database: Path) -> Counter[str]:
    with Store.open(database, read_only=True) as store:
        (study,) = store.studies()
        return Counter(
            part.key.part for part in store.part_studies(study) for _ in store.trials(part.study_id)
        )


def test_tune_counts_the_trials_of_parts_and_finds_one_winner(
    workload: str, tuned: Path, run: Any
) -> None:
    arguments = ("--mode", "predict", "--gpu", "h200", "--trials", "60", "--db", tuned)
    (row,) = json.loads(run("tune", workload, *arguments, "--format", "json"))
    parts = part_trials(tuned)
    assert set(parts) == {f"triton algorithm=split: {name}" for name in parts_toy_op.PARTS}
    with Store.open(tuned, read_only=True) as store:
        (study,) = store.studies()
        assert sum(row["trials"].values()) == study.num_trials + sum(parts.values()) <= 60
    assert row["config"]["algorithm"] == "split"
    assert row["speedup"] > 1.0


def test_look_ups_know_the_winner_of_the_operation_alone(tuned: Path, run: Any) -> None:
    problem = ("parts_toy", "size=4096", "dtype=float32")
    found = json.loads(run("lookup", *problem, "--gpu", "h200", "--db", tuned, "--format", "json"))
    assert found["tier"] == "predicted"
    assert len(found["config"]) == 8
    why = json.loads(run("explain", *problem, "--gpu", "h200", "--db", tuned, "--format", "json"))
    (database,) = [d for d in why["databases"] if d["database"] == str(tuned)]
    assert database["of_this_op"] == 1
    assert why["skipped"] == []


def test_a_report_shows_the_search_of_the_operation_alone(
    tuned: Path, tmp_path: Path, run: Any
) -> None:
    run("report", "--db", tuned, "--out", tmp_path / "report")
    with next((tmp_path / "report").glob("**/searches.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1
    with Store.open(tuned, read_only=True) as store:
        (study,) = store.studies()
    assert str(study.num_trials) in rows[0].values()


def test_an_export_carries_the_parts(tuned: Path, tmp_path: Path) -> None:
    with Store.open(tuned, read_only=True) as store:
        data = export_json(store)
    with Store.open(tmp_path / "copy.db") as copy:
        import_json(copy, json.loads(json.dumps(data)))
        assert [study.key.part for study in copy.studies()] == [""]
        assert len(copy.winners()) == 1
        assert export_json(copy)["winners"][0]["config"] == data["winners"][0]["config"]
    assert part_trials(tmp_path / "copy.db") == part_trials(tuned)


def test_an_import_refuses_a_winner_of_a_part(tuned: Path, tmp_path: Path) -> None:
    with Store.open(tuned, read_only=True) as store:
        data = export_json(store)
    part = next(trial for trial in data["trials"] if trial.get("part"))
    same = ("op", "gpu", "problem", "config", "template", "provenance", "policy", "toolchain")
    winner = {name: part[name] for name in (*same, "time_us", "trial_id")}
    data["winners"] = [{**data["winners"][0], **winner, "finals": [part["trial_id"]]}]
    with (
        Store.open(tmp_path / "copy.db") as copy,
        pytest.raises(ValueError, match="must be a trial of a whole operation, not of 'triton"),
    ):
        import_json(copy, data)


@pytest.mark.slow
def test_measuring_with_real_processes(
    workload: str, h200: DeviceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilescout.tuner.environment.current_device", lambda: h200)
    monkeypatch.setattr("tilescout.tuner.evaluators.measure._default_torch_device", lambda: "cpu")
    quick = MeasureSettings(run_target_us=200.0, warmup_us=200.0, max_samples=12, max_rounds=16)
    monkeypatch.setattr("tilescout.tuner.evaluators.measure.MeasureSettings", lambda: quick)
    database = tmp_path / "m.db"
    summary = tune(workload, mode="measure", trials=40, db=database)
    (row,) = summary.rows
    assert row.provenance is Provenance.MEASURED
    assert row.time_us is not None
    assert set(row.num_trials) <= {"ok", "pruned"}
    assert summary.gpu_busy_share is not None
    assert 0.0 < summary.gpu_busy_share <= 1.0
    assert len(part_trials(database)) == 3
    again = tune(workload, mode="measure", trials=40, db=database)
    assert again.rows[0].trial_id == row.trial_id
    assert again.gpu_busy_share is None, "nothing was measured"
