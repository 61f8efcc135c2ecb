"""What is looked up is counted, over threads, forks and processes; tuning takes it in order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tilescout
from tilescout.errors import StoreError, UsageError
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import capture as capture_module
from tilescout.tuner import captured, cli, dispatch
from tilescout.tuner.capture import read_capture
from tilescout.tuner.dispatch import Snapshot
from tilescout.tuner.records import Evaluation, Provenance, Timing, TrialStatus
from tilescout.tuner.store import Store
from toy_op import ToyProblem
from winner_databases import MadeUpWinner, sibling_of, write_winners

pytestmark = pytest.mark.usefixtures("toy")


def config(block_n: int) -> Config:
    return Config.of("triton", {"block_n": block_n, "num_stages": 2, "split_rule": "none"})


@pytest.fixture(autouse=True)
def _off_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    dispatch.refresh()
    yield
    tilescout.capture(None)
    monkeypatch.undo()
    dispatch.refresh()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls.json"


def counts(path: Path) -> dict[tuple[int, str], int]:
    """Counts by (size, tier)."""
    return {(json.loads(e.problem)["size"], e.tier): e.count for e in read_capture(path)}


def test_look_ups_are_counted_by_problem_and_tier(path: Path, h200: DeviceSpec) -> None:
    tilescout.lookup(ToyProblem(1), gpu="h200")  # before: not counted
    tilescout.capture(path)
    problem = ToyProblem(64)
    for _ in range(5):
        tilescout.lookup(problem, gpu="h200")
    tilescout.lookup(ToyProblem(64), gpu="h200")
    dispatch.current_snapshot().lookup(ToyProblem(128), h200)
    dispatch.current_snapshot().peek(ToyProblem(256), h200)
    dispatch.explain(ToyProblem(256), gpu="h200")
    tilescout.capture(None)
    tilescout.lookup(problem, gpu="h200")  # after: not counted
    assert counts(path) == {(64, "default"): 6, (128, "default"): 1}
    assert [e.count for e in read_capture(path)] == [6, 1]
    assert read_capture(path)[0].sku == "h200"


def test_a_second_capture_adds_to_the_file(path: Path) -> None:
    for _ in range(2):
        tilescout.capture(path)
        tilescout.lookup(ToyProblem(64), gpu="h200")
    tilescout.capture(None)
    assert counts(path) == {(64, "default"): 2}


def test_threads_lose_no_count_and_flushes_count_nothing_twice(path: Path) -> None:
    tilescout.capture(path, interval_s=0.01)
    problem = ToyProblem(64)

    def ask() -> None:
        for _ in range(5000):
            tilescout.lookup(problem, gpu="h200")

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tilescout.capture(None)
    assert counts(path) == {(64, "default"): 30_000}


def test_a_child_counts_its_own_only(path: Path) -> None:
    tilescout.capture(path)
    problem = ToyProblem(64)
    tilescout.lookup(problem, gpu="h200")
    child = os.fork()
    if child == 0:
        try:
            tilescout.lookup(problem, gpu="h200")
            tilescout.capture(None)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert counts(path) == {(64, "default"): 1}
    tilescout.capture(None)
    assert counts(path) == {(64, "default"): 2}


def test_processes_share_a_file_named_by_the_variable(path: Path) -> None:
    code = (
        "import tilescout\n"
        "p = tilescout.PagedDecodeProblem(1, 64, 4, 2, 64, 16, 'float16')\n"
        "for _ in range(50): tilescout.lookup(p, gpu='h200')\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "TILESCOUT_CAPTURE": str(path)}
        )
        for _ in range(6)
    ]
    assert [process.wait(timeout=200) for process in running] == [0] * 6
    (entry,) = read_capture(path)
    assert (entry.op, entry.count) == ("paged_decode", 300)


def test_off_it_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("counted")

    monkeypatch.setattr(capture_module.Recorder, "count", forbidden)
    tilescout.lookup(ToyProblem(64), gpu="h200")
    assert capture_module.recorder is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is no capture"),
        ('{"format": "other"}', "is no capture"),
        ('{"format": "tilescout-capture", "version": 7}', "has version 7, this Tilescout reads 1"),
        ('{"format": "tilescout-capture", "version": 1, "problems": [{}]}', "is damaged"),
    ],
)
def test_another_file_is_not_overwritten(path: Path, text: str, reason: str) -> None:
    path.write_text(text)
    with pytest.raises(StoreError, match=reason):
        tilescout.capture(path)
    assert path.read_text() == text


def test_what_cannot_be_written_is_loud_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        tilescout.capture(tmp_path / "no" / "calls.json")
    with pytest.raises(UsageError, match="interval_s=0"):
        tilescout.capture(tmp_path / "calls.json", interval_s=0)


@pytest.fixture
def many(path: Path, h200: DeviceSpec, tmp_path: Path) -> Path:
    """A capture with every tier: 64 is tuned, 128 and 256 near, 4096 a sibling's, two unknown."""
    database = tmp_path / "a.db"
    write_winners(database, [MadeUpWinner(ToyProblem(64), h200, config(64))])
    write_winners(database, [MadeUpWinner(ToyProblem(4096), sibling_of(h200, "h20"), config(64))])
    snapshot = Snapshot.load([database])
    tilescout.capture(path)
    calls = {64: 1000, 128: 300, 256: 100, 4096: 2, 10**6: 1, 2 * 10**6: 1}
    for size, count in calls.items():
        problem = ToyProblem(size)
        for _ in range(count):
            snapshot.lookup(problem, h200)
    tilescout.capture(None)
    return path


def test_the_order_is_count_times_expected_gain(many: Path) -> None:
    workload = captured.captured_workload(many, ["h200"])
    # 2e6 and 1e6 weigh by their bytes; 128 is half as far as 256, called three times as often, but
    # moves half as much: 300 x 128 / 2 against 100 x 256 / 2 x 2.
    assert [entry.problem.size for entry in workload.problems] == [2 * 10**6, 10**6, 256, 128, 4096]
    assert [entry.label for entry in workload.problems][2:4] == ["toy 100 calls", "toy 300 calls"]
    gained = captured.captured_workload(many, ["h200"], {"toy": 0.5})
    assert gained.problems == workload.problems  # one operation: the order stays


def test_the_gain_comes_from_the_studies(tmp_path: Path, h200: DeviceSpec) -> None:
    database = tmp_path / "b.db"
    with Store.open(database) as store:
        for size, times in ((64, (30.0, 20.0, 25.0)), (128, (10.0, 10.0)), (256, (40.0, 10.0))):
            default = MadeUpWinner(ToyProblem(size), h200, config(16), time_us=60.0)
            write_winners(database, [default])
            study = next(s for s in store.studies() if s.key.problem == ToyProblem(size))
            assert len(store.trials(study.study_id)) == 1
            for block, time_us in zip((32, 64, 128), times, strict=False):
                timing = Timing(time_us, time_us, time_us, time_us, time_us)
                evaluation = Evaluation(
                    config(block), TrialStatus.OK, Provenance.MEASURED, timing=timing
                )
                store.add_trial(study.study_id, evaluation)
        # The first trial takes 60 us; the best 20, 10 and 10.
        assert captured.gains_of(store) == {"toy": 5.0}
    assert captured.known_gains(database) == {"toy": 5.0}
    assert captured.known_gains(tmp_path / "missing.db") == {}


def test_tune_takes_a_capture(
    many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--from-capture", str(many), "--gpu", "h200", "--dry-run", "--format", "json"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", *words])
    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["problem"]["size"] for row in rows] == [2 * 10**6, 10**6, 256, 128, 4096]
    for wrong, reason in (
        (["tune", "quick", *words], "'quick', and --from-capture exclude each other"),
        (["tune", *words[:3], "b200", *words[4:]], "holds no problem of b200 that is not tuned"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(wrong)
        assert ended.value.code == 2
        assert reason in capsys.readouterr().err


def test_what_nothing_here_knows_is_left_out(many: Path, caplog: pytest.LogCaptureFixture) -> None:
    document = json.loads(many.read_text())
    stranger = document["problems"][1] | {"op": "stranger"}
    damaged = document["problems"][1] | {"problem": {"size": -1}}
    many.write_text(json.dumps(document | {"problems": [*document["problems"], stranger, damaged]}))
    assert len(captured.captured_workload(many, ["h200"]).problems) == 5
    assert "unknown operation 'stranger'" in caplog.text
    assert "size=-1" in caplog.text
