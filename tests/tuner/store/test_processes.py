"""Several processes on one database, and a writer that is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_cases as cases
from tilescout.tuner.store import Store

pytestmark = pytest.mark.usefixtures("toy")

WRITER = """
import sys, toy_op, store_cases as cases
from tilescout.kernels import registry
from tilescout.tuner.store import Store
registry.register("toy", "toy_op")
path, size, first, last = sys.argv[1], *map(int, sys.argv[2:])
print("ready", flush=True)
sys.stdin.readline()
with Store.open(path) as store:
    study_id = store.study(cases.study_key(size), seed=0).study_id
    for index in range(first, last):
        trial = store.add_trial(study_id, cases.measured(index))
        print(trial.number, index, flush=True)
    store.decide(study_id, [cases.measured(first)])
"""


class Writer:
    """A process that adds trials ``first`` to ``last`` of a study once it is told to."""

    def __init__(self, path: Path, size: int, first: int, last: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(size), str(first), str(last)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        assert self.lines.readline() == "ready\n"

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def committed(self) -> Iterator[tuple[int, int]]:
        """(number, index) of each trial as its commit is reported."""
        for line in self.lines:
            number, index = line.split()
            yield int(number), int(index)

    def finish(self) -> list[tuple[int, int]]:
        reported = list(self.committed())
        assert self.process.wait() == 0
        self.process.stdin.close()
        self.lines.close()
        return reported

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()


def check_integrity(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


def test_two_processes_write_two_studies(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    writers = [Writer(path, 1, 0, 60), Writer(path, 2, 0, 60)]
    for writer in writers:
        writer.start()
    for writer in writers:
        assert [number for number, _ in writer.finish()] == list(range(60))
    with Store.open(path, read_only=True) as store:
        assert [study.num_trials for study in store.studies()] == [60, 60]
        assert len(store.winners()) == 2
        assert store.damaged_rows == ()
    check_integrity(path)
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_write_the_same_study(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    writers = [Writer(path, 1, 0, 60), Writer(path, 1, 20, 80)]
    for writer in writers:
        writer.start()
    one, two = ({index: number for number, index in w.finish()} for w in writers)
    with Store.open(path, read_only=True) as store:
        (study,) = store.studies()
        trials = store.trials(study.study_id)
        assert len(store.winners()) == 1
    assert [trial.number for trial in trials] == list(range(80))
    written = {trial.evaluation.config: trial.number for trial in trials}
    assert written == {cases.config(index): number for index, number in {**one, **two}.items()}
    assert {index: one[index] for index in range(20, 60)} == {
        index: two[index] for index in range(20, 60)
    }
    check_integrity(path)


def test_a_killed_writer_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    survivor = Writer(path, 2, 0, 100)
    survivor.start()
    reported: dict[int, int] = {}
    for enough in (20, 45):
        writer = Writer(path, 1, 0, 100_000)
        writer.start()
        for number, index in writer.committed():
            reported[index] = number
            if index == enough:
                break
        writer.kill()
        # What it had committed before the signal came but not yet been read.
        reported.update((index, number) for number, index in writer.committed())
        writer.lines.close()
    assert len(survivor.finish()) == 100
    with Store.open(path) as store:
        study = store.study(cases.study_key(1), seed=0)
        trials = store.trials(study.study_id)
        found = {trial.evaluation.config: trial.number for trial in trials}
        for index, number in reported.items():
            assert found[cases.config(index)] == number
        # At most the trial between its commit and its report is there besides.
        assert len(reported) <= len(trials) <= len(reported) + 2
        for trial in trials:
            index = trial.evaluation.config["block_n"]
            assert trial.evaluation == cases.without_samples(cases.measured(int(index)))
        assert store.add_trial(study.study_id, cases.measured(99_999)).number == len(trials)
        assert len(store.trials(store.study(cases.study_key(2), seed=0).study_id)) == 100
    check_integrity(path)
    assert list(tmp_path.iterdir()) == [path]


def test_many_processes_create_one_database(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.db"
    writers = [Writer(path, 1, index, index + 3) for index in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.finish()
    with Store.open(path, read_only=True) as store:
        assert [study.num_trials for study in store.studies()] == [6]
    check_integrity(path)
