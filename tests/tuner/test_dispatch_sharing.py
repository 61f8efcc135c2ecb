"""Many threads, forks and processes look up from one file; a large file stays quick."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import dispatch
from tilescout.tuner import snapshot as snapshot_module
from tilescout.tuner.dispatch import Snapshot
from toy_op import ToyProblem
from winner_databases import MadeUpWinner, write_winners

pytestmark = pytest.mark.usefixtures("toy")

NUM_THREADS = 8
NUM_PROCESSES = 24


def config(block_n: int) -> Config:
    return Config.of("triton", {"block_n": block_n, "num_stages": 2, "split_rule": "none"})


@pytest.fixture
def path(tmp_path: Path, h200: DeviceSpec) -> Path:
    path = tmp_path / "a.db"
    blocks = {1 << e: 16 << e % 4 for e in range(4, 14)}
    write_winners(path, [MadeUpWinner(ToyProblem(s), h200, config(b)) for s, b in blocks.items()])
    return path


def test_threads_get_one_answer_and_count_a_miss_once(path: Path, h200: DeviceSpec) -> None:
    snapshot = Snapshot.load([path])
    start = threading.Barrier(NUM_THREADS)
    problems = [ToyProblem(size) for size in (16, 17, 64, 1024, 8192, 10**7)]
    answers: list[list[object]] = []

    def ask() -> None:
        start.wait()
        answers.append([snapshot.lookup(p, h200) for _ in range(200) for p in problems])

    threads = [threading.Thread(target=ask) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == NUM_THREADS
    for other in answers[1:]:
        assert all(a is b for a, b in zip(answers[0], other, strict=True))
    assert sorted(miss.problem.size for miss in snapshot.misses) == [17, 10**7]


def test_a_fork_while_another_thread_resolves_can_look_up(path: Path, h200: DeviceSpec) -> None:
    snapshot = Snapshot.load([path])
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with snapshot_module._lock, dispatch._lock:
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        child = _fork(lambda: int(snapshot.lookup(ToyProblem(64), h200).tier != "exact"))
        deadline = time.monotonic() + 20
        pid, status = os.waitpid(child, os.WNOHANG)
        while pid == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
            pid, status = os.waitpid(child, os.WNOHANG)
        if pid == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child waits for a lock that its parent's thread held")
    finally:
        release.set()
        holder.join()
    assert os.waitstatus_to_exitcode(status) == 0


def _fork(body) -> int:
    child = os.fork()
    if child == 0:
        try:
            os._exit(body())
        except BaseException:
            os._exit(9)
    return child


def test_processes_start_from_one_file_that_is_being_written(
    path: Path, h200: DeviceSpec, tmp_path: Path
) -> None:
    script = tmp_path / "ask.py"
    script.write_text(
        "import sys, toy_op\n"
        "from tilescout.kernels import registry\n"
        "from tilescout.search_spaces import registry as spaces\n"
        "registry.register('toy', 'toy_op'); spaces.register('toy', 'toy_op')\n"
        "from tilescout.tuner.dispatch import Snapshot\n"
        "from devices import H200\n"
        "found = Snapshot.load([sys.argv[1]]).lookup(toy_op.ToyProblem(64), H200)\n"
        "heavy = {'optuna', 'sqlalchemy', 'pandas', 'torch'} & set(sys.modules)\n"
        "print(found.tier, found.config['block_n'], *heavy)\n"
    )
    command = [sys.executable, str(script), str(path)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(NUM_PROCESSES)
    ]
    # A writer goes on meanwhile; the readers see the winner before or after, never an error.
    write_winners(path, [MadeUpWinner(ToyProblem(2**15 + i), h200, config(64)) for i in range(8)])
    outputs = [process.communicate(timeout=200) for process in running]
    assert [process.returncode for process in running] == [0] * NUM_PROCESSES, outputs
    assert {out.strip() for out, _ in outputs} == {"exact 64"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 winners of the toy operation, written past the store."""
    import toy_op
    from devices import H200
    from tilescout.kernels import registry
    from tilescout.search_spaces import registry as spaces

    registry.register("toy", toy_op.MODULE)
    spaces.register("toy", toy_op.MODULE)
    path = tmp_path_factory.mktemp("large") / "large.db"
    write_winners(path, [MadeUpWinner(ToyProblem(1), H200, config(64))])
    with closing(sqlite3.connect(path)) as connection, connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(dispatch_winners)")]
        connection.execute("CREATE TABLE shown AS SELECT * FROM dispatch_winners")
        row = dict(zip(names, connection.execute("SELECT * FROM shown").fetchone(), strict=True))
        rows = []
        for size in range(2, 100_001):
            row |= {"trial_id": size, "problem": json.dumps({"dtype": "float32", "size": size})}
            row["problem"] = row["problem"].replace(" ", "")
            rows.append(tuple(row.values()))
        marks = ", ".join("?" * len(names))
        connection.executemany(f"INSERT INTO shown VALUES ({marks})", rows)
        connection.execute("DROP VIEW dispatch_winners")
        connection.execute(f"CREATE VIEW dispatch_winners AS SELECT {', '.join(names)} FROM shown")
    return path


def test_of_a_large_file_only_the_rows_in_question_are_checked(
    large: Path, h200: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilescout.tuner import winner_index

    checked: list[int] = []
    check_row = winner_index.check_row
    monkeypatch.setattr(
        winner_index,
        "check_row",
        lambda read, rank, at: (checked.append(at), check_row(read, rank, at))[1],
    )
    snapshot = Snapshot.load([large])
    assert len(snapshot.databases[0].values) == 100_000
    found = snapshot.lookup(ToyProblem(77_777), h200)
    assert (found.tier, found.trial_id, len(checked)) == ("exact", 77_777, 1)
    # Beyond the file's end, so that only its last rows are in range.
    near = snapshot.lookup(ToyProblem(399_900), h200)
    assert (near.tier, near.trial_id) == ("nearest", 100_000)
    assert len(checked) < 100


def test_a_hit_reads_no_row_and_compares_no_field(large: Path, h200: DeviceSpec) -> None:
    snapshot = Snapshot.load([large])
    problem = ToyProblem(5)
    first = snapshot.lookup(problem, h200)

    class Watched(ToyProblem):
        def __hash__(self) -> int:
            raise AssertionError("hashed")

    watched = Watched(5)
    snapshot._hot[id(watched), id(h200), "nearest", False] = (watched, h200, first)
    assert snapshot.lookup(watched, h200) is first
    assert snapshot.lookup(ToyProblem(5), h200) is first


def test_objects_that_are_gone_are_never_mistaken(path: Path, h200: DeviceSpec) -> None:
    snapshot = Snapshot.load([path])
    for _ in range(3):
        for size in (16, 32, 64, 128, 256):
            # Each problem dies at once: the next is often at the same address.
            assert snapshot.lookup(ToyProblem(size), h200).problem.size == size


def test_the_winner_says_how_old_it_is_and_what_it_was_found_with(
    path: Path, h200: DeviceSpec
) -> None:
    found = Snapshot.load([path]).lookup(ToyProblem(64), h200)
    assert found.age_days is not None
    assert 0 <= found.age_days < 1
    assert found.time_us == 12.5
    assert found.versions.as_dict().keys() >= {"triton", "torch", "driver"}
    default = Snapshot.load([path]).lookup(ToyProblem(10**8), h200)
    assert (default.age_days, default.time_us, default.decided_at) == (None, None, None)
