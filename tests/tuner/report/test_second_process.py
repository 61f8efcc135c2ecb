from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pool_jobs import crash_elsewhere, own_pid, raise_unknown_name
from tilescout.tuner.report import second_process, write_report
from tilescout.tuner.report.second_process import MIN_TRIALS, SecondProcess

NOW = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_small_reports_and_single_cores_work_alone(two_cores, monkeypatch):
    with SecondProcess(MIN_TRIALS - 1) as second:
        assert second.submit(own_pid).result() == os.getpid()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    with SecondProcess(MIN_TRIALS) as second:
        assert second.submit(own_pid).result() == os.getpid()


def test_a_process_that_dies_costs_no_result(two_cores):
    with SecondProcess(MIN_TRIALS) as second:
        assert second.submit(own_pid).result() != os.getpid()
        assert second.submit(crash_elsewhere, os.getpid()).result() == os.getpid()
        refused = second.submit(raise_unknown_name)
        with pytest.raises(RuntimeError, match="unknown thing 'x'"):
            refused.result()


def test_the_report_is_the_same_with_a_second_process(filled, two_cores, tmp_path, monkeypatch):
    write_report([filled], tmp_path / "alone", generated_at=NOW)
    monkeypatch.setattr(second_process, "MIN_TRIALS", 0)
    started = []
    start = second_process.WorkerPool.start
    monkeypatch.setattr(
        second_process.WorkerPool, "start", lambda pool: (started.append(pool), start(pool))[1]
    )
    write_report([filled], tmp_path / "together", generated_at=NOW)
    assert len(started) == 1
    alone = files_of(tmp_path / "alone")
    assert len(alone) > 25
    assert files_of(tmp_path / "together") == alone
