"""benchmarks/prediction.py: the shipped trials reach the goal; bad input is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_trials import read_recorded
from tilescout.tuner.records import MeasurementPolicy, Provenance, StudyKey, Toolchain
from tilescout.tuner.store import Store

ROOT = Path(__file__).parents[3]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "prediction.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Two problems, 30 trials each."""
    path = tmp_path_factory.mktemp("recorded") / "two.db"
    recorded = read_recorded(ROOT / "tests" / "data" / "prediction_h200.jsonl")
    with Store.open(path) as store:
        for problem, device, trials in recorded[4:6]:
            key = StudyKey(
                problem=problem,
                device=device,
                toolchain=Toolchain(),
                provenance=Provenance.MEASURED,
                policy=MeasurementPolicy(),
                space_fingerprint="f" * 64,
                template_hashes=(("triton", "0" * 64),),
            )
            store.add_trials(store.study(key, seed=0).study_id, trials)
    return path


def test_shipped_trials_are_ranked_as_the_goal_asks():
    done = run(ROOT / "results.db", "--op", "paged_decode", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["problems"]) >= 12
    assert found["median_spearman"] >= 0.6
    assert found["share_near_best"] >= 0.8


def test_table_has_a_line_a_problem_and_the_medians(database):
    done = run(database)
    assert done.returncode == 0, done.stderr
    header, *rows, last = done.stdout.splitlines()
    assert header.split()[:3] == ["ok", "cut", "spearman"]
    assert ["kv_len=8192" in row or "kv_len=32768" in row for row in rows] == [True, True]
    assert last.startswith("median Spearman 0.")


def test_refit_judges_every_problem_with_constants_of_the_others(database):
    done = run(database, "--refit", 3)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "fitted without fold 0",
        "fitted without fold 1",
    ]
    assert len(done.stdout.splitlines()) == 4


def test_too_few_problems_are_told(database):
    done = run(database, "--refit", 3, "--folds", 3)
    assert done.returncode == 1
    assert "2 problems and 3 are needed" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_database_is_told(tmp_path):
    done = run(tmp_path / "none.db")
    assert done.returncode == 1
    assert "none.db" in done.stderr
    assert "Traceback" not in done.stderr
