"""Rows that cannot serve never hide their neighbours; files that cannot be read are loud."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tilescout.errors import StoreError, UsageError
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import dispatch
from tilescout.tuner.dispatch import Snapshot
from tilescout.tuner.records import SCHEMA_VERSION
from toy_op import ToyProblem
from winner_databases import MadeUpWinner, write_winners

pytestmark = pytest.mark.usefixtures("toy")

GOOD = Config.of("triton", {"block_n": 64, "num_stages": 2, "split_rule": "none"})
DAMAGED_SIZE = 2048


@pytest.fixture(autouse=True)
def _fresh_snapshots():
    dispatch.refresh()
    yield
    dispatch.refresh()


@pytest.fixture
def path(tmp_path: Path, h200: DeviceSpec) -> Path:
    """A database with a good winner for size 1024 and one to damage for size 2048."""
    path = tmp_path / "a.db"
    sizes = (1024, DAMAGED_SIZE)
    write_winners(path, [MadeUpWinner(ToyProblem(size), h200, GOOD) for size in sizes])
    return path


def damage(path: Path, column: str, value: object) -> None:
    """Makes the view show ``value`` in the second row, whatever the tables below hold."""
    with closing(sqlite3.connect(path)) as connection, connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(dispatch_winners)")]
        connection.execute("CREATE TABLE shown AS SELECT * FROM dispatch_winners")
        connection.execute("DROP VIEW dispatch_winners")
        connection.execute(
            f"UPDATE shown SET {column} = ? WHERE problem LIKE '%{DAMAGED_SIZE}%'", (value,)
        )
        connection.execute(f"CREATE VIEW dispatch_winners AS SELECT {', '.join(names)} FROM shown")


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("op", "no_such_op", "unknown op 'no_such_op': known are"),
        ("template", "cuda", "unknown template 'cuda' of toy: known are triton"),
        ("template_hash", "0" * 64, "has changed since"),
        ("problem", "{2048", "problem is malformed JSON"),
        ("problem", "[" * 100_000 + "2048", "problem is malformed JSON"),
        ("problem", '{"size": -2048}', "size=-2048"),
        ("problem", '{"length": 2048}', "unknown field"),
        ("config_values", "{}", "config_values is not a JSON list"),
        ("config_values", "[", "config_values is malformed JSON"),
        ("config_values", "[1]", "config has 1 values for 3 parameters"),
        ("config_values", '[1.5, 2, "none"]', "block_n=1.5"),
        ("config_values", None, "config_values=None is not text"),
        ("config_values", b"\xff\xfe", "is not text"),
        ("parameters", "7", "parameters is not a JSON list"),
        ("parameters", '["block_n", 2, "split_rule"]', "config has a parameter 2: not text"),
        ("provenance", "published", "'published' is not one of measured, predicted"),
        ("num_sms", "many", "num_sms='many' is not"),
        ("time_us", None, "time_us=None is not a positive time"),
        ("decided_at", 7, "decided_at=7 is not text"),
    ],
)
def test_a_bad_row_is_set_aside_alone(
    path: Path, h200: DeviceSpec, column: str, value: object, reason: str
) -> None:
    damage(path, column, value)
    snapshot = Snapshot.load([path])
    (skipped,) = snapshot.skipped
    assert reason in skipped.reason
    assert (skipped.database, skipped.trial_id) == (path, 2)
    assert snapshot.lookup(ToyProblem(1024), h200).tier == "exact"
    assert snapshot.lookup(ToyProblem(DAMAGED_SIZE), h200).tier == "nearest"
    assert snapshot.explain(ToyProblem(1024), h200).skipped == (skipped,)


def test_a_row_that_is_not_utf8_does_not_stop_the_reading(path: Path, h200: DeviceSpec) -> None:
    damage(path, "config_values", None)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "UPDATE shown SET config_values = CAST(X'FFFE' AS TEXT) WHERE config_values IS NULL"
        )
    snapshot = Snapshot.load([path])
    assert "malformed JSON" in snapshot.skipped[0].reason
    assert snapshot.lookup(ToyProblem(1024), h200).tier == "exact"


def test_a_text_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_text("not a database at all, " * 100)
    with pytest.raises(StoreError, match=r"a\.db' is damaged .*restore it"):
        Snapshot.load([path])


def test_a_file_cut_in_the_middle(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 3] + b"\xa5" * (len(raw) // 3))
    with pytest.raises(StoreError, match=r"a\.db' is damaged"):
        Snapshot.load([path])


def test_a_newer_schema(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError, match=f"schema {SCHEMA_VERSION + 1}.*upgrade Tilescout"):
        Snapshot.load([path])


def test_another_programs_database(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (x)")
    with pytest.raises(StoreError, match="is not a Tilescout database"):
        Snapshot.load([path])


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    with pytest.raises(StoreError, match="is not a Tilescout database"):
        Snapshot.load([tmp_path / "a.db"])


def test_a_locked_database(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilescout.tuner.winner_rows.LOCK_TIMEOUT_S", 0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"a\.db' is locked .*try again"):
            Snapshot.load([path])
        connection.execute("ROLLBACK")
    assert Snapshot.load([path]).databases[0].is_present


def test_an_explicit_database_must_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no database file at"):
        Snapshot.load([tmp_path / "missing.db"])
    with pytest.raises(StoreError, match="no database file at"):
        Snapshot.load([tmp_path])


def test_a_missing_user_database_is_absent(
    tmp_path: Path, h200: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    snapshot = dispatch.current_snapshot()
    assert [read.is_present for read in snapshot.databases] == [False, False]
    assert snapshot.lookup(ToyProblem(1024), h200).tier == "default"


def test_a_server_is_not_read(tmp_path: Path, path: Path) -> None:
    with pytest.raises(UsageError, match="look-ups read SQLite files only"):
        Snapshot.load(["postgresql://host/db"])
    assert Snapshot.load([f"sqlite:///{path}"]).databases[0].source.path == path


def test_reading_leaves_no_trace(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")

    def state() -> tuple[object, ...]:
        return path.read_bytes(), path.stat().st_mtime_ns, sorted(path.parent.iterdir())

    before = state()
    Snapshot.load([path])
    assert state() == before


@pytest.mark.parametrize("is_writing", [True, False], ids=["beside a writer", "at rest"])
def test_reading_a_file_in_wal_mode_leaves_no_trace(path: Path, is_writing: bool) -> None:
    """A plain read-only connection would create ``-shm`` and ``-wal``, or change them."""

    def state() -> dict[str, tuple[int, int]]:
        return {f.name: (f.stat().st_size, f.stat().st_mtime_ns) for f in path.parent.iterdir()}

    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("UPDATE winners SET decided_ms = decided_ms + 1")
        writer.commit()
        if is_writing:
            before = state()
            assert len(before) == 3
            Snapshot.load([path])
            assert state() == before
            return
    before = state()
    assert list(before) == [path.name]
    Snapshot.load([path])
    assert state() == before


def test_a_log_without_its_index_is_not_missed(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("UPDATE winners SET decided_ms = decided_ms + 1")
        writer.commit()
        for suffix in ("", "-wal"):
            copy.with_name(copy.name + suffix).write_bytes(
                path.with_name(path.name + suffix).read_bytes()
            )
    with pytest.raises(StoreError, match=r"write-ahead log copy\.db-wal without its index"):
        Snapshot.load([copy])


def test_a_run_that_is_writing_is_seen(path: Path, h200: DeviceSpec) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM winners")
        assert Snapshot.load([path]).lookup(ToyProblem(1024), h200).tier == "exact"
        writer.execute("COMMIT")
        assert Snapshot.load([path]).lookup(ToyProblem(1024), h200).tier == "default"


def test_the_shipped_file_is_read_where_nothing_may_be_written(
    path: Path, h200: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: path)
    opened = []
    connect = sqlite3.connect

    def spy(name: str, **options: object) -> sqlite3.Connection:
        opened.append(name)
        return connect(name, **options)

    monkeypatch.setattr("tilescout.tuner.winner_rows.sqlite3.connect", spy)
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        assert dispatch.current_snapshot().lookup(ToyProblem(1024), h200).tier == "exact"
    finally:
        path.parent.chmod(0o755)
    assert "mode=ro&immutable=1" in opened[0]
