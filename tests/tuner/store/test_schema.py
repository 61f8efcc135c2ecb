"""The schema: migrations give what the models say, versions are checked, the view is read."""

from __future__ import annotations

import json
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path

import pytest
import store_cases as cases
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from tilescout.errors import StoreError
from tilescout.tuner.records import SCHEMA_VERSION, BinaryFacts, Toolchain
from tilescout.tuner.store import Store, schema
from tilescout.tuner.store.models import Base, BinaryRow, KernelRow, ToolchainRow

pytestmark = pytest.mark.usefixtures("toy")

LATER_MIGRATION = '''
"""A later schema."""
import sqlalchemy as sa
from alembic import op
revision = "{later:04d}"
down_revision = "{current:04d}"
def upgrade():
    op.add_column("trials", sa.Column("note", sa.Text))
    op.execute("UPDATE trials SET note = 'migrated'")
    {last}
'''


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "results.db"
    with Store.open(path) as store:
        study_id = store.study(cases.study_key(), seed=0).study_id
        store.add_trials(study_id, [cases.measured(i) for i in range(3)])
        store.decide(study_id, [cases.measured(1, 12.5), cases.measured(2)])
    return path


@pytest.fixture
def later_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes the program know one schema more than the database has."""
    later = SCHEMA_VERSION + 1
    folder = tmp_path / "migrations"
    shutil.copytree(schema.MIGRATIONS, folder)
    text = LATER_MIGRATION.format(later=later, current=SCHEMA_VERSION, last="")
    (folder / "versions" / f"{later:04d}_later.py").write_text(text)
    monkeypatch.setattr(schema, "MIGRATIONS", folder)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", later)
    monkeypatch.setattr(schema, "OLDEST_READ_SCHEMA", later)
    return later


def query(path: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_models_say_what_the_migrations_make(database: Path) -> None:
    engine = create_engine(f"sqlite:///{database}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, Base.metadata)
    engine.dispose()
    assert differences == []


def test_the_newest_migration_is_the_schema_version(database: Path) -> None:
    scripts = ScriptDirectory(schema.MIGRATIONS)
    assert [int(revision) for revision in scripts.get_heads()] == [SCHEMA_VERSION]
    assert query(database, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert query(database, "SELECT version_num FROM alembic_version") == [
        (f"{SCHEMA_VERSION:04d}",)
    ]


def test_every_field_of_facts_and_toolchains_has_a_column() -> None:
    columns = {column.name for row in (KernelRow, BinaryRow) for column in row.__table__.columns}
    mix = {"instruction_classes_json", "instruction_counts_json"}
    assert mix < columns
    assert columns - mix - {"id", "digest", "kernel_id"} | {"instruction_mix"} == {
        field.name for field in fields(BinaryFacts)
    }
    columns = {column.name for column in ToolchainRow.__table__.columns}
    assert columns - {"id"} == {field.name for field in fields(Toolchain)}


def test_the_view_holds_a_row_a_winner(database: Path) -> None:
    with Store.open(database) as store:
        key = replace(cases.study_key(), toolchain=Toolchain("3.7.1"))
        study_id = store.study(key, seed=0).study_id
        store.add_trial(study_id, cases.measured(4, template="tilelang"))
        store.decide(study_id, [cases.measured(4, 20.0, template="tilelang")])
        winners = store.winners()
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    rows = [dict(row) for row in connection.execute("SELECT * FROM dispatch_winners")]
    connection.close()
    assert len(rows) == len(winners) == 2
    for row, winner in zip(rows, winners, strict=True):
        evaluation = winner.trial.evaluation
        assert json.loads(row.pop("problem")) == {"size": 1024, "dtype": "float32"}
        names, values = json.loads(row.pop("parameters")), json.loads(row.pop("config_values"))
        assert dict(zip(names, values, strict=True)) == evaluation.config.as_dict()
        decided_at = datetime.fromisoformat(row.pop("decided_at"))
        assert decided_at == winner.decided_at
        assert row == {
            "trial_id": winner.trial.trial_id,
            "op": "toy",
            "sku": "h200",
            "compute_capability": "9.0",
            "num_sms": 132,
            "memory_bytes": 141 * 10**9,
            "policy": "cuda_graph/cold_l2",
            "template": evaluation.config.template,
            "template_hash": {"triton": "hash-a", "tilelang": "hash-b"}[evaluation.config.template],
            "provenance": "measured",
            "time_us": evaluation.time_us,
            **winner.study.key.toolchain.as_dict(),
        }


def test_a_newer_schema_is_refused(database: Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 6}")
    connection.close()
    before = database.read_bytes()
    for read_only in (True, False):
        with pytest.raises(
            StoreError,
            match=rf"results\.db has schema {SCHEMA_VERSION + 6}, this Tilescout knows schemas up "
            rf"to {SCHEMA_VERSION}: upgrade Tilescout",
        ):
            Store.open(database, read_only=read_only)
    assert database.read_bytes() == before


def test_an_older_schema_is_migrated_by_writing(database: Path, later_version: int) -> None:
    with Store.open(database) as store:
        assert len(store.trials(1)) == 3
        assert len(store.winners()) == 1
    assert query(database, "PRAGMA user_version") == [(later_version,)]
    assert query(database, "SELECT DISTINCT note FROM trials") == [("migrated",)]


def test_an_older_schema_is_refused_by_reading(database: Path, later_version: int) -> None:
    before = database.read_bytes()
    with pytest.raises(
        StoreError,
        match=rf"has schema {SCHEMA_VERSION}, this Tilescout reads schemas from "
        rf"{later_version} on: open it once for writing",
    ):
        Store.open(database, read_only=True)
    assert database.read_bytes() == before


@pytest.fixture
def first_schema(database: Path) -> Path:
    """The database as schema 1 had it, without parts."""
    connection = sqlite3.connect(database)
    connection.execute("ALTER TABLE studies DROP COLUMN part")
    connection.execute("UPDATE alembic_version SET version_num = '0001'")
    connection.execute("PRAGMA user_version = 1")
    connection.commit()
    connection.close()
    return database


def test_the_first_schema_is_read_as_it_stands(first_schema: Path) -> None:
    before = first_schema.read_bytes()
    with Store.open(first_schema, read_only=True) as store:
        (study,) = store.studies()
        assert study.key == cases.study_key()
        assert len(store.trials(study.study_id)) == 3
        assert len(store.winners()) == 1
        assert store.part_studies(study) == []
        assert store.damaged_rows == ()
    assert first_schema.read_bytes() == before


def test_the_first_schema_is_migrated_and_keeps_its_studies(first_schema: Path) -> None:
    with Store.open(first_schema) as store:
        (study,) = store.studies()
        assert store.find_study(cases.study_key()) == study
        part = store.study(replace(cases.study_key(), part="triton: scan"), seed=0)
        assert store.part_studies(study) == [part]
        assert store.studies() == [study]
    assert query(first_schema, "PRAGMA user_version") == [(SCHEMA_VERSION,)]


def test_a_migration_that_fails_leaves_the_old_schema(
    database: Path, later_version: int, tmp_path: Path
) -> None:
    (script,) = (tmp_path / "migrations" / "versions").glob("*_later.py")
    text = LATER_MIGRATION.format(
        later=later_version, current=SCHEMA_VERSION, last="op.execute('SELECT no_such_column')"
    )
    script.write_text(text)
    with pytest.raises(StoreError, match="no_such_column"):
        Store.open(database)
    assert query(database, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    columns = [row[1] for row in query(database, "PRAGMA table_info(trials)")]
    assert "median_ns" in columns
    assert "note" not in columns


def test_threads_create_databases_at_once(tmp_path: Path) -> None:
    def create(path: Path) -> int:
        with Store.open(path) as store:
            return store.study(cases.study_key(), seed=0).study_id

    paths = [tmp_path / f"{index % 4}.db" for index in range(12)]
    with ThreadPoolExecutor(len(paths)) as pool:
        assert list(pool.map(create, paths)) == [1] * len(paths)


def test_an_operation_s_new_field_has_its_default_in_old_rows(database: Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute("UPDATE problems SET problem_json = '{\"size\":1024}'")
    connection.commit()
    connection.close()
    with Store.open(database, read_only=True) as store:
        assert store.studies()[0].key.problem == cases.study_key().problem
        assert store.damaged_rows == ()
