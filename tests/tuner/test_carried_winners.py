"""What won on one SKU is predicted on the others, in new studies and in finished ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from formula_evaluator import FormulaEvaluator, timing
from report_data import Searched, add_study, timed
from tilescout.kernels.base import Config
from tilescout.search_spaces.listed import listed_space
from tilescout.search_spaces.registry import joint_space
from tilescout.search_spaces.space import JointSpace
from tilescout.tuner import catalog
from tilescout.tuner.carried_winners import CarriedWinners
from tilescout.tuner.records import Evaluation, Provenance, TrialStatus
from tilescout.tuner.store import Store
from tilescout.tuner.tune import tune
from toy_op import WORKLOAD, ToyProblem, toy_time_us

SKUS = ("h200", "b200", "rtx5090")
BEST_BLOCK = {"h200": 128, "b200": 16, "rtx5090": 64}
SHIPPED = "tilescout.tuner.carried_winners.shipped_database_path"


Ask = Callable[[CarriedWinners], tuple[Config, ...]]


class SkuEvaluator(FormulaEvaluator):
    """Every SKU has a block size of its own, and times grow with the distance from it."""

    def __init__(self, sku: str) -> None:
        super().__init__(provenance=Provenance.PREDICTED)
        self.sku = sku

    def evaluate(self, config: Config) -> Evaluation:
        octaves = abs(math.log2(int(config["block_n"]) / BEST_BLOCK[self.sku]))
        time_us = toy_time_us(config) + 10.0 * octaves
        return Evaluation(config, TrialStatus.OK, self.provenance, timing=timing(time_us))


@pytest.fixture(autouse=True)
def made(monkeypatch, tmp_path):
    evaluators = []

    def make(problem, device, *, pool, scope=None, deadline=None, kept=()):
        evaluators.append(SkuEvaluator(device.sku))
        return evaluators[-1]

    monkeypatch.setattr("tilescout.tuner.tune.PredictEvaluator", make)
    monkeypatch.setattr(SHIPPED, lambda: tmp_path / "shipped.db")
    return evaluators


@pytest.fixture
def workload(toy, tmp_path) -> str:
    path = tmp_path / "toys.toml"
    path.write_text(WORKLOAD)
    return str(path)


def predicted(workload, database, gpus=SKUS, trials=16):
    return tune(workload, gpus=gpus, mode="predict", trials=trials, db=database)


def winners_and_trials(database):
    with Store.open(database, read_only=True) as store:
        winners = {
            (w.study.key.problem.size, w.study.key.device.sku): w.trial.evaluation.config
            for w in store.winners()
        }
        trials = {
            (s.key.problem.size, s.key.device.sku): [
                t.evaluation.config for t in store.trials(s.study_id)
            ]
            for s in store.studies()
        }
    return winners, trials


def test_every_winner_has_a_time_on_every_other_sku(workload, tmp_path):
    database = tmp_path / "a.db"
    summary = predicted(workload, database)
    winners, trials = winners_and_trials(database)
    assert len({winners[64, sku] for sku in SKUS}) == 3
    for size, sku in trials:
        for other in SKUS:
            assert winners[size, other] in trials[size, sku]
    assert {(r.problem.size, r.sku): r.config for r in summary.rows} == winners


def test_a_finished_run_is_not_begun_again(workload, made, tmp_path):
    first = predicted(workload, tmp_path / "a.db")
    made.clear()
    assert predicted(workload, tmp_path / "a.db").rows == first.rows
    assert [evaluator.evaluated for evaluator in made] == [[]] * 6


def test_a_finished_study_takes_on_what_another_sku_found_later(workload, made, tmp_path):
    database = tmp_path / "a.db"
    predicted(workload, database, gpus=["h200"], trials=2)
    _, before = winners_and_trials(database)
    made.clear()
    predicted(workload, database, gpus=["b200"])
    predicted(workload, database, gpus=["h200"], trials=2)
    winners, trials = winners_and_trials(database)
    for size in (64, 4096):
        assert winners[size, "b200"] not in before[size, "h200"]
        assert trials[size, "h200"] == [*before[size, "h200"], winners[size, "b200"]]


def test_the_default_comes_first_then_the_winners_of_others(workload, made, tmp_path):
    database = tmp_path / "a.db"
    predicted(workload, database, gpus=["b200", "rtx5090"])
    winners, _ = winners_and_trials(database)
    made.clear()
    predicted(workload, database, gpus=["h200"], trials=5)
    _, trials = winners_and_trials(database)
    default, *carried = trials[64, "h200"][:3]
    space = joint_space(ToyProblem(64), catalog.gpu("h200"))
    assert default == space.default
    assert carried == [winners[64, "b200"], winners[64, "rtx5090"]]
    assert len(trials[64, "h200"]) == 5


def test_a_carried_winner_may_win(workload, tmp_path):
    database = tmp_path / "a.db"
    predicted(workload, database, gpus=["h200"], trials=1)
    slow, _ = winners_and_trials(database)
    assert slow[64, "h200"]["block_n"] != BEST_BLOCK["h200"]
    good = next(
        config
        for config in joint_space(ToyProblem(64), catalog.gpu("h200"))
        if config["block_n"] == BEST_BLOCK["h200"]
    )
    with Store.open(database) as store:
        other = Searched(ToyProblem(64), catalog.gpu("b200"), Provenance.PREDICTED)
        add_study(store, other, [timed(other, good, 5.0)], [good])
    summary = predicted(workload, database, gpus=["h200"], trials=1)
    assert summary.rows[0].config == good


def of_h200(store, location) -> tuple[Config, ...]:
    problem, device = ToyProblem(64), catalog.gpu("h200")
    key = Searched(problem, device, Provenance.PREDICTED).key
    carried = CarriedWinners(store, location)
    try:
        return carried.of(key, joint_space(problem, device))
    finally:
        carried.close()


def test_which_winner_speaks_for_a_sku(toy, tmp_path):
    b200, problem = catalog.gpu("b200"), ToyProblem(64)
    configs = list(joint_space(problem, b200))
    foreign = Config.of("triton", {**configs[0].as_dict(), "block_n": 96})
    cases = [
        (Searched(problem, b200, Provenance.MEASURED), configs[0]),
        (Searched(problem, b200, Provenance.PREDICTED), configs[1]),
        (Searched(ToyProblem(128), b200, Provenance.PREDICTED), configs[2]),
        (Searched(problem, catalog.gpu("h200"), Provenance.MEASURED), configs[3]),
        (Searched(problem, catalog.gpu("rtx5090"), Provenance.PREDICTED), foreign),
    ]
    with Store.open(tmp_path / "a.db") as store:
        for searched, config in cases:
            add_study(store, searched, [timed(searched, config, 9.0)], [config])
        assert of_h200(store, tmp_path / "a.db") == (configs[0],)


def test_the_shipped_database_counts_too_unless_it_is_the_one_written(toy, tmp_path):
    problem, b200 = ToyProblem(64), catalog.gpu("b200")
    searched = Searched(problem, b200)
    config = next(iter(joint_space(problem, b200)))
    with Store.open(tmp_path / "shipped.db") as shipped:
        add_study(shipped, searched, [timed(searched, config, 9.0)], [config])
        assert of_h200(shipped, tmp_path / "shipped.db") == (config,)
    with Store.open(tmp_path / "a.db") as store:
        assert of_h200(store, tmp_path / "a.db") == (config,)


def test_a_measured_search_begins_with_what_earlier_ones_of_the_sku_found(toy, tmp_path):
    h200, problem = catalog.gpu("h200"), ToyProblem(64)
    configs = list(joint_space(problem, h200))
    own = Searched(problem, h200)
    older = replace(own, toolchain=replace(own.toolchain, triton="3.6.0"))
    oldest = replace(own, toolchain=replace(own.toolchain, triton="3.5.0"))
    invalid = Config.of("triton", {**configs[0].as_dict(), "block_n": 96})
    cases = [
        (oldest, configs[1]),
        (replace(own, toolchain=replace(own.toolchain, triton="3.4.0")), invalid),
        (older, configs[2]),
        (own, configs[3]),
        (replace(own, provenance=Provenance.PREDICTED), configs[4]),
        (replace(own, device=catalog.gpu("b200")), configs[5]),
        (replace(own, problem=ToyProblem(128)), configs[6]),
    ]
    with Store.open(tmp_path / "a.db") as store:
        for searched, config in cases:
            add_study(store, searched, [timed(searched, config, 9.0)], [config])
        carried = CarriedWinners(store, tmp_path / "a.db")
        try:
            found = carried.earlier(own.key, joint_space(problem, h200))
        finally:
            carried.close()
    assert found == (configs[2], configs[1])


def test_winners_that_stand_come_as_look_ups_take_them(toy, tmp_path):
    """Those of the run's own database first, though the shipped one was decided later."""
    problem, h200 = ToyProblem(64), catalog.gpu("h200")
    searched = Searched(problem, h200)
    space = joint_space(problem, h200)
    configs = list(space)
    other = JointSpace((listed_space("tilelang", [Config.of("tilelang", {"block_n": 16})]),))
    predicted = Searched(problem, h200, Provenance.PREDICTED)
    newer = replace(searched, toolchain=replace(searched.toolchain, triton="9.9"))
    shipped_path, own_path = tmp_path / "shipped.db", tmp_path / "own.db"
    with Store.open(shipped_path) as shipped, Store.open(own_path) as store:
        for one, config in ((searched, configs[0]), (newer, configs[1]), (predicted, configs[2])):
            add_study(store, one, [timed(one, config, 9.0)], [config])
        add_study(shipped, searched, [timed(searched, configs[3], 5.0)], [configs[3]])
        carried = CarriedWinners(store, own_path)
        try:
            assert carried.standing(searched.key, other) == (configs[1], configs[0], configs[3])
            assert carried.standing(searched.key, space) == ()
        finally:
            carried.close()


def asked_of(
    path: Path, studies: Sequence[tuple[Searched, Config]], ask: Ask
) -> tuple[Config, ...]:
    """What carried winners say where a database holds these studies and what each decided."""
    with Store.open(path) as store:
        for searched, config in studies:
            add_study(store, searched, [timed(searched, config, 9.0)], [config])
        with closing(CarriedWinners(store, path)) as carried:
            return ask(carried)


def test_what_a_look_up_gives_stands_too_where_it_is_of_another_template(toy, tmp_path):
    """Predicted, of another problem, but never a default."""
    problem, h200 = ToyProblem(64), catalog.gpu("h200")
    searched = Searched(problem, h200)
    config = list(joint_space(problem, h200))[3]
    other = JointSpace((listed_space("tilelang", [Config.of("tilelang", {"block_n": 16})]),))

    def standing(name: str, *studies: Searched) -> tuple[Config, ...]:
        decided = [(one, config) for one in studies]
        return asked_of(tmp_path / name, decided, lambda c: c.standing(searched.key, other))

    assert standing("none.db") == ()
    assert standing("a.db", replace(searched, provenance=Provenance.PREDICTED)) == (config,)
    assert standing("b.db", replace(searched, problem=ToyProblem(128))) == (config,)


def test_a_prediction_tries_what_was_predicted_before_and_no_measured_winner(toy, tmp_path):
    problem, h200 = ToyProblem(64), catalog.gpu("h200")
    space = joint_space(problem, h200)
    first, second = list(space)[3:5]
    own = Searched(problem, h200, Provenance.PREDICTED)
    predicted = (replace(own, toolchain=replace(own.toolchain, triton="3.6.0")), first)
    measured = (Searched(problem, h200), second)

    def served(name: str, *studies: tuple[Searched, Config]) -> tuple[Config, ...]:
        return asked_of(tmp_path / name, studies, lambda c: c.served(own.key, space))

    assert served("none.db") == ()
    assert served("a.db", predicted) == (first,)
    assert served("b.db", predicted, measured) == ()
