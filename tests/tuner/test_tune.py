"""The whole call over the toy operation: predicted by real processes, kept in a real store."""

from __future__ import annotations

import logging

import pytest
from formula_evaluator import FormulaEvaluator, RecordingListener
from tilescout.errors import DeviceError, UnknownNameError, UnsupportedError, UsageError
from tilescout.tuner import catalog
from tilescout.tuner.paths import user_database_path
from tilescout.tuner.prediction.roofline import share_of_roofline
from tilescout.tuner.records import Provenance, TrialStatus
from tilescout.tuner.store import Store
from tilescout.tuner.tune import tune
from toy_op import WORKLOAD

UNSUPPORTED = """
[[problems]]
op = "toy"
label = "half"
size = 64
dtype = "float16"
"""


def predicting(**options) -> FormulaEvaluator:
    return FormulaEvaluator(provenance=Provenance.PREDICTED, **options)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("tilescout.tuner.environment.current_device", lambda: None)


@pytest.fixture
def workload(toy, tmp_path) -> str:
    path = tmp_path / "toys.toml"
    path.write_text(WORKLOAD)
    return str(path)


@pytest.fixture
def quick(monkeypatch):
    """Evaluates by formula instead of compiling."""
    made = []

    def make(problem, device, *, pool, scope=None, deadline=None, kept=()):
        made.append(predicting())
        return made[-1]

    monkeypatch.setattr("tilescout.tuner.tune.PredictEvaluator", make)
    return made


def test_predicts_every_problem_on_every_sku(workload, tmp_path):
    database = tmp_path / "trials.db"
    summary = tune(workload, gpus=["h200", "b200"], trials=6, db=database)
    assert [(row.label, row.sku) for row in summary.rows] == [
        ("toy 64", "h200"), ("toy 4096", "h200"), ("toy 64", "b200"), ("toy 4096", "b200"),
    ]  # fmt: skip
    assert summary.database == str(database)
    assert not summary.is_dry_run
    assert not summary.has_failures
    with Store.open(database, read_only=True) as store:
        trials = {w.trial.trial_id: w.trial.evaluation for w in store.winners()}
    for row in summary.rows:
        assert row.provenance is Provenance.PREDICTED
        assert row.num_trials == {"ok": 6}
        assert row.template == "triton"
        assert 0 < row.time_us <= row.default_time_us
        assert row.speedup == row.default_time_us / row.time_us
        device = catalog.gpu(row.sku)
        assert row.share_of_roofline == share_of_roofline(row.problem, device, row.time_us)
        assert trials[row.trial_id].config == row.config
        assert trials[row.trial_id].time_us == row.time_us


def test_only_the_templates_asked_for_are_searched(workload, quick, tmp_path):
    database = tmp_path / "a.db"
    summary = tune(workload, gpus=["h200"], templates=["triton"], trials=6, db=database)
    assert {row.template for row in summary.rows} == {"triton"}
    with pytest.raises(UnknownNameError, match=r"template of toy .*'cuda'.*triton"):
        tune(workload, gpus=["h200"], templates=["triton", "cuda"], trials=6, db=database)


def test_second_run_gives_the_same_and_runs_nothing(workload, quick, tmp_path):
    first = tune(workload, gpus=["h200"], trials=6, db=tmp_path / "a.db")
    quick.clear()
    second = tune(workload, gpus=["h200"], trials=6, db=tmp_path / "a.db")
    assert second.rows == first.rows
    assert [e.evaluated for e in quick] == [[], []]


def test_listener_hears_of_studies_and_trials(workload, quick, tmp_path):
    listener = RecordingListener()
    tune(workload, gpus=["h200"], trials=5, db=tmp_path / "a.db", listener=listener)
    assert listener.started == [("toy 64", "h200", 5), ("toy 4096", "h200", 5)]
    assert len(listener.trials) == 10
    assert len(listener.winners) == 2


def test_default_listener_writes_to_the_log(workload, quick, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG, logger="tilescout")
    tune(workload, gpus=["h200"], trials=3, db=tmp_path / "a.db")
    text = caplog.text
    assert "toy 64 on h200: searching size=64" in text
    assert "trial 2 ok" in text
    assert "us with block_n" in text
    assert capfd.readouterr().out == ""


def test_without_a_path_the_users_database_is_written(workload, quick):
    summary = tune(workload, gpus=["h200"], trials=2)
    assert summary.database == str(user_database_path())
    assert user_database_path().exists()


def test_unsupported_problem_is_told_and_others_go_on(workload, quick, tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text(WORKLOAD + UNSUPPORTED)
    summary = tune(str(path), gpus=["h200"], trials=2, db=tmp_path / "a.db")
    assert [row.config is None for row in summary.rows] == [False, False, True]
    assert "dtype='float16' is not float32" in summary.rows[2].reason
    assert summary.has_failures


def test_nothing_supported_is_an_error(toy, tmp_path):
    path = tmp_path / "none.toml"
    header = 'name = "none"\ndescription = "x"\nsource = "y"\n'
    path.write_text(header + UNSUPPORTED)
    for dry_run in (False, True):
        with pytest.raises(UnsupportedError, match="is not float32"):
            tune(str(path), gpus=["h200"], db=tmp_path / "a.db", dry_run=dry_run)


def test_study_without_winner_says_why(workload, monkeypatch, tmp_path, caplog):
    def make(problem, device, *, pool, scope=None, deadline=None, kept=()):
        return predicting(fate=lambda c: (TrialStatus.CRASHED, "the process died"))

    monkeypatch.setattr("tilescout.tuner.tune.PredictEvaluator", make)
    summary = tune(workload, gpus=["h200"], trials=3, db=tmp_path / "a.db")
    assert "toy 64 on h200: no config worked" in caplog.text
    row = summary.rows[0]
    assert row.config is row.time_us is row.template is row.speedup is None
    assert row.num_trials == {"crashed": 3}
    assert row.reason == (
        "none of 3 configs worked (3 crashed); commonest reason (3): the process died"
    )


def test_dry_run_says_size_and_time_and_touches_nothing(workload, tmp_path):
    database = tmp_path / "a.db"
    summary = tune(workload, gpus=["h200"], trials=5, db=database, dry_run=True)
    more = tune(workload, gpus=["h200"], trials=10, db=database, dry_run=True)
    assert summary.is_dry_run
    assert not summary.has_failures
    assert not database.exists()
    for row, longer in zip(summary.rows, more.rows, strict=True):
        assert row.config is None
        assert row.space_size > 50
        assert longer.expected_s == pytest.approx(2 * row.expected_s)
    capped = tune(workload, gpus=["h200"], trials=5, time_budget_s=1, dry_run=True)
    assert [row.expected_s for row in capped.rows] == [0.5, 0.5]
    tiny = tune(workload, gpus=["h200"], trials=10**6, dry_run=True).rows[0]
    assert tiny.expected_s < 5 * tiny.space_size


def test_time_budget_is_shared_and_every_study_gets_its_default(workload, quick, tmp_path):
    summary = tune(workload, gpus=["h200"], trials=10_000, time_budget_s=1e-6, db=tmp_path / "a.db")
    assert [row.num_trials for row in summary.rows] == [{"ok": 1}, {"ok": 1}]
    assert all(row.time_us == row.default_time_us for row in summary.rows)


def test_interrupt_is_raised_and_the_run_goes_on_later(workload, monkeypatch, tmp_path):
    database = tmp_path / "a.db"
    evaluators = [predicting(interrupt_after=3)]

    def make(problem, device, *, pool, scope=None, deadline=None, kept=()):
        return evaluators[-1]

    monkeypatch.setattr("tilescout.tuner.tune.PredictEvaluator", make)
    with pytest.raises(KeyboardInterrupt):
        tune(workload, gpus=["h200"], trials=8, db=database)
    evaluators.append(predicting())
    summary = tune(workload, gpus=["h200"], trials=8, db=database)
    assert [row.num_trials for row in summary.rows] == [{"ok": 8}, {"ok": 8}]
    assert len(evaluators[1].evaluated) == 5 + 8
    assert not set(evaluators[0].evaluated) & set(evaluators[1].evaluated[:5])


def test_all_runs_every_workload_and_each_problem_once(workload, toy, quick, tmp_path, monkeypatch):
    toys = catalog.workload(workload)
    monkeypatch.setattr(catalog, "workload_names", lambda: ("a", "b"))
    monkeypatch.setattr(catalog, "workload", lambda name: toys)
    summary = tune("all", gpus=["h200"], trials=2, db=tmp_path / "a.db")
    assert [row.label for row in summary.rows] == ["toy 64", "toy 4096"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"workload": "nope"}, UnknownNameError, "unknown workload 'nope'"),
        ({"gpus": ["h2000"]}, UnknownNameError, "unknown GPU 'h2000'"),
        ({"mode": "measure"}, DeviceError, "needs an NVIDIA GPU"),
        ({"mode": "fast"}, UsageError, "mode='fast'"),
        ({"trials": 0}, UsageError, "trials=0 must be at least 1"),
        ({"time_budget_s": 0}, UsageError, "time_budget_s=0 must be more than 0"),
        ({"time_budget_s": float("nan")}, UsageError, "time_budget_s=nan"),
        ({"trials": 1.5}, UsageError, "trials=1.5 must be at least 1, a whole number"),
        ({"trials": float("nan")}, UsageError, "trials=nan"),
        ({"time_budget_s": "60"}, UsageError, "time_budget_s='60' must be more than 0"),
        ({"seed": "1"}, UsageError, "seed='1' must be between 0 and"),
        ({"seed": 0.5}, UsageError, "seed=0.5 must be between 0 and"),
        ({"gpus": "h200"}, UsageError, r"gpus='h200' is one name: .* list, \['h200'\]"),
        ({"gpus": 1}, UsageError, "gpus=1 must be a list of names"),
        ({"gpus": [None]}, UsageError, r"gpus=\[None\] must be a list of names"),
        ({"templates": "triton"}, UsageError, "templates='triton' is one name"),
        ({"workload": ["quickstart"]}, UsageError, "must be a name, a TOML file's path or"),
        ({"budget": "huge"}, UnknownNameError, "unknown budget 'huge'"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(arguments, error, words, tmp_path):
    database = tmp_path / "a.db"
    with pytest.raises(error, match=words):
        tune(**{"db": database, **arguments})
    assert not database.exists()


def test_flat_space_ends_a_study_early_unless_a_number_of_trials_was_named(
    workload, quick, tmp_path, monkeypatch
):
    monkeypatch.setattr("formula_evaluator.toy_time_us", lambda config: 5.0)
    options = {"gpus": ["h200"], "budget": "full", "db": tmp_path / "flat.db"}
    early = tune(workload, **options)
    for row in early.rows:
        assert row.space_size > 44
        assert 40 <= row.num_trials["ok"] <= 42  # what was in flight is waited for
    named = tune(workload, trials=44, **options)
    assert [row.num_trials["ok"] for row in named.rows] == [44, 44]
