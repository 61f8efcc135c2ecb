"""The store's contract over SQLite in a file and in memory, and PostgreSQL where one is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_contract import StoreContract
from tilescout.tuner.store import Store

SERVER_VARIABLE = "TILESCOUT_TEST_POSTGRESQL"


class TestFile(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with Store.open(tmp_path / "new" / "folder" / "results.db") as store:
            yield store


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with Store.open("sqlite://") as store:
            yield store


@pytest.mark.skipif(SERVER_VARIABLE not in os.environ, reason=f"{SERVER_VARIABLE} names no server")
class TestPostgresql(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        from sqlalchemy import create_engine, text

        url = os.environ[SERVER_VARIABLE]
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        engine.dispose()
        with Store.open(url) as store:
            yield store
