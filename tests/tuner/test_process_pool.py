"""Worker processes: their fates, that they end with the parent, and that they leave it alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pool_jobs
import pytest
from tilescout.errors import UnknownNameError
from tilescout.tuner.memory_watch import memory_share
from tilescout.tuner.process_pool import (
    JobCrashedError,
    JobMemoryError,
    JobTimeoutError,
    WorkerPool,
)


@pytest.fixture
def pool():
    with WorkerPool(1) as workers:
        yield workers


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {[p for p in pids if is_running(p)]}"
        time.sleep(0.05)


def read_pids(path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_text().split()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(pid) for pid in path.read_text().split()]


def test_result_and_exception_come_back(pool):
    assert pool.submit(30, pool_jobs.add, 2, b=3).result() == 5
    with pytest.raises(ZeroDivisionError):
        pool.submit(30, pool_jobs.divide, 1, 0).result()


def test_exception_that_does_not_pickle_keeps_its_text_and_the_pool(pool):
    with pytest.raises(RuntimeError, match="UnknownNameError: unknown thing 'x'"):
        pool.submit(30, pool_jobs.raise_unknown_name).result()
    assert pool.submit(30, pool_jobs.add, 1, b=1).result() == 2
    assert issubclass(UnknownNameError, Exception)


def test_crash_costs_one_job_and_tells_last_words(pool):
    crash = pool.submit(30, pool_jobs.crash, 11)
    after = pool.submit(30, pool_jobs.add, 1, b=1)
    with pytest.raises(JobCrashedError, match=r"exit code 11\): LLVM ERROR: out of words"):
        crash.result()
    assert after.result() == 2


def test_signal_is_named(pool):
    with pytest.raises(JobCrashedError, match="killed by SIGSEGV"):
        pool.submit(30, pool_jobs.kill_self, signal.SIGSEGV).result()


def test_crash_is_not_blamed_on_the_words_of_an_earlier_job(pool):
    pool.submit(30, pool_jobs.say, "harmless warning").result()
    with pytest.raises(JobCrashedError) as caught:
        pool.submit(30, pool_jobs.kill_self, signal.SIGSEGV).result()
    assert "harmless" not in str(caught.value)


def test_hang_is_killed_with_its_children(pool, tmp_path):
    pids = tmp_path / "pids"
    pool.submit(30, pool_jobs.add, 1, b=1).result()
    hang = pool.submit(1.0, pool_jobs.hang_with_child, str(pids))
    with pytest.raises(JobTimeoutError, match="longer than 1 s"):
        hang.result()
    wait_until_gone(*read_pids(pids, 2))
    assert pool.submit(30, pool_jobs.add, 1, b=1).result() == 2


def test_memory_of_a_program_that_a_job_started_counts():
    limit = 2**29
    with WorkerPool(1, memory_limit_bytes=limit) as pool:
        greedy = pool.submit(60, pool_jobs.let_child_eat_memory, 2 * limit)
        with pytest.raises(JobMemoryError, match=r"GiB of memory, above 0\.5 GiB"):
            greedy.result()
        assert pool.submit(30, pool_jobs.add, 1, b=1).result() == 2


def test_workers_share_the_memory_and_get_what_a_compiler_needs():
    assert memory_share(1) >= memory_share(2) >= 2 * 2**30
    assert memory_share(10_000) == 2 * 2**30


def test_idle_worker_that_dies_is_replaced(pool):
    worker = pool.submit(30, os.getpid).result()
    os.kill(worker, signal.SIGKILL)
    wait_until_gone(worker)
    assert pool.submit(30, pool_jobs.add, 1, b=1).result() == 2


def test_worker_outlives_the_thread_that_started_it(pool):
    first: list[int] = []
    thread = threading.Thread(target=lambda: first.append(pool.submit(30, os.getpid).result()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert pool.submit(30, os.getpid).result() == first[0]


def test_close_cancels_what_has_not_ended(tmp_path):
    pids = tmp_path / "pids"
    pool = WorkerPool(1)
    hang = pool.submit(None, pool_jobs.hang_with_child, str(pids))
    queued = pool.submit(None, pool_jobs.add, 1, b=1)
    started = read_pids(pids, 2)
    pool.close()
    pool.close()
    assert hang.cancelled()
    assert queued.cancelled()
    wait_until_gone(*started)


def test_initializer_that_fails_is_a_crash_not_a_hang():
    with WorkerPool(1, initializer=pool_jobs.fail) as pool, pytest.raises(JobCrashedError):
        pool.submit(30, pool_jobs.add, 1, b=1).result(timeout=60)


def test_workers_die_with_a_parent_that_is_killed(tmp_path):
    pids = tmp_path / "pids"
    script = tmp_path / "unguarded.py"
    # No __main__ guard: a worker that ran the script again would start a pool of its own.
    script.write_text(
        "import pool_jobs\n"
        "from tilescout.tuner.process_pool import WorkerPool\n"
        f"WorkerPool(1).submit(None, pool_jobs.hang_with_child, {str(pids)!r}).result()\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)])
    started = read_pids(pids, 2)
    parent.kill()
    parent.wait()
    wait_until_gone(*started)
    assert len(pids.read_text().split()) == 2


def test_a_job_that_is_taken_back_frees_its_process(pool, tmp_path):
    pids = tmp_path / "pids"
    hung = pool.submit(60.0, pool_jobs.hang_with_child, str(pids))
    running = read_pids(pids, 2)
    assert hung.cancel()
    wait_until_gone(*running)
    assert pool.submit(30, pool_jobs.add, 1, b=1).result() == 2
