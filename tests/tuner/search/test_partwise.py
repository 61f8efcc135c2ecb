"""A search of two algorithms, one of them in three parts whose times add."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import parts_study
import parts_toy_op
import pytest
from formula_evaluator import RecordingListener, timing
from parts_study import Evaluations, PartsEvaluator, search_parts
from tilescout.kernels.base import Config
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.registry import joint_space
from tilescout.search_spaces.space import JointSpace
from tilescout.tuner.records import TrialStatus
from tilescout.tuner.search.driver import run_study
from tilescout.tuner.search.partwise import expected_trials
from tilescout.tuner.search.stopping import GainRule
from tilescout.tuner.store import Store
from toy_study import toy_key

PROBLEM = parts_toy_op.PartsToyProblem(size=64)


@pytest.fixture(autouse=True)
def _registered():
    parts_study.register()


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "trials.db") as opened:
        yield opened


@pytest.fixture
def space(h200):
    return joint_space(PROBLEM, h200)


def optimum(space) -> Config:
    return min(space, key=parts_toy_op.time_us)


def whole_study(store, device, space):
    return store.study(toy_key(device, PROBLEM, space_fingerprint=space.fingerprint()), seed=0)


def stored(store, device, space) -> Counter:
    """How often each (part, config) is stored."""
    study = whole_study(store, device, space)
    found = [("", trial.evaluation.config) for trial in store.trials(study.study_id)]
    for part in store.part_studies(study):
        name = part.key.part.rpartition(": ")[2]
        found += [(name, trial.evaluation.config) for trial in store.trials(part.study_id)]
    return Counter(found)


def test_what_is_carried_is_measured_as_a_whole_and_may_win_a_finished_search(store, h200, space):
    search_parts(store, h200, Evaluations(), num_trials=20)
    best = optimum(space)
    again, once_more = Evaluations(), Evaluations()
    winner = search_parts(store, h200, again, num_trials=20, carried=[best])
    assert again.seen[0] == ("", best)
    assert winner.trial.evaluation.config == best
    # Beside another best config, parts may have had too few trials; then all has been done.
    assert search_parts(store, h200, once_more, num_trials=20, carried=[best]) == winner
    assert once_more.seen == []


def test_what_won_on_a_near_problem_competes_with_its_algorithm(store, h200, space):
    """No seed belongs to the algorithm of the winner; it is measured right after the default."""
    seedless = JointSpace((replace(space.spaces[0], seeds=()),))
    assert seedless.default["algorithm"] == "fused"
    near = search_parts(store, h200, Evaluations(), size=128, space=space, num_trials=90)
    won = near.trial.evaluation.config
    assert won["algorithm"] == "split"
    evaluations = Evaluations()
    winner = search_parts(store, h200, evaluations, space=seedless, num_trials=20)
    assert evaluations.seen[:2] == [("", seedless.default), ("", won)]
    assert winner.trial.evaluation.time_us <= near.trial.evaluation.time_us


@pytest.mark.parametrize("is_right", [True, False], ids=["slow", "wrong"])
def test_near_problems_that_mislead_cost_little(store, h200, space, is_right):
    worst = sorted(space, key=parts_toy_op.time_us)[-3:]
    for number, config in enumerate(worst):
        near = toy_key(h200, parts_toy_op.PartsToyProblem(size=128 << number))
        study = store.study(near, seed=0)
        trial = store.add_trial(study.study_id, PartsEvaluator(None, None).evaluate(config))
        store.decide(study.study_id, [trial.evaluation])
    wrong = (TrialStatus.INCORRECT, "differs")
    fate = (lambda config: None) if is_right else lambda c: wrong if c in worst else None
    evaluations = Evaluations(fate=fate)
    winner = search_parts(store, h200, evaluations, num_trials=90)
    assert worst[0] in evaluations.of("")
    assert winner.trial.evaluation.config == optimum(space)
    scopes = {
        part: [e.scope for e in evaluations.opened if e.scope and e.scope.part == part]
        for part in parts_toy_op.PARTS
    }
    for part, found in scopes.items():
        foreign = {found[0].of_whole(config) for config in worst}
        tried = [config in foreign for config in evaluations.of(part)]
        # One of them, then one of the search's own, until the foreign ones are dropped.
        assert sum(tried[:4]) <= 2
        assert sum(tried) <= 3


def test_seeds_that_fail_are_taken_from_the_trials(h200, space):
    split = [config for config in space if config["algorithm"] == "split"]
    seeded = JointSpace((replace(space.spaces[0], seeds=tuple(split[::700][:12])),))
    failing = set(seeded.spaces[0].seeds[:-1])
    crash = (TrialStatus.CRASHED, "no")
    numbers = {}
    for fails in (False, True):
        evaluations = Evaluations(fate=lambda c, on=fails: crash if on and c in failing else None)
        with Store.open(":memory:") as fresh:
            search_parts(fresh, h200, evaluations, space=seeded, num_trials=60)
        numbers[fails] = len(evaluations.seen)
    assert numbers[True] <= 60 + 2
    assert numbers[True] <= numbers[False] + 2


def test_a_search_that_has_had_its_trials_ignores_what_won_elsewhere_since(store, h200, space):
    search_parts(store, h200, Evaluations(), num_trials=40)
    used = sum(s.num_trials for s in store.studies())
    search_parts(store, h200, Evaluations(), size=128, num_trials=90)
    again = Evaluations()
    search_parts(store, h200, again, num_trials=min(40, used))
    assert again.seen == []


@pytest.mark.slow
def test_finds_the_optimum_that_a_joint_search_of_as_many_trials_misses(h200, space):
    best = optimum(space)
    assert space.count() > 15_000
    for seed in range(3):
        evaluations = Evaluations()
        with Store.open(":memory:") as fresh:
            winner = search_parts(fresh, h200, evaluations, num_trials=90, seed=seed)
            assert winner.trial.evaluation.config == best
        assert len(evaluations.seen) <= 90

    def joint(num_trials: int, seed: int) -> float:
        evaluations = Evaluations()
        with Store.open(":memory:") as fresh:
            study = whole_study(fresh, h200, space)
            winner = run_study(
                space=space,
                evaluator=evaluations(study, None),
                store=fresh,
                study=study,
                num_trials=num_trials,
                deadline=None,
                seed=seed,
                num_finalists=3,
                listener=RecordingListener(),
            )
            return winner.trial.evaluation.time_us

    assert all(joint(90, seed) > parts_toy_op.time_us(best) for seed in range(3))


def test_each_config_of_a_part_is_evaluated_once_and_stored(store, h200, space):
    evaluations = Evaluations()
    search_parts(store, h200, evaluations)
    assert max(Counter(evaluations.seen).values()) == 1
    assert stored(store, h200, space) == Counter(evaluations.seen)
    assert {part for part, _ in evaluations.seen} == {"", *parts_toy_op.PARTS}
    for part in parts_toy_op.PARTS:
        names = {name for config in evaluations.of(part) for name, _ in config.values}
        rule = {"shift_rule"} if part == "shift" else set()
        assert names == {"algorithm", f"{part}_tile", f"{part}_depth"} | rule


def test_the_default_comes_first_and_both_algorithms_are_measured_as_a_whole(store, h200, space):
    evaluations = Evaluations()
    search_parts(store, h200, evaluations)
    assert evaluations.seen[0] == ("", space.default)
    whole = Counter(config["algorithm"] for config in evaluations.of(""))
    assert whole["fused"] == 5
    # The seed, one combination a round, four with a runner-up.
    assert 3 <= whole["split"] <= 7


def test_other_parts_are_held_at_a_config_that_works(store, h200, space):
    evaluations = Evaluations()
    search_parts(store, h200, evaluations)
    for part, bases in evaluations.bases.items():
        assert bases, part
        for base in bases:
            assert base in evaluations.of("")


def test_only_the_study_of_the_operation_is_decided(store, h200):
    winner = search_parts(store, h200, Evaluations())
    assert [found.study.study_id for found in store.winners()] == [winner.study.study_id]
    assert [study.key.part for study in store.studies()] == [""]
    assert store.rebuild_winners() == 0
    parts = store.part_studies(winner.study)
    assert [study.key.part for study in parts] == [
        f"triton algorithm=split: {part}" for part in parts_toy_op.PARTS
    ]
    trial = store.trials(parts[0].study_id)[0].evaluation
    with pytest.raises(ValueError, match=r"is of the part .*: only that of a whole operation"):
        store.decide(parts[0].study_id, [trial])


def test_a_finished_search_gives_its_winner_and_runs_nothing(store, h200):
    first_listener, again_listener = RecordingListener(), RecordingListener()
    first = search_parts(store, h200, Evaluations(), listener=first_listener)
    again = Evaluations()
    second = search_parts(store, h200, again, listener=again_listener)
    assert again.seen == []
    assert second == first
    assert len(again_listener.trials) == len(first_listener.trials)
    assert not any(is_new for _, _, is_new in again_listener.trials)


def test_finals_that_turn_the_order_do_not_start_the_search_again(store, h200):
    """Two algorithms as good as even: the finals find the other one faster."""

    class Turning(PartsEvaluator):
        def evaluate(self, config):
            ended = super().evaluate(config)
            is_fused = self.scope is None and config["algorithm"] == "fused"
            return (
                replace(ended, timing=timing(9.0 if self.is_final else 30.0)) if is_fused else ended
            )

        is_final = False

        def finals(self, configs):
            self.is_final = True
            return super().finals(configs)

    class TurningEvaluations(Evaluations):
        def __call__(self, study, scope):
            self.opened.append(Turning(scope, self))
            return self.opened[-1]

    first = search_parts(store, h200, TurningEvaluations(), num_trials=22)
    assert first.trial.evaluation.config["algorithm"] == "fused"
    again = TurningEvaluations()
    assert search_parts(store, h200, again, num_trials=22) == first
    assert again.seen == []


@pytest.mark.parametrize("after", [1, 3, 17, 45])
def test_an_interrupted_search_loses_nothing(store, h200, space, after):
    whole, cut = Evaluations(), Evaluations(interrupt_after=after)
    with Store.open(":memory:") as other:
        expected = search_parts(other, h200, whole, num_trials=95)
    with pytest.raises(KeyboardInterrupt):
        search_parts(store, h200, cut, num_trials=95)
    assert stored(store, h200, space) == Counter(cut.seen)
    rest = Evaluations()
    winner = search_parts(store, h200, rest, num_trials=95)
    assert winner.trial.evaluation.config == expected.trial.evaluation.config
    assert max(Counter(cut.seen + rest.seen).values()) == 1
    assert len(cut.seen) + len(rest.seen) <= 95


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on(tmp_path, h200):
    database, log = tmp_path / "killed.db", tmp_path / "log"
    command = [sys.executable, parts_study.__file__, str(database), str(log), "95"]
    process = subprocess.Popen(command)
    while not log.exists() or len(log.read_text().splitlines()) < 30:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(command, check=True)
    lines = Counter(log.read_text().splitlines())
    # One may have been under way when it was killed.
    assert sum(count - 1 for count in lines.values()) <= 1
    with Store.open(database) as store:
        (winner,) = store.winners()
        best = optimum(joint_space(PROBLEM, h200))
        assert winner.trial.evaluation.config == best


def test_a_listener_hears_of_every_trial_and_of_the_best_whole_one(store, h200, space):
    listener, evaluations = RecordingListener(), Evaluations()
    search_parts(store, h200, evaluations, listener=listener)
    assert len(listener.trials) == len(evaluations.seen)
    bests = [best for _, best, _ in listener.trials if best is not None]
    assert bests == sorted(bests, reverse=True)
    assert bests[-1] < 16.0  # no fused config is as fast


def test_the_number_of_trials_is_a_limit(h200, space):
    for num_trials in (1, 2, 5, 9, 20, 40, 1000):
        evaluations = Evaluations()
        with Store.open(":memory:") as store:
            assert search_parts(store, h200, evaluations, num_trials=num_trials) is not None
        assert 1 <= len(evaluations.seen) <= expected_trials(space, num_trials) <= num_trials
    # Everything that the parts have is tried where there are enough.
    assert Counter(part for part, _ in evaluations.seen if part) == {
        "scale": 19,
        "shift": 40,
        "store": 20,
    }


def test_more_trials_go_on_with_the_parts(store, h200):
    first, more = Evaluations(), Evaluations()
    search_parts(store, h200, first, num_trials=40)
    search_parts(store, h200, more, num_trials=80)
    assert more.seen
    assert max(Counter(first.seen + more.seen).values()) == 1
    assert len(first.seen) + len(more.seen) <= 80


@pytest.mark.parametrize("slow", ["scale", "shift", "store"])
def test_a_part_that_takes_most_of_the_time_gets_most_of_the_trials(
    store, h200, slow, monkeypatch
) -> None:
    of_formula = parts_toy_op.part_time_us
    factors = {slow: 30.0}
    monkeypatch.setattr(
        parts_toy_op,
        "part_time_us",
        lambda config, part: of_formula(config, part) * factors.get(part, 1.0),
    )
    evaluations = Evaluations()
    search_parts(store, h200, evaluations, num_trials=48)
    counts = Counter(part for part, _ in evaluations.seen if part)
    assert counts[slow] == max(counts.values())
    assert counts[slow] >= counts.total() / 2


def test_a_failing_seed_is_replaced_as_the_base(store, h200, space):
    seed = space.valid_seeds()[1]

    def fate(config):
        return (TrialStatus.RUNTIME_ERROR, "no") if config == seed else None

    evaluations = Evaluations(fate=fate)
    winner = search_parts(store, h200, evaluations, num_trials=100)
    assert winner.trial.evaluation.config == optimum(space)
    assert all(seed not in bases for bases in evaluations.bases.values())


def test_an_algorithm_whose_first_config_is_cut_is_still_searched(store, h200, space):
    seed = space.valid_seeds()[1]

    class Cutting(PartsEvaluator):
        def evaluate(self, config):
            ended = super().evaluate(config)
            is_cut = config == seed
            return replace(ended, status=TrialStatus.PRUNED) if is_cut else ended

    class CuttingEvaluations(Evaluations):
        def __call__(self, study, scope):
            return Cutting(scope, self)

    winner = search_parts(store, h200, CuttingEvaluations(), num_trials=95)
    assert winner.trial.evaluation.config == optimum(space)


def test_an_algorithm_that_never_works_leaves_the_other(store, h200):
    def fate(config):
        return (TrialStatus.CRASHED, "no") if config["algorithm"] == "split" else None

    evaluations = Evaluations(fate=fate)
    winner = search_parts(store, h200, evaluations)
    assert winner.trial.evaluation.config["algorithm"] == "fused"
    assert not evaluations.bases
    assert Counter(config["algorithm"] for config in evaluations.of("")) == {"fused": 5, "split": 4}


def test_nothing_works(store, h200):
    evaluations = Evaluations(fate=lambda config: (TrialStatus.CRASHED, "no"))
    assert search_parts(store, h200, evaluations) is None
    assert len(evaluations.of("")) == len(evaluations.seen)


def test_a_part_config_that_fails_is_no_part_of_the_winner(store, h200, space):
    best = optimum(space)

    def is_bad(config):
        return all(
            config.get(f"shift_{n}") == best[f"shift_{n}"] for n in ("tile", "depth", "rule")
        )

    def fate(config):
        return (TrialStatus.INCORRECT, "no") if is_bad(config) else None

    winner = search_parts(store, h200, Evaluations(fate=fate), num_trials=120)
    others = [config for config in space if not is_bad(config)]
    assert winner.trial.evaluation.config == min(others, key=parts_toy_op.time_us)


def test_parts_that_do_not_go_together_are_replaced_by_runners_up(store, h200, space):
    """A constraint over two parts: the best of each are not valid together."""

    best = optimum(space)

    def together(config):
        is_best = all(config.get(name) == best[name] for name in ("scale_tile", "store_tile"))
        return "scale and store need too much together" if is_best else None

    part = space.spaces[0]
    coupled = replace(part, constraints=(*part.constraints, Constraint("together", together)))
    joint = JointSpace((coupled,))
    winner = search_parts(store, h200, Evaluations(), space=joint, num_trials=120)
    assert joint.check(winner.trial.evaluation.config) is None
    # Both are valid beside another, so no part can tell: close to the best is what is promised.
    assert winner.trial.evaluation.time_us <= 1.1 * parts_toy_op.time_us(optimum(joint))


def test_a_deadline_stops_the_parts_but_the_best_is_still_measured(store, h200, space):
    now = [0.0]

    class Slow(Evaluations):
        def before(self, config, scope):
            super().before(config, scope)
            now[0] += 1.0

    evaluations = Slow()
    winner = search_parts(
        store, h200, evaluations, num_trials=200, deadline=40.0, clock=lambda: now[0]
    )
    # In flight when a share of the time ends: two for each search.
    assert 20 <= len(evaluations.seen) <= 60
    assert {part for part, _ in evaluations.seen} == {"", *parts_toy_op.PARTS}
    assert winner.trial.evaluation.config["algorithm"] == "split"


def test_after_the_deadline_no_other_algorithm_begins(store, h200, space):
    now = [0.0]

    class Slow(Evaluations):
        def before(self, config, scope):
            super().before(config, scope)
            now[0] += 1.0

    evaluations = Slow()
    winner = search_parts(
        store, h200, evaluations, num_trials=200, deadline=0.5, clock=lambda: now[0]
    )
    # What was under way with the default ends.
    assert evaluations.seen[0] == ("", space.default)
    assert [part for part, _ in evaluations.seen] == ["", ""]
    assert winner is not None


def test_a_part_stops_where_gain_is_unlikely(store, h200):
    patient, hasty = Evaluations(), Evaluations()
    with Store.open(":memory:") as other:
        search_parts(other, h200, patient, num_trials=1000)
    rule = GainRule(min_trials=10, trials_per_step=0.1)
    search_parts(store, h200, hasty, num_trials=1000, gain=rule)
    assert len(hasty.seen) < len(patient.seen)


def test_winners_of_neighbours_are_tried_in_their_parts(store, h200, space):
    best = search_parts(store, h200, Evaluations()).trial.evaluation.config
    evaluations = Evaluations()
    search_parts(store, h200, evaluations, size=128)
    wanted = {name: best[name] for name in ("algorithm", "store_tile", "store_depth")}
    assert Config.of("triton", wanted) in evaluations.of("store")[:4]


def test_a_seed_that_won_on_a_near_problem_comes_before_the_others(store, h200, space):
    seeds = [c for c in space if c["algorithm"] == "split"][:6]
    seeded = JointSpace((replace(space.spaces[0], seeds=tuple(seeds)),))
    near = store.study(toy_key(h200, parts_toy_op.PartsToyProblem(size=128)), seed=0)
    trial = store.add_trial(near.study_id, PartsEvaluator(None, None).evaluate(seeds[-1]))
    store.decide(near.study_id, [trial.evaluation])
    evaluations = Evaluations()
    search_parts(store, h200, evaluations, space=seeded, num_trials=20)
    assert evaluations.seen[:2] == [("", seeded.default), ("", seeds[-1])]
