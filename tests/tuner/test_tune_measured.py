"""The whole call measuring the toy operation on the CPU, with real processes."""

from __future__ import annotations

from typing import Any

import pytest
from report_data import Searched, add_study, timed
from tilescout.kernels.device import DeviceSpec
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import cli
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.measure import MeasureSettings
from tilescout.tuner.records import Provenance, TrialStatus
from tilescout.tuner.store import Store
from tilescout.tuner.tune import tune
from toy_op import SLOW_BLOCK, WORKLOAD, ToyProblem


@pytest.fixture
def workload(toy: Any, h200: DeviceSpec, tmp_path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A workload, and a machine that takes its CPU for an H200."""
    monkeypatch.setattr("tilescout.tuner.environment.current_device", lambda: h200)
    monkeypatch.setattr("tilescout.tuner.evaluators.measure._default_torch_device", lambda: "cpu")
    quick = MeasureSettings(run_target_us=200.0, warmup_us=200.0, max_samples=12, max_rounds=16)
    monkeypatch.setattr("tilescout.tuner.evaluators.measure.MeasureSettings", lambda: quick)
    path = tmp_path / "toys.toml"
    path.write_text(WORKLOAD)
    return str(path)


def test_the_summary_says_how_busy_the_gpu_was(workload: str, tmp_path) -> None:
    database = tmp_path / "r.db"
    summary = tune(workload, mode="measure", trials=4, db=database)
    assert [row.provenance for row in summary.rows] == [Provenance.MEASURED] * 2
    assert all(row.time_us is not None for row in summary.rows)
    assert summary.gpu_busy_share is not None
    assert 0.0 < summary.gpu_busy_share <= 1.0
    assert summary.num_disturbed == 0  # nobody watches a CPU's clock
    with Store.open(database) as store:
        (first, _) = store.studies()
        held_s = sum(r.evaluation.measure_s for r in store.trials(first.study_id))
    assert 0.0 < held_s <= summary.elapsed_s
    again = tune(workload, mode="measure", trials=4, db=database)
    assert again.gpu_busy_share is None, "nothing was measured"


def test_the_command_says_it_on_stderr(
    workload: str, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", workload, "--mode", "measure", "--trials", "2"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--db", str(tmp_path / "r.db")])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert "% of the search time" in err
    assert "search time" not in out
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--db", str(tmp_path / "quiet.db"), "--quiet"])
    assert "search time" not in capsys.readouterr().err


@pytest.mark.parametrize("provenance", [Provenance.MEASURED, Provenance.PREDICTED])
@pytest.mark.parametrize("size", [64, 128])
def test_a_search_without_time_measures_what_is_handed_out(
    workload: str,
    h200: DeviceSpec,
    tmp_path,
    monkeypatch: pytest.MonkeyPatch,
    provenance: Provenance,
    size: int,
) -> None:
    """A new study, being the newest, is handed out: the default alone must not decide it."""
    older = Searched(ToyProblem(size), h200, provenance)
    space = joint_space(ToyProblem(64), h200)
    config = next(c for c in space if c["block_n"] != space.default["block_n"])
    monkeypatch.setenv(SLOW_BLOCK, str(config["block_n"]))
    database = tmp_path / "r.db"
    with Store.open(database) as store:
        add_study(store, older, [timed(older, config, 9.0)], [config])
    tune(workload, mode="measure", trials=300, time_budget_s=0.05, db=database)
    with Store.open(database) as store:
        (new,) = (
            s
            for s in store.studies(op="toy")
            if s.key != older.key and s.key.problem == ToyProblem(64)
        )
        tried = {t.evaluation.config: t.evaluation.status for t in store.trials(new.study_id)}
    # Both take the same time, and a busy CPU may make one look slow enough to be cut.
    assert tried.keys() == {space.default, config}
    assert set(tried.values()) <= {TrialStatus.OK, TrialStatus.PRUNED}


def test_a_search_without_time_measures_a_slow_default(
    workload: str, h200: DeviceSpec, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = joint_space(ToyProblem(64), h200)
    config = next(c for c in space if c["block_n"] != space.default["block_n"])
    monkeypatch.setenv(SLOW_BLOCK, str(space.default["block_n"]))
    monkeypatch.setattr("tilescout.tuner.measuring_processes.measuring_compile_pool", two_compilers)
    database = tmp_path / "r.db"
    older = Searched(ToyProblem(128), h200)
    with Store.open(database) as store:
        add_study(store, older, [timed(older, config, 9.0)], [config])
    (row, _) = tune(workload, mode="measure", trials=300, time_budget_s=0.05, db=database).rows
    assert row.num_trials.keys() <= {"ok", "pruned"}
    assert sum(row.num_trials.values()) == 2


def two_compilers() -> CompilePool:
    """However few cores there are."""
    return CompilePool(2)
