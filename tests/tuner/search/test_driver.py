"""One study from first trial to winner: order, persistence, resume, limits, failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import toy_study
from formula_evaluator import FormulaEvaluator, RecordingListener
from tilescout.kernels.base import Config
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.records import Provenance, TrialStatus
from tilescout.tuner.search.driver import failure_summary
from tilescout.tuner.search.starting_points import MAX_FOREIGN_WINNERS, starting_points
from tilescout.tuner.search.stopping import GainRule
from tilescout.tuner.store import Store
from toy_study import search_toy, toy_key


@pytest.fixture
def store(toy, tmp_path):
    with Store.open(tmp_path / "trials.db") as opened:
        yield opened


@pytest.fixture
def space(toy, h200):
    return joint_space(toy.ToyProblem(size=64), h200)


def stored_configs(store, device, toy, size=64) -> list[Config]:
    study = store.study(toy_key(device, toy.ToyProblem(size=size)), seed=0)
    return [record.evaluation.config for record in store.trials(study.study_id)]


def test_finds_the_known_optimum_and_keeps_every_trial(store, h200, toy, space):
    evaluator = FormulaEvaluator()
    winner = search_toy(store, h200, evaluator=evaluator, num_trials=40)
    optimum = min(space, key=toy.toy_time_us)
    assert winner.trial.evaluation.config == optimum
    assert winner.trial.evaluation.time_us == toy.toy_time_us(optimum)
    assert stored_configs(store, h200, toy) == evaluator.evaluated
    assert len(evaluator.evaluated) == len(set(evaluator.evaluated)) == 40


def test_default_comes_first_then_seeds(store, h200, space):
    evaluator = FormulaEvaluator()
    search_toy(store, h200, evaluator=evaluator)
    assert tuple(evaluator.evaluated[:2]) == space.valid_seeds()
    assert evaluator.evaluated[0] == space.default


def test_keeps_the_evaluator_busy_but_not_more(store, h200):
    evaluator = FormulaEvaluator(capacity=3)
    search_toy(store, h200, evaluator=evaluator, num_trials=10)
    assert evaluator.most_in_flight == 3
    assert len(evaluator.evaluated) == 10


def test_finals_are_default_and_best(store, h200, toy, space):
    evaluator = FormulaEvaluator()
    winner = search_toy(store, h200, evaluator=evaluator, num_finalists=3)
    best = sorted(evaluator.evaluated, key=toy.toy_time_us)[:3]
    assert evaluator.finalists[0] == space.default
    assert sorted(map(toy.toy_time_us, evaluator.finalists[1:])) == [
        toy.toy_time_us(c) for c in best
    ]
    assert len(winner.finals) == 4
    assert winner.finals[0] == winner.trial.trial_id


def test_default_wins_a_tie(store, h200, space, monkeypatch):
    monkeypatch.setattr("formula_evaluator.toy_time_us", lambda config: 5.0)
    winner = search_toy(store, h200)
    assert winner.trial.evaluation.config == space.default


def test_finished_study_gives_its_winner_and_runs_nothing(store, h200):
    first = search_toy(store, h200, num_trials=12)
    evaluator = FormulaEvaluator()
    listener = RecordingListener()
    second = search_toy(store, h200, num_trials=12, evaluator=evaluator, listener=listener)
    assert second.winner_id == first.winner_id
    assert evaluator.evaluated == evaluator.finalists == []
    assert [is_new for _, _, is_new in listener.trials] == [False] * 12


def test_more_trials_go_on_with_the_study(store, h200, toy):
    search_toy(store, h200, num_trials=8)
    evaluator = FormulaEvaluator()
    listener = RecordingListener()
    search_toy(store, h200, num_trials=14, evaluator=evaluator, listener=listener)
    assert len(evaluator.evaluated) == 6
    configs = stored_configs(store, h200, toy)
    assert len(configs) == len(set(configs)) == 14
    assert [is_new for _, _, is_new in listener.trials] == [False] * 8 + [True] * 6
    bests = [best for _, best, _ in listener.trials]
    assert bests == sorted(bests, reverse=True)


def test_resume_is_deterministic(h200, toy, tmp_path):
    courses = []
    for name in ("a.db", "b.db"):
        with Store.open(tmp_path / name) as store:
            search_toy(store, h200, num_trials=6)
            search_toy(store, h200, num_trials=16)
            courses.append(stored_configs(store, h200, toy))
    assert courses[0] == courses[1]


def test_interrupt_loses_no_trial_that_ended(store, h200, toy):
    interrupted = FormulaEvaluator(interrupt_after=7)
    with pytest.raises(KeyboardInterrupt):
        search_toy(store, h200, evaluator=interrupted)
    assert stored_configs(store, h200, toy) == interrupted.evaluated
    evaluator = FormulaEvaluator()
    search_toy(store, h200, evaluator=evaluator)
    assert not set(evaluator.evaluated) & set(interrupted.evaluated)
    assert len(evaluator.evaluated) + 7 == 20


def test_interrupt_in_the_finals_repeats_only_the_finals(store, h200):
    class Interrupted(FormulaEvaluator):
        def finals(self, configs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_toy(store, h200, evaluator=Interrupted())
    evaluator = FormulaEvaluator()
    assert search_toy(store, h200, evaluator=evaluator) is not None
    assert evaluator.evaluated == []
    assert evaluator.finalists


def test_exhausted_space_ends_the_search(store, h200, space):
    evaluator = FormulaEvaluator(capacity=4)
    winner = search_toy(store, h200, evaluator=evaluator, num_trials=10_000)
    assert set(evaluator.evaluated) == set(space)
    assert winner is not None


def test_deadline_starts_no_trial_after_it_but_waits_for_those_under_way(store, h200):
    evaluator = FormulaEvaluator(capacity=2)
    now = iter(range(1000))
    winner = search_toy(store, h200, evaluator=evaluator, deadline=7, clock=lambda: next(now))
    assert 2 <= len(evaluator.evaluated) <= 8
    assert winner is not None


def test_default_is_tried_even_past_the_deadline(store, h200, space):
    evaluator = FormulaEvaluator(capacity=4)
    winner = search_toy(store, h200, evaluator=evaluator, deadline=0, clock=lambda: 1.0)
    assert evaluator.evaluated == [space.default]
    assert winner.trial.evaluation.config == space.default


@pytest.mark.parametrize(
    "status", [s for s in TrialStatus if s not in (TrialStatus.OK, TrialStatus.PRUNED)]
)
def test_failure_is_recorded_and_does_not_stop_the_search(store, h200, toy, status):
    def fate(config):
        return (status, "bad luck") if config["split_rule"] == "none" else None

    winner = search_toy(store, h200, evaluator=FormulaEvaluator(fate=fate))
    study = store.study(toy_key(h200, toy.ToyProblem(size=64)), seed=0)
    failed = [r.evaluation for r in store.trials(study.study_id) if r.evaluation.status is status]
    assert failed
    assert {e.reason for e in failed} == {"bad luck"}
    assert winner.trial.evaluation.config["split_rule"] == "fixed"


def test_no_winner_where_all_failed(store, h200, toy):
    def fate(config):
        if int(config["num_stages"]) > 3:
            return TrialStatus.TIMEOUT, "took longer than 1 s"
        return TrialStatus.COMPILE_ERROR, "no such instruction"

    assert search_toy(store, h200, evaluator=FormulaEvaluator(fate=fate)) is None
    study = store.study(toy_key(h200, toy.ToyProblem(size=64)), seed=0)
    text = failure_summary([r.evaluation for r in store.trials(study.study_id)])
    assert text.startswith("none of 20 configs worked (")
    assert "compile_error" in text
    assert "timeout" in text
    assert "no such instruction" in text
    assert "no trial was run" in failure_summary([])


def test_finalist_that_fails_the_finals_does_not_win(store, h200, toy, space):
    optimum = min(space, key=toy.toy_time_us)

    class Strict(FormulaEvaluator):
        def finals(self, configs):
            self._fate = lambda c: (TrialStatus.INCORRECT, "wrong") if c == optimum else None
            return super().finals(configs)

    winner = search_toy(store, h200, evaluator=Strict(), num_trials=space.count())
    assert winner.trial.evaluation.config != optimum


def decided(store, device, config, **key_changes):
    """A study of one trial, which won."""
    problem = key_changes.pop("problem")
    study = store.study(toy_key(device, problem, **key_changes), seed=0)
    evaluator = FormulaEvaluator(provenance=study.key.provenance)
    store.decide(
        study.study_id, [store.add_trial(study.study_id, evaluator.evaluate(config)).evaluation]
    )


def foreign(space, store, study) -> list[Config]:
    points = starting_points(space, store, study)
    assert points.own == space.valid_seeds()
    return list(points.foreign)


@pytest.fixture
def mine(store, h200, toy):
    return store.study(toy_key(h200, toy.ToyProblem(size=64)), seed=0)


def test_foreign_winners_come_nearest_first(store, h200, toy, space, mine):
    configs = [c for c in space if c not in space.valid_seeds()]
    sibling = replace(h200, sku="h100", num_sms=100)
    stranger = replace(h200, sku="b200", compute_capability=(10, 0))
    for device, size, config in (
        (stranger, 64, configs[3]),
        (h200, 4096, configs[4]),
        (h200, 128, configs[1]),
        (sibling, 128, configs[2]),
        (h200, 65, configs[0]),
    ):
        decided(store, device, config, problem=toy.ToyProblem(size=size))
    assert foreign(space, store, mine) == configs[:5]


def test_foreign_winners_are_few(store, h200, toy, space, mine):
    configs = [c for c in space if c not in space.valid_seeds()]
    for index, config in enumerate(configs[: MAX_FOREIGN_WINNERS + 3]):
        decided(store, h200, config, problem=toy.ToyProblem(size=65 + index))
    assert foreign(space, store, mine) == configs[:MAX_FOREIGN_WINNERS]


def test_prediction_for_another_sku_says_nothing(store, h200, toy, space, mine):
    configs = [c for c in space if c not in space.valid_seeds()]
    problem = toy.ToyProblem(size=128)
    predicted = {"problem": problem, "provenance": Provenance.PREDICTED}
    decided(store, replace(h200, sku="h100"), configs[0], **predicted)
    assert foreign(space, store, mine) == []
    decided(store, h200, configs[1], **predicted)
    assert foreign(space, store, mine) == [configs[1]]


def test_what_is_kept_is_in_the_finals_however_many_were_faster(store, h200, toy) -> None:
    space = joint_space(toy.ToyProblem(64), h200)
    slow = max((c for c in space if c != space.default), key=toy.toy_time_us)
    evaluator = FormulaEvaluator()
    search_toy(
        store,
        h200,
        evaluator=evaluator,
        num_finalists=2,
        carried=[slow],
        kept=[space.default, slow],
    )
    assert evaluator.finalists[:2] == [space.default, slow]
    assert len(evaluator.finalists) == 4


def test_finalists_fill_what_winners_leave(store, h200, toy, space, mine):
    winner = search_toy(store, h200, size=128, num_trials=30, num_finalists=5)
    trials = {t.trial_id: t for t in store.trials(winner.study.study_id)}
    finalists = [trials[trial_id].evaluation.config for trial_id in winner.finals]
    assert len(finalists) > 2
    assert foreign(space, store, mine) == [c for c in finalists if c not in space.valid_seeds()]


def test_winner_that_is_not_valid_here_is_left_out(store, h200, toy, space, mine):
    invalid = space.default.replace(block_n=256, num_stages=4)
    assert space.check(invalid) is not None
    decided(store, h200, invalid, problem=toy.ToyProblem(size=128))
    assert foreign(space, store, mine) == []


def test_search_without_a_gain_ends_and_stays_ended(store, h200, toy, monkeypatch):
    monkeypatch.setattr("formula_evaluator.toy_time_us", lambda config: 5.0)
    gain = GainRule(min_trials=10)
    evaluator = FormulaEvaluator(capacity=1)
    winner = search_toy(store, h200, evaluator=evaluator, num_trials=60, gain=gain)
    assert len(evaluator.evaluated) == 10
    again = FormulaEvaluator()
    second = search_toy(store, h200, evaluator=again, num_trials=60, gain=gain)
    assert second.winner_id == winner.winner_id
    assert again.evaluated == []
    search_toy(store, h200, evaluator=again, num_trials=20)
    assert len(again.evaluated) == 10


def test_killed_process_loses_no_trial_and_repeats_none(toy, tmp_path):
    database, log = tmp_path / "killed.db", tmp_path / "log"
    program = [sys.executable, toy_study.__file__, str(database), str(log), "24"]

    lost: set[str] = set()

    def logged() -> list[str]:
        return log.read_text().split() if log.exists() else []

    def stored() -> list[str]:
        with Store.open(database) as store:
            configs = stored_configs(store, toy_study.toy_device(), toy)
        return [config.config_id for config in configs]

    for enough in (5, 11):
        process = subprocess.Popen(program)
        deadline = time.monotonic() + 60
        while len(logged()) < enough:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        # A config is in the log just before it is in the store: only the last may be missing.
        assert set(logged()[:-1]) <= {*stored(), *lost}
        lost |= set(logged()) - set(stored())
    subprocess.run(program, check=True)

    assert len(stored()) == len(set(stored())) == 24
    assert len(lost) <= 2
    twice = {config_id for config_id in logged() if logged().count(config_id) > 1}
    assert twice <= lost


def test_search_is_silent(store, h200, capfd):
    search_toy(store, h200, num_trials=3)
    assert capfd.readouterr() == ("", "")
