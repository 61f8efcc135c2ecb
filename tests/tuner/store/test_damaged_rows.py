"""A row that makes no sense is named and left out; its neighbours are not hidden."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path

import pytest
import store_cases as cases
from tilescout.errors import StoreError
from tilescout.tuner.store import Store, export_json

pytestmark = pytest.mark.usefixtures("toy")

STUDIES = (1, 2)
TRIALS = 3


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Two decided studies of three trials; the first three configs belong to study 1."""
    path = tmp_path / "results.db"
    with Store.open(path) as store:
        for size in STUDIES:
            study_id = store.study(cases.study_key(size), seed=0).study_id
            found = [cases.measured(10 * size + i) for i in range(TRIALS)]
            store.add_trials(study_id, found)
            store.decide(study_id, found[:2])
    return path


def damage(path: Path, sql: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    connection.execute(sql, values)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("sql", "value", "note"),
    [
        ("problems SET op = ?", "weather", "study 1: problem 1: unknown operation 'weather'"),
        ("problems SET problem_json = ?", "{size", "problem_json is not valid JSON"),
        ("problems SET problem_json = ?", "[" * 10**5, "problem_json is not valid JSON"),
        ("problems SET problem_json = ?", "[1]", "problem 1=[1] must be an object"),
        ("problems SET problem_json = ?", '{"siz":1}', "unknown field of a toy problem 'siz'"),
        ("problems SET problem_json = ?", '{"size":0}', "size=0 of a toy problem must be at least"),
        ("studies SET policy = ?", "hot", "study 1: policy='hot' must be one of cuda_graph/cold_"),
        ("studies SET provenance = ?", "guessed", "provenance='guessed' must be one of measured"),
        ("studies SET created_ms = ?", "then", "created_ms='then' must be milliseconds"),
        ("studies SET seed = ?", "x", "seed='x' must be an integer"),
    ],
)
def test_a_damaged_study(database: Path, sql: str, value: object, note: str) -> None:
    damage(database, f"UPDATE {sql} WHERE id = 1", value)
    with Store.open(database, read_only=True) as store:
        assert store.damaged_rows == ()
        assert [study.study_id for study in store.studies()] == [2]
        assert [winner.study.study_id for winner in store.winners()] == [2]
        (found,) = store.damaged_rows
        assert found.startswith("study 1: ")
        assert note in found


@pytest.mark.parametrize(
    ("sql", "value", "note"),
    [
        ("configs SET values_json = ?", "{", "config 2 values_json is not valid JSON"),
        ("configs SET values_json = ?", "[2]", "values_json='[2]' must be a list with a value for"),
        ("configs SET values_json = ?", "{}", "values_json='{}' must be a list with a value for"),
        ("configs SET values_json = ?", '[1.5,true,"none"]', "config 2.block_n=1.5 must be an int"),
        (
            "configs SET values_json = ?",
            '[[],true,"none"]',
            "config 2.block_n=[] must be an integer",
        ),
        ("configs SET values_json = ?", b"\0", "config 2 values_json must be JSON text"),
        ("trials SET status = ?", "great", "status='great' must be one of ok, invalid"),
        ("trials SET status = ?", 5, "must be one of ok, invalid"),
        ("trials SET median_ns = ?", "fast", "must be integers"),
        ("trials SET num_samples = ?", None, "must be integers"),
        ("trials SET num_samples = ?", 10**9, "samples must hold num_samples=1000000000"),
        ("trials SET samples = ?", b"rubbish", "samples cannot be unpacked"),
        ("trials SET samples = ?", "text", "samples must be binary"),
        ("trials SET samples = ?", zlib.compress(bytes(10**6)), "must hold num_samples=40"),
        ("trials SET samples = ?", zlib.compress(b"\xff" * 160), "no finite number"),
        ("trials SET max_abs_error = ?", "big", "max_abs_error='big' must be a number"),
        ("trials SET compile_ms = ?", "long", "compile_ms='long' must be an integer"),
        ("trials SET created_ms = ?", 10**18, "must be milliseconds since 1970"),
        ("trials SET number = ?", "first", "number='first' must be an integer"),
        ("trials SET config_id = ?", 77, "its config 77 is missing"),
        ("trials SET binary_ids = ?", "[77]", "its binary 77 is missing"),
        ("trials SET binary_ids = ?", "77", "binary_ids='77' must be a list of integers"),
        ("trials SET binary_ids = ?", "[", "binary_ids is not valid JSON"),
    ],
)
def test_a_damaged_trial(database: Path, sql: str, value: object, note: str) -> None:
    damage(database, f"UPDATE {sql} WHERE id = 2", value)
    with Store.open(database, read_only=True) as store:
        assert [trial.trial_id for trial in store.trials(1)] == [1, 3]
        (found,) = store.damaged_rows
        assert found.startswith("trial 2: ")
        assert note in found
        assert len(store.trials(2)) == TRIALS
        assert len(store.winners()) == len(STUDIES)
        data = export_json(store)
        assert len(data["trials"]) == 5
        assert data["winners"][0]["finals"] == [1]


def test_badly_encoded_text(database: Path) -> None:
    damage(
        database,
        "INSERT INTO reasons (id, reason, digest) VALUES (1, CAST(? AS TEXT), x'00')",
        b"no\xff",
    )
    damage(database, "UPDATE trials SET reason_id = 1 WHERE id = 2")
    damage(database, "UPDATE configs SET values_json = CAST(? AS TEXT) WHERE id = 3", b"{\xff")
    with Store.open(database, read_only=True) as store:
        assert [trial.evaluation.reason for trial in store.trials(1)] == [
            "",
            "no\N{REPLACEMENT CHARACTER}",
        ]
        (found,) = store.damaged_rows
        assert found.startswith("trial 3: config 3 values_json is not valid JSON")


def test_a_winner_whose_trial_is_gone(database: Path) -> None:
    damage(database, "DELETE FROM trials WHERE id = 1")
    with Store.open(database, read_only=True) as store:
        assert [winner.study.study_id for winner in store.winners()] == [2]
        assert store.damaged_rows == ("winner 1: its trial 1 is missing or cannot be read",)


def test_a_damaged_binary(database: Path) -> None:
    damage(database, "UPDATE binaries SET registers = 'many' WHERE id = 1")
    with Store.open(database, read_only=True) as store:
        assert store.trials(1) == []
        assert "trial 3: binary 1.registers='many' must be an integer of at least 0" in (
            store.damaged_rows
        )
        assert len(store.studies()) == len(STUDIES)


def test_a_damaged_device(database: Path) -> None:
    damage(database, "UPDATE devices SET compute_capability = 'nine'")
    with Store.open(database, read_only=True) as store:
        assert store.studies() == []
        assert store.damaged_rows[0] == (
            "study 1: device 1.compute_capability='nine' must be text such as '9.0'"
        )


def test_a_config_that_is_there_but_damaged_is_no_silent_success(database: Path) -> None:
    damage(database, "UPDATE trials SET status = 'great' WHERE id = 3")
    with (
        pytest.raises(StoreError, match=r"trial 3 is in the database but cannot be read \(trial 3"),
        Store.open(database) as store,
    ):
        store.add_trial(1, cases.measured(12))


def test_reading_executes_nothing_from_the_database(database: Path, tmp_path: Path) -> None:
    (tmp_path / "evil_op.py").write_text("raise SystemExit('executed')")
    damage(database, "UPDATE problems SET op = 'evil_op' WHERE id = 1")
    with Store.open(database, read_only=True) as store:
        assert [study.study_id for study in store.studies()] == [2]
