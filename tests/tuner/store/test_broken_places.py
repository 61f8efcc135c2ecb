"""Databases that cannot be used: each is one StoreError that says what, where and what to do."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import store_cases as cases
from tilescout.errors import StoreError, UsageError
from tilescout.tuner.store import Store

pytestmark = pytest.mark.usefixtures("toy")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database with a study, three trials and a winner."""
    path = tmp_path / "results.db"
    fill(path)
    return path


def fill(path: Path) -> None:
    with Store.open(path) as store:
        study_id = store.study(cases.study_key(), seed=0).study_id
        store.add_trials(study_id, [cases.measured(i) for i in range(3)])
        store.decide(study_id, [cases.measured(1)])


@contextmanager
def ordinary_user(folder: Path) -> Iterator[None]:
    """Without the rights of root, for whom no file is read-only."""
    if os.geteuid():
        yield
        return
    os.chown(folder, 65534, 65534)
    for file in folder.iterdir():
        os.chown(file, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach, unlike tmp_path."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("read_only", [True, False], ids=["reading", "writing"])
@pytest.mark.parametrize(
    "content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096]
)
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes, read_only: bool) -> None:
    path = tmp_path / "results.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"results\.db is not a SQLite database.*restore it"):
        Store.open(path, read_only=read_only)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_with_damaged_pages(database: Path) -> None:
    content = bytearray(database.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    database.write_bytes(content)
    with (
        pytest.raises(StoreError, match=r"results\.db is damaged: restore it from a copy"),
        Store.open(database, read_only=True) as store,
    ):
        store.winners()


def test_a_truncated_file(database: Path) -> None:
    database.write_bytes(database.read_bytes()[: 4096 * 9])
    with (
        pytest.raises(StoreError, match="is damaged"),
        Store.open(database, read_only=True) as store,
    ):
        store.winners()


@pytest.mark.parametrize("read_only", [True, False], ids=["reading", "writing"])
def test_a_folder(tmp_path: Path, read_only: bool) -> None:
    with pytest.raises(StoreError, match="is a folder: name a file in it"):
        Store.open(tmp_path, read_only=read_only)


def test_a_missing_file_is_not_created_by_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"none\.db does not exist: 'tilescout tune'"):
        Store.open(tmp_path / "none.db", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(database: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open(database / "results.db")


@pytest.mark.parametrize("read_only", [True, False], ids=["reading", "writing"])
def test_a_folder_without_permission(open_folder: Path, read_only: bool) -> None:
    fill(open_folder / "results.db")
    open_folder.chmod(0o500)
    with ordinary_user(open_folder):
        if read_only:
            with Store.open(open_folder / "results.db", read_only=True) as store:
                assert len(store.winners()) == 1
        else:
            with pytest.raises(StoreError, match=r"other\.db cannot be opened.*--db"):
                Store.open(open_folder / "other.db")
            with pytest.raises(StoreError, match=r"folder/other\.db cannot be opened.*--db"):
                Store.open(open_folder / "folder" / "other.db")
    assert [file.name for file in open_folder.iterdir()] == ["results.db"]


def test_a_read_only_file(open_folder: Path) -> None:
    path = open_folder / "results.db"
    fill(path)
    path.chmod(0o400)
    before = path.read_bytes()
    with ordinary_user(open_folder):
        with pytest.raises(StoreError, match=r"results\.db cannot be written.*write permission"):
            Store.open(path)
        with Store.open(path, read_only=True) as store:
            assert len(store.winners()) == 1
    assert path.read_bytes() == before


def test_an_unreadable_file(open_folder: Path) -> None:
    path = open_folder / "results.db"
    fill(path)
    path.chmod(0)
    with ordinary_user(open_folder):
        for read_only in (True, False):
            with pytest.raises(StoreError, match=r"results\.db cannot be opened.*rights"):
                Store.open(path, read_only=read_only)


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_locked_for_longer_than_the_timeout(database: Path, mode: str) -> None:
    other = sqlite3.connect(database, isolation_level=None)
    other.execute(f"PRAGMA journal_mode = {mode}")
    other.execute("BEGIN IMMEDIATE")
    other.execute("UPDATE trials SET number = number + 100")
    with (
        pytest.raises(StoreError, match=r"is locked by another process for longer than 0\.2 s"),
        Store.open(database, timeout_s=0.2) as store,
    ):
        store.add_trial(1, cases.measured(9))
    other.execute("ROLLBACK")
    other.close()
    with Store.open(database, timeout_s=0.2) as store:
        assert store.add_trial(1, cases.measured(9)).number == 3


def test_another_program_s_database(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (id INTEGER)")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(StoreError, match=r"other\.db belongs to another program"):
            Store.open(path, read_only=read_only)
    assert path.read_bytes() == before


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(StoreError, match=r"empty\.db is empty: fill it"):
        Store.open(path, read_only=True)
    assert path.stat().st_size == 0
    fill(path)
    with Store.open(path, read_only=True) as store:
        assert len(store.winners()) == 1


def test_writing_to_a_read_only_store(database: Path) -> None:
    with Store.open(database, read_only=True) as store:
        for write in (
            lambda: store.add_trial(1, cases.measured(7)),
            lambda: store.decide(1, [cases.measured(1)]),
            lambda: store.study(cases.study_key(5), seed=0),
            store.rebuild_winners,
            store.prepare_for_shipping,
        ):
            with pytest.raises(StoreError, match="was opened read-only"):
                write()
        assert store.study(cases.study_key(), seed=0).num_trials == 3


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("mysql://host/name", "of kind 'mysql': supported are sqlite and postgresql"),
        ("postgresql://user:secret@host:port/x", "is not a valid URL: give a path"),
        ("postgresql+asyncpg://user:secret@host/x", "needs the Python package 'asyncpg'"),
    ],
)
def test_a_url_that_cannot_be_used(location: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Store.open(location)
    assert "secret" not in str(caught.value)


def test_a_database_in_memory_cannot_be_read_or_shipped() -> None:
    with pytest.raises(UsageError, match="in memory is empty"):
        Store.open(":memory:", read_only=True)
    with Store.open(":memory:") as store, pytest.raises(UsageError, match="is no file"):
        store.prepare_for_shipping()


def test_without_a_place_it_is_the_user_s_database() -> None:
    with Store.open() as store:
        assert str(store) == os.environ["TILESCOUT_DB"]
    assert Path(os.environ["TILESCOUT_DB"]).exists()


def test_a_sqlite_url_is_a_path(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/100% odd#name?.db"):
        pass
    fill(tmp_path / "100% odd#name.db")
    with Store.open(tmp_path / "100% odd#name.db", read_only=True) as store:
        assert len(store.winners()) == 1
