"""Libraries in the search: after ours, beside our winner, never predicted, excludable."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
import rival_toy_op
from tilescout.errors import UnsupportedError
from tilescout.kernels import external as kernels_external
from tilescout.kernels import registry
from tilescout.kernels.base import Config
from tilescout.search_spaces import registry as spaces
from tilescout.tuner import dispatch
from tilescout.tuner.external import use_external
from tilescout.tuner.measure import MeasureSettings
from tilescout.tuner.reach import reached_specs
from tilescout.tuner.records import Provenance, TrialStatus
from tilescout.tuner.store import Store
from tilescout.tuner.timed_launches import Copy, whole_launches
from tilescout.tuner.tune import tune
from winner_databases import MadeUpWinner, write_winners

PROBLEM = rival_toy_op.RivalToyProblem(64)


@pytest.fixture(autouse=True)
def _registered(monkeypatch) -> None:
    registry.register("rival_toy", rival_toy_op.MODULE)
    spaces.register("rival_toy", rival_toy_op.MODULE)
    monkeypatch.delenv(kernels_external.EXTERNAL_VARIABLE, raising=False)
    monkeypatch.setattr(kernels_external, "_chosen", None)


@pytest.fixture
def workload(h200, tmp_path, monkeypatch) -> str:
    """A workload, and a machine that takes its CPU for an H200."""
    monkeypatch.setattr("tilescout.tuner.environment.current_device", lambda: h200)
    monkeypatch.setattr("tilescout.tuner.evaluators.measure._default_torch_device", lambda: "cpu")
    quick = MeasureSettings(run_target_us=200.0, warmup_us=200.0, max_samples=12, max_rounds=16)
    monkeypatch.setattr("tilescout.tuner.evaluators.measure.MeasureSettings", lambda: quick)
    path = tmp_path / "rivals.toml"
    path.write_text(rival_toy_op.WORKLOAD)
    return str(path)


def served(device, database) -> str:
    """Template that a look-up hands out now."""
    dispatch.refresh()
    return dispatch.lookup(PROBLEM, gpu=device, databases=[database]).template


def test_a_library_that_is_faster_wins_a_study_of_its_own(workload, h200, tmp_path) -> None:
    database = tmp_path / "r.db"
    (row,) = tune(workload, mode="measure", trials=3, db=database).rows
    assert row.config == Config.of("library", {})
    with Store.open(database) as store:
        ours, contest = store.winners(op="rival_toy")
        tried = [t.evaluation.config for t in store.trials(contest.study.study_id)]
    assert ours.trial.evaluation.config.template == "triton"
    assert {config.template for config in tried} == {"triton", "library"}
    assert ours.trial.evaluation.config in tried
    (again,) = tune(workload, mode="measure", trials=3, db=database).rows
    assert again.config == row.config
    with Store.open(database) as store:
        assert len(store.studies()) == 2

    def found():
        return dispatch.lookup(PROBLEM, gpu=h200, databases=[database])

    dispatch.refresh()
    assert (found().template, found().tier) == ("library", "exact")
    assert reached_specs(found()) == (), "a bundle has nothing of a library"
    use_external("never")
    try:
        assert (found().template, found().tier) == ("triton", "exact")
    finally:
        use_external(None)
    assert found().template == "library"


def test_without_the_library_our_winner_serves_and_the_reason_is_kept(
    workload, h200, tmp_path, monkeypatch
) -> None:
    database = tmp_path / "r.db"
    tune(workload, mode="measure", trials=2, db=database)
    monkeypatch.setattr(kernels_external, "_version", lambda name: None)
    monkeypatch.setattr("tilescout.tuner.winner_rows._source_hash", _uncached_hash)
    dispatch.refresh()
    assert dispatch.lookup(PROBLEM, gpu=h200, databases=[database]).template == "triton"
    snapshot = dispatch.current_snapshot([database])
    (skipped,) = (row for row in snapshot.skipped if row.database == database)
    assert "pebble is not installed" in skipped.reason


def _uncached_hash(op: str, name: str) -> str:
    return registry.template(op, name).source_hash()


def test_named_templates_alone_take_part(workload, tmp_path) -> None:
    (ours,) = tune(
        workload, mode="measure", trials=2, templates=["triton"], db=tmp_path / "a.db"
    ).rows
    assert ours.config is not None
    assert ours.config.template == "triton"
    (theirs,) = tune(
        workload, mode="measure", trials=2, templates=["library"], db=tmp_path / "b.db"
    ).rows
    assert theirs.config == Config.of("library", {})
    use_external("never")
    try:
        with pytest.raises(UnsupportedError, match="library: external templates are excluded"):
            tune(workload, mode="measure", templates=["library"], db=tmp_path / "c.db")
    finally:
        use_external(None)


@pytest.mark.parametrize("order", [("library", "triton"), ("triton", "library")])
def test_a_search_of_one_template_does_not_displace_a_faster_winner(
    workload, h200, tmp_path, order
) -> None:
    """The library is faster: whichever is searched last, it serves."""
    database = tmp_path / "r.db"
    limits = {"mode": "measure", "trials": 3, "db": database}
    for name in order:
        (row,) = tune(workload, templates=[name], **limits).rows
    assert row.config == Config.of("library", {})
    assert served(h200, database) == "library"
    with Store.open(database) as store:
        before = [study.num_trials for study in store.studies()]
    (again,) = tune(workload, templates=[order[-1]], **limits).rows
    assert again.config == row.config
    with Store.open(database) as store:
        assert [study.num_trials for study in store.studies()] == before


def test_the_winner_that_stands_is_measured_however_little_time_there_is(
    workload, h200, tmp_path
) -> None:
    database = tmp_path / "r.db"
    tune(workload, mode="measure", trials=3, templates=["library"], db=database)
    tune(
        *(workload,),
        mode="measure",
        trials=300,
        time_budget_s=0.05,
        templates=["triton"],
        db=database,
    )
    assert served(h200, database) == "library"


def test_a_library_that_stands_is_not_displaced_by_a_search_without_time(
    workload, h200, tmp_path
) -> None:
    """The search of all templates, whose own part has another winner by now."""
    database = tmp_path / "r.db"
    limits = {"mode": "measure", "db": database}
    (row,) = tune(workload, trials=3, **limits).rows
    assert row.config == Config.of("library", {})
    with Store.open(database) as store:
        study = store.winners(op="rival_toy")[0].study
        other = next(
            trial.evaluation
            for trial in store.trials(study.study_id)
            if trial.evaluation.status is TrialStatus.OK
            and trial.evaluation.config != store.winners(op="rival_toy")[0].trial.evaluation.config
        )
        store.decide(study.study_id, [other])
    tune(workload, trials=300, time_budget_s=0.05, **limits)
    assert served(h200, database) == "library"


def test_a_search_without_time_measures_what_serves_without_the_library(
    workload, h200, tmp_path
) -> None:
    database = tmp_path / "r.db"
    space = spaces.joint_space(PROBLEM, h200)
    ours = next(c for c in space if c.template == "triton" and c != space.default)
    library = Config.of("library", {})
    predicted = MadeUpWinner(PROBLEM, h200, ours, provenance=Provenance.PREDICTED)
    write_winners(database, [predicted, MadeUpWinner(PROBLEM, h200, library)])
    tune(workload, mode="measure", trials=300, time_budget_s=0.05, db=database)
    with Store.open(database) as store:
        own, contest = store.studies(op="rival_toy")[2:]
        tried = [{t.evaluation.config for t in store.trials(s.study_id)} for s in (own, contest)]
    assert tried[0] == {space.default, ours}
    assert library in tried[1]


@pytest.mark.parametrize("templates", [None, ["library"]])
def test_a_contest_that_was_held_before_is_decided_again(
    workload, h200, tmp_path, templates
) -> None:
    """Nothing of it is new, but ours was decided since, and the newest is handed out."""
    database = tmp_path / "r.db"
    limits = {"mode": "measure", "db": database, "trials": 3}
    tune(workload, **limits)

    with Store.open(database) as store:
        ours = store.winners(op="rival_toy")[0]
        store.decide(ours.study.study_id, [ours.trial.evaluation])
    assert served(h200, database) == "triton"
    (row,) = tune(workload, templates=templates, **limits).rows
    assert row.config == Config.of("library", {})
    assert served(h200, database) == "library"


def test_a_contest_is_decided_again_without_a_final_that_cannot_be_read(workload, tmp_path) -> None:
    database = tmp_path / "r.db"
    limits = {"mode": "measure", "db": database, "trials": 2}
    tune(workload, **limits)
    with Store.open(database) as store:
        ours, contest = store.winners(op="rival_toy")
        tried = {t.trial_id: t.evaluation for t in store.trials(contest.study.study_id)}
        first, second = contest.finals
        store.decide(contest.study.study_id, [tried[second], tried[first]])
        store.decide(ours.study.study_id, [ours.trial.evaluation])
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE trials SET status = 'unheard of' WHERE id = ?", (first,))
    (row,) = tune(workload, time_budget_s=0.01, **limits).rows
    assert row.config is not None


def test_a_url_with_a_tilde_is_taken_as_it_is(workload, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~").mkdir()
    (row,) = tune(workload, mode="measure", trials=2, db="sqlite:///~/r.db").rows
    assert row.config is not None
    assert (tmp_path / "~" / "r.db").exists()


def test_a_standing_winner_that_cannot_run_here_is_passed_over(
    workload, h200, tmp_path, monkeypatch
) -> None:
    database = tmp_path / "r.db"
    tune(workload, mode="measure", trials=3, templates=["library"], db=database)
    monkeypatch.setattr(kernels_external, "_version", lambda name: None)
    (row,) = tune(workload, mode="measure", trials=3, templates=["triton"], db=database).rows
    assert row.config is not None
    assert row.config.template == "triton"


def test_libraries_are_never_predicted(workload, tmp_path) -> None:
    database = tmp_path / "p.db"
    (row,) = tune(workload, gpus=["b200"], mode="predict", trials=2, db=database).rows
    assert row.provenance is Provenance.PREDICTED
    with Store.open(database) as store:
        (study,) = store.studies()
        assert [name for name, _ in study.key.template_hashes] == ["triton"]
    with pytest.raises(UnsupportedError, match="never predicted"):
        tune(workload, gpus=["b200"], mode="predict", templates=["library"], db=database)


def test_a_library_that_works_in_place_is_timed_so_on_data_of_its_own() -> None:
    operation, template = rival_toy_op.OPERATION, rival_toy_op.LibraryTemplate()
    copies = []
    for seed in range(2):
        inputs = operation.make_inputs(PROBLEM, device="cpu", seed=seed)
        copies.append(Copy(inputs, operation.make_outputs(PROBLEM, inputs)))
    before = [copy.inputs["x"].clone() for copy in copies]
    config = Config.of("library", {})
    launches = whole_launches(operation, template, PROBLEM, config, copies)
    for call in launches.calls * 2:
        call()
    assert all(bool(copy.outputs["y"].isnan().all()) for copy in copies), "those of other configs"
    assert all((copy.inputs["x"] == x).all() for copy, x in zip(copies, before, strict=True))
    assert operation.compare(PROBLEM, copies[0].inputs, launches.first).is_ok
    launches.finish()
    assert operation.outputs_equal(launches.first, copies[0].outputs)


def test_a_library_is_timed_on_outputs_of_its_own_and_judged_by_them(monkeypatch) -> None:
    operation, template = rival_toy_op.OPERATION, rival_toy_op.LibraryTemplate()
    monkeypatch.setattr(rival_toy_op.LibraryTemplate, "is_in_place", False)
    inputs = operation.make_inputs(PROBLEM, device="cpu", seed=0)
    shared = operation.make_outputs(PROBLEM, inputs)
    copy = Copy(inputs, shared)
    launches = whole_launches(operation, template, PROBLEM, Config.of("library", {}), [copy])
    launches.calls[0]()
    assert bool(shared["y"].isnan().all())
    launches.finish()
    assert copy.outputs is not shared
    assert operation.outputs_equal(launches.first, copy.outputs)
