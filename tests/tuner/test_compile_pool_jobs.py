"""The queue of a compile pool: each kernel once, what somebody waits for first."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from tilescout.kernels.base import CompiledBinary
from tilescout.kernels.tilelang_spec import TileLangKernelSpec
from tilescout.tuner import compile_pool_jobs
from tilescout.tuner.compile_pool_jobs import KernelJobs, KernelKey
from tilescout.tuner.compile_result import CompileResult
from tilescout.tuner.records import TrialStatus


@dataclass(frozen=True)
class Spec:
    name: str

    def compile(self, arch: int) -> CompiledBinary:
        raise AssertionError("nothing is compiled here")


def keys(*names: str, reads_code: bool = True) -> list[KernelKey]:
    return [KernelKey(Spec(name), 90, reads_code) for name in names]


class Compilers:
    """Jobs that end when a test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.jobs: dict[str, Future[CompileResult]] = {}

    def __call__(self, key: KernelKey) -> Future[CompileResult]:
        name = key.spec.name if key.reads_code else f"{key.spec.name} unread"
        self.begun.append(name)
        self.jobs[name] = Future()
        return self.jobs[name]

    def end(self, name: str, status: TrialStatus = TrialStatus.OK, compile_s: float = 2.0) -> None:
        self.jobs[name].set_result(CompileResult(status, "", (), compile_s, f"code of {name}"))


@pytest.fixture
def compilers() -> Compilers:
    return Compilers()


@pytest.fixture
def queue(compilers: Compilers) -> KernelJobs:
    return KernelJobs(2, compilers)


def test_configs_share_kernels_and_the_first_pays(queue: KernelJobs, compilers: Compilers) -> None:
    first, second = queue.submit(keys("a", "b")), queue.submit(keys("b", "c"))
    assert compilers.begun == ["a", "b"]
    compilers.end("a")
    compilers.end("b")
    assert first.result().compile_s == 4.0
    assert first.result().digest == "code of a code of b"
    assert not second.done()
    compilers.end("c")
    assert second.result().compile_s == 2.0
    again = queue.submit(keys("a", "c"))
    assert again.result() == CompileResult(TrialStatus.OK, digest="code of a code of c")
    assert compilers.begun == ["a", "b", "c"]


def test_the_first_kernel_that_fails_is_the_configs_fate(
    queue: KernelJobs, compilers: Compilers
) -> None:
    job = queue.submit(keys("a", "b"))
    compilers.end("b", TrialStatus.CRASHED)
    compilers.end("a", TrialStatus.COMPILE_ERROR)
    assert job.result().status is TrialStatus.COMPILE_ERROR
    assert job.result().digest is None
    # A compiler says the same again; a process that died may have had another reason.
    assert queue.submit(keys("a")).result().status is TrialStatus.COMPILE_ERROR
    assert not queue.submit(keys("b")).done()
    assert compilers.begun == ["a", "b", "b"]


def test_what_somebody_waits_for_comes_before_what_was_prepared(
    queue: KernelJobs, compilers: Compilers
) -> None:
    queue.prepare(keys("p1", "p2", "p3", "p4"))
    assert compilers.begun == ["p1", "p2"]
    queue.submit(keys("wanted", "p4"))
    compilers.end("p1")
    compilers.end("p2")
    assert compilers.begun[2:] == ["p4", "wanted"]
    queue.drop_prepared()
    compilers.end("wanted")
    assert compilers.begun[4:] == [], "p3 was dropped"


def test_what_takes_long_begins_first(compilers: Compilers) -> None:
    queue = KernelJobs(1, compilers)
    queue.prepare(keys("running", "triton"))
    slow = TileLangKernelSpec("module", "factory", "slow", {})
    queue.prepare([KernelKey(slow, 90, True)])
    compilers.end("running")
    assert compilers.begun == ["running", "slow_kernel"]


def test_what_was_prepared_is_paid_by_the_first_to_ask(
    queue: KernelJobs, compilers: Compilers
) -> None:
    queue.prepare(keys("a"))
    compilers.end("a")
    assert queue.submit(keys("a")).result().compile_s == 2.0
    assert queue.submit(keys("a")).result().compile_s == 0.0


def test_code_of_what_was_prepared_is_read_behind_it(compilers: Compilers) -> None:
    queue = KernelJobs(1, compilers)
    queue.prepare(keys("a", "b", reads_code=False))
    for name in ("a unread", "b unread"):
        compilers.end(name)
    assert compilers.begun == ["a unread", "b unread", "a"]
    compilers.end("a")
    assert queue.submit(keys("a")).done()
    compilers.end("b", TrialStatus.COMPILE_ERROR)
    job = queue.submit(keys("c", reads_code=False))
    compilers.end("c unread")
    assert job.done()
    assert compilers.begun[3:] == ["b", "c unread"], "only what was prepared is read unasked"


def test_giving_up_leaves_what_runs_and_what_others_want(
    queue: KernelJobs, compilers: Compilers
) -> None:
    jobs = [queue.submit(keys(*names)) for names in (("a", "b", "c"), ("c",), ("d",))]
    jobs[0].cancel()
    jobs[2].cancel()
    assert not compilers.jobs["a"].cancelled()
    compilers.end("a")
    compilers.end("b")
    assert compilers.begun == ["a", "b", "c"], "d is of no use to anybody"
    compilers.end("c")
    assert jobs[1].result().status is TrialStatus.OK
    assert queue.submit(keys("a")).done(), "what ran to its end is kept"


@pytest.mark.parametrize(("patience_s", "is_ended"), [(0.0, True), (1000.0, False)])
def test_one_that_nobody_waits_for_makes_room_when_it_is_due(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch, patience_s: float, is_ended: bool
) -> None:
    monkeypatch.setattr(compile_pool_jobs, "_PATIENCE_S", patience_s)
    queue = KernelJobs(1, compilers)
    queue.submit(keys("hangs")).cancel()
    queue.submit(keys("wanted"))
    assert compilers.jobs["hangs"].cancelled() is is_ended
    assert compilers.begun == (["hangs", "wanted"] if is_ended else ["hangs"])
    queue.close()


def test_it_makes_room_later_though_nothing_happens(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_pool_jobs, "_PATIENCE_S", 0.05)
    queue = KernelJobs(1, compilers)
    queue.submit(keys("hangs")).cancel()
    job = queue.submit(keys("wanted"))
    _until(lambda: "wanted" in compilers.begun)
    compilers.end("wanted")
    assert job.result(timeout=10).status is TrialStatus.OK


def test_an_error_that_is_not_the_configs_reaches_all_and_is_not_kept(
    queue: KernelJobs, compilers: Compilers
) -> None:
    jobs = [queue.submit(keys("a")), queue.submit(keys("a", "b"))]
    compilers.jobs["a"].set_exception(OSError("no disassembler"))
    compilers.end("b")
    for job in jobs:
        with pytest.raises(OSError, match="no disassembler"):
            job.result(timeout=10)
    assert not queue.submit(keys("a")).done()


def test_closing_cancels_all_that_wait(queue: KernelJobs, compilers: Compilers) -> None:
    jobs = [queue.submit(keys(name)) for name in "abc"]
    queue.close()
    assert all(job.cancelled() for job in jobs)
    assert compilers.begun == ["a", "b"]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
