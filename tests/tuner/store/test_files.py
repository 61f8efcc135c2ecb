"""What lies on the disk: journal modes, files beside the database, and what reading leaves."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import store_cases as cases
from tilescout.errors import StoreError
from tilescout.tuner.store import Store, sqlite_file

pytestmark = pytest.mark.usefixtures("toy")


def add(store: Store, *indices: int) -> None:
    study_id = store.study(cases.study_key(), seed=0).study_id
    store.add_trials(study_id, [cases.measured(i) for i in indices])


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {f.name: (f.stat().st_size, f.stat().st_mtime_ns) for f in folder.iterdir()}


def journal_format(path: Path) -> int:
    """1 is a rollback journal, 2 a write-ahead log."""
    return path.read_bytes()[18]


def test_wal_only_while_open_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(path) as store:
        add(store, 1)
        assert journal_format(path) == 2
        assert {f.name for f in tmp_path.iterdir()} == {
            "results.db",
            "results.db-shm",
            "results.db-wal",
        }
    assert journal_format(path) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_the_last_writer_to_leave_closes_the_log(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(path) as first:
        with Store.open(path) as second:
            add(second, 1)
        assert journal_format(path) == 2
        add(first, 2)
        assert len(first.trials(1)) == 2
    assert journal_format(path) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_reading_at_rest_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(path) as store:
        add(store, 1)
    before = listing(tmp_path)
    with Store.open(path, read_only=True) as store:
        assert len(store.trials(1)) == 1
    assert listing(tmp_path) == before


def test_reading_beside_a_writer_sees_what_is_committed_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(path) as writer:
        add(writer, 1)
        before = listing(tmp_path)
        with Store.open(path, read_only=True) as store:
            assert len(store.trials(1)) == 1
            assert listing(tmp_path) == before
            add(writer, 2)
            assert len(store.trials(1)) == 2


def test_reading_after_a_crash_sees_the_log_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    code = (
        "import os, signal, toy_op\n"
        "from tilescout.kernels import registry; registry.register('toy', 'toy_op')\n"
        "import store_cases as cases\n"
        "from tilescout.tuner.store import Store\n"
        f"store = Store.open({str(path)!r})\n"
        "study_id = store.study(cases.study_key(), seed=0).study_id\n"
        "store.add_trials(study_id, [cases.measured(i) for i in range(5)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    before = listing(tmp_path)
    assert before["results.db-wal"][0] > 0
    with Store.open(path, read_only=True) as store:
        assert len(store.trials(1)) == 5
    assert listing(tmp_path) == before
    shutil.copy(path, tmp_path / "copy.db")
    shutil.copy(tmp_path / "results.db-wal", tmp_path / "copy.db-wal")
    with pytest.raises(StoreError, match=r"write-ahead log copy\.db-wal without its index"):
        Store.open(tmp_path / "copy.db", read_only=True)
    for name in ("copy.db", "results.db"):
        with Store.open(tmp_path / name) as store:
            add(store, 5)
            assert len(store.trials(1)) == 6
    assert {f.name for f in tmp_path.iterdir()} == {"copy.db", "results.db"}


def test_a_file_left_in_wal_mode_is_read_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(path) as store:
        add(store, 1)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    before = listing(tmp_path)
    with Store.open(path, read_only=True) as store:
        assert len(store.trials(1)) == 1
    assert listing(tmp_path) == before
    assert set(before) == {"results.db"}


def test_ready_for_shipping(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(path) as store:
        add(store, *range(300))
        store.transaction(lambda writer: writer._connection.exec_driver_sql("DELETE FROM trials"))
    full = path.stat().st_size
    with Store.open(path) as store:
        add(store, *range(300, 310))
        store.prepare_for_shipping()
        assert list(tmp_path.iterdir()) == [path]
        assert journal_format(path) == 1
        assert path.stat().st_size < full
        connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
        assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
        add(store, 1)
    assert list(tmp_path.iterdir()) == [path]
    assert journal_format(path) == 1


def test_shipping_is_refused_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(path) as other, Store.open(path) as store:
        add(other, 1)
        with pytest.raises(StoreError, match="is in use by another process"):
            store.prepare_for_shipping()


def test_a_deleted_file_is_not_created_again_by_closing(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(path) as store:
        add(store, 1)
        for file in tmp_path.iterdir():
            file.unlink()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("file_system", "expected"), [("nfs4", 1), ("ext4", 2)])
def test_no_wal_on_a_network_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str, expected: int
) -> None:
    folder = tmp_path / "a disk"
    folder.mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(folder).replace(" ", "\\040")
    mounts.write_text(
        f"none / ext4 rw 0 0\nhost:/x {escaped} {file_system} rw 0 0\nx {escaped}2 nfs rw 0 0\n"
    )
    monkeypatch.setattr(sqlite_file, "MOUNTS", mounts)
    with Store.open(folder / "results.db") as store:
        add(store, 1)
        assert journal_format(folder / "results.db") == expected
    assert [file.name for file in folder.iterdir()] == ["results.db"]
