"""The whole call measuring the toy operation on the CPU, with real processes."""

from __future__ import annotations

from typing import Any

import pytest
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import cli
from tilescout.tuner.measure import MeasureSettings
from tilescout.tuner.records import Provenance
from tilescout.tuner.store import Store
from tilescout.tuner.tune import tune
from toy_op import WORKLOAD


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
