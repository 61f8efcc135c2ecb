"""Searches over recordings: driver, command, determinism, stop rule."""

from __future__ import annotations

import csv
import io
import json

import pytest
from formula_evaluator import RecordingListener
from recordings import BEST, kernel_tuner_cache, write_json
from tilescout.kernels.base import Config
from tilescout.tuner import cli
from tilescout.tuner.evaluators.replay import ReplayEvaluator
from tilescout.tuner.records import Provenance, TrialStatus
from tilescout.tuner.replay.kernel_tuner_file import read_kernel_tuner_cache
from tilescout.tuner.replay.runner import replay_evaluations
from tilescout.tuner.search.driver import run_study
from tilescout.tuner.search.samplers import sampler_names
from tilescout.tuner.store import Store
from toy_op import ToyProblem
from toy_study import toy_key


@pytest.fixture
def recorded():
    return read_kernel_tuner_cache("made up", kernel_tuner_cache())


@pytest.fixture
def run(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["replay", *arguments])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.mark.parametrize("name", sampler_names())
def test_run_evaluates_distinct_configs_and_counts_failures(recorded, name):
    run = replay_evaluations(recorded, sampler=name, num_trials=200, seed=3)
    assert {e.config for e in run} == set(recorded.evaluations)
    assert len(run) == 50
    assert sum(e.status is TrialStatus.COMPILE_ERROR for e in run) == 2


@pytest.mark.parametrize("name", sampler_names())
def test_equal_seeds_give_equal_runs(recorded, name):
    def configs(seed: int) -> list[Config]:
        run = replay_evaluations(recorded, sampler=name, num_trials=30, seed=seed)
        return [evaluation.config for evaluation in run]

    assert configs(1) == configs(1)
    assert configs(1) != configs(2)


def test_first_come_first(recorded):
    first = list(recorded.evaluations)[7:10]
    run = replay_evaluations(recorded, sampler="portfolio", num_trials=5, seed=0, first=first)
    assert [e.config for e in run[:3]] == first


def test_the_driver_runs_on_a_recording(recorded, toy, h200, tmp_path):
    key = toy_key(
        h200,
        ToyProblem(size=64),
        provenance=Provenance.PUBLISHED,
        template_hashes=(("recorded", "1"),),
    )
    with Store.open(tmp_path / "scratch.db") as store:
        study = store.study(key, seed=0)
        winner = run_study(
            space=recorded.space,
            evaluator=ReplayEvaluator(recorded, capacity=4),
            store=store,
            study=study,
            num_trials=48,
            deadline=None,
            seed=0,
            num_finalists=3,
            listener=RecordingListener(),
        )
    assert winner.trial.evaluation.config == Config.of("recorded", BEST)
    assert winner.trial.evaluation.provenance is Provenance.PUBLISHED


def test_finals_put_what_fails_last(recorded):
    configs = list(recorded.evaluations)
    finals = ReplayEvaluator(recorded).finals(configs)
    assert finals[0].time_us == recorded.optimum_us
    assert [e.time_us for e in finals[-2:]] == [None, None]


def test_json_has_the_documented_keys(run, tmp_path):
    path = write_json(tmp_path / "space.json", kernel_tuner_cache())
    code, out, _ = run(path, path, "--trials", "30", "--seeds", "2", "--format", "json")
    assert code == 0
    data = json.loads(out)
    assert list(data) == ["spaces"]
    first, second = data["spaces"]
    assert first == second
    assert list(first) == [
        "file",
        "sampler",
        "seeds",
        "median_ratio",
        "runs_within_5_pct",
        "runs_within_10_pct",
        "p_t",
    ]
    assert (first["file"], first["sampler"], first["seeds"]) == (path, "portfolio", 2)
    assert list(first["median_ratio"]) == ["25", "50", "100", "200"]
    assert first["median_ratio"]["25"] >= 1.0
    assert first["median_ratio"]["50"] is first["median_ratio"]["200"] is None


def test_csv_and_table_have_a_column_a_count(run, tmp_path):
    path = write_json(tmp_path / "space.json", kernel_tuner_cache())
    code, out, _ = run(path, "--seeds", "1", "--sampler", "random", "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert code == 0
    # All of the space is tried, so the optimum is found.
    assert (row["ratio_50"], row["ratio_200"], row["median_evaluations"]) == ("1.0", "1.0", "50.0")
    code, table, _ = run(path, "--seeds", "1", "--sampler", "random")
    assert code == 0
    assert table.split()[: len(row)] == list(row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampler", "guess"], "unknown sampler 'guess': known are forest, portfolio, random"),
        (["--trials", "0"], "--trials 0 must be at least 1"),
        (["--seeds", "-1"], "--seeds -1 must be at least 1"),
    ],
    ids=["sampler", "trials", "seeds"],
)
def test_wrong_option_is_a_usage_error(run, tmp_path, arguments, message):
    path = write_json(tmp_path / "space.json", kernel_tuner_cache())
    code, out, err = run(path, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_broken_file_is_a_usage_error_without_a_traceback(run, tmp_path):
    path = write_json(tmp_path / "broken.json", {"cache": {}})
    code, out, err = run(path)
    assert (code, out) == (2, "")
    assert f"{path} lacks the field 'tune_params_keys'" in err
    assert "Traceback" not in err
