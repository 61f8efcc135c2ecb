from __future__ import annotations

import time
from dataclasses import replace

import pytest
from report_data import DEFAULT, SPLIT, WIDE, Searched, add_study, failed, timed, typical_trials
from tilescout.errors import UnknownNameError, UsageError
from tilescout.tuner.records import MeasurementPolicy, Provenance, Toolchain
from tilescout.tuner.report.search_rows import failure_rows, progress_columns, search_row
from tilescout.tuner.report.searches import load_searches, ordered_skus, resolve_skus, shown
from tilescout.tuner.store import Store
from toy_op import ToyProblem

PROBLEM = ToyProblem(4096)


def test_the_default_is_found_by_its_config_wherever_it_ended(store, h200):
    searched = Searched(PROBLEM, h200)
    add_study(store, searched, [timed(searched, SPLIT, 9.0), timed(searched, DEFAULT, 20.0)])
    (search,) = load_searches([store], None)
    assert search.default is not None
    assert search.default.evaluation.config == DEFAULT
    assert search.default.number == 1


def test_no_default_where_it_was_not_tried(store, h200):
    searched = Searched(PROBLEM, h200)
    add_study(store, searched, [timed(searched, SPLIT, 9.0)])
    (search,) = load_searches([store], None)
    assert search.default is None


@pytest.mark.parametrize(
    ("finals", "state", "best"),
    [
        pytest.param([WIDE, SPLIT], "decided", WIDE, id="the winner, though not the fastest trial"),
        pytest.param([], "undecided", SPLIT, id="before the finals the fastest ok trial"),
    ],
)
def test_best_and_state(store, h200, finals, state, best):
    searched = Searched(PROBLEM, h200)
    trials = [
        timed(searched, DEFAULT, 20.0),
        timed(searched, WIDE, 10.0),
        timed(searched, SPLIT, 9.0),
    ]
    add_study(store, searched, trials, finals)
    (search,) = load_searches([store], None)
    assert search.state == state
    assert search.best is not None
    assert search.best.evaluation.config == best


def test_trials_of_parts_count_in_failures_seconds_and_the_list_of_searches(store, h200):
    searched = Searched(PROBLEM, h200)
    part = store.study(replace(searched.key, part="algorithm=split: merge"), seed=0)
    store.add_trials(
        part.study_id,
        [timed(searched, SPLIT, 2.0), failed(searched, WIDE, "crashed", "signal 11")],
    )
    time.sleep(0.01)  # the part ends before the whole is measured
    add_study(store, searched, [timed(searched, SPLIT, 9.0)], [SPLIT])
    (search,) = load_searches([store], None)
    assert (len(search.trials), len(search.part_trials)) == (1, 2)
    row = search_row(search, is_shown=True)
    assert (row.num_trials, row.num_part_trials, row.measure_s) == (1, 2, 0.5)
    (failure,) = failure_rows([search])
    assert (failure.num_trials, failure.share_of_trials) == (1, 1 / 3)
    assert failure.reasons == "signal 11 (1)"
    assert progress_columns([search])["gpu_s"] == [0.5]


def test_a_pruned_trial_is_never_the_best(store, h200):
    searched = Searched(PROBLEM, h200)
    trials = [
        timed(searched, WIDE, 1.0, "pruned"),
        failed(searched, DEFAULT, "crashed", "signal 11"),
    ]
    add_study(store, searched, trials)
    (search,) = load_searches([store], None)
    assert search.best is None
    assert search.state == "nothing worked"


def test_a_study_in_two_databases_is_shown_once_as_decided(store, h200, tmp_path):
    searched = Searched(PROBLEM, h200)
    add_study(store, searched, typical_trials(searched))
    with Store.open(tmp_path / "second.db") as second:
        add_study(second, searched, typical_trials(searched), [SPLIT])
        (search,) = load_searches([store, second], None)
        assert search.state == "decided"
        (search,) = load_searches([second, store], None)
        assert search.state == "decided"


def test_of_two_equal_copies_the_earlier_database_counts(store, h200, tmp_path):
    searched = Searched(PROBLEM, h200)
    with Store.open(tmp_path / "second.db") as second:
        add_study(second, Searched(ToyProblem(1), h200), [])  # so that ids differ
        add_study(second, searched, typical_trials(searched))
        expected = add_study(store, searched, typical_trials(searched))
        found = [s for s in load_searches([store, second], None) if s.key.problem == PROBLEM]
    assert [search.study.study_id for search in found] == [expected.study_id]


def test_the_search_decided_last_speaks_for_its_problem(store, h200):
    old = Searched(PROBLEM, h200)
    new = Searched(PROBLEM, h200, toolchain=Toolchain(triton="3.8.0"))
    unfinished = Searched(PROBLEM, h200, toolchain=Toolchain(triton="3.9.0"))
    for searched in (old, new):
        add_study(store, searched, typical_trials(searched), [SPLIT])
    add_study(store, unfinished, typical_trials(unfinished))
    searches = load_searches([store], None)
    assert len(searches) == 3
    assert [search.key.toolchain.triton for search in shown(searches)] == ["3.8.0"]


def test_policies_and_provenances_are_shown_apart(store, h200):
    for searched in (
        Searched(PROBLEM, h200),
        Searched(PROBLEM, h200, Provenance.PREDICTED),
        Searched(PROBLEM, h200, policy=MeasurementPolicy(is_cold_l2=False)),
    ):
        add_study(store, searched, typical_trials(searched), [SPLIT])
    assert len(shown(load_searches([store], None))) == 3


def test_skus_with_measurements_come_first_then_the_slower_memory(filled):
    searches = load_searches([filled], None)
    assert ordered_skus(searches, None) == ("h200", "b200")
    assert ordered_skus(searches, ("b200", "h200")) == ("b200", "h200")


def test_a_sku_is_found_by_its_alias_and_once(filled):
    from tilescout.tuner.catalog import gpu

    alias = gpu("h200").aliases[0]
    assert resolve_skus([filled], [alias, "h200", "b300"]) == ("h200", "b300")
    assert resolve_skus([filled], None) is None


def test_a_sku_outside_the_catalogue_counts_where_the_data_has_it(store, h200):
    from dataclasses import replace

    searched = Searched(PROBLEM, replace(h200, sku="my_gpu"))
    add_study(store, searched, typical_trials(searched))
    assert resolve_skus([store], ["my_gpu"]) == ("my_gpu",)


def test_an_unknown_sku_is_refused_with_what_exists(filled):
    with pytest.raises(UnknownNameError, match=r"'h900'.*b200.*h200"):
        resolve_skus([filled], ["h200", "h900"])


@pytest.mark.parametrize("gpus", [pytest.param([], id="empty"), pytest.param("h200", id="text")])
def test_a_filter_that_is_no_list_of_names_is_refused(filled, gpus):
    with pytest.raises(UsageError, match="list of at least one SKU"):
        resolve_skus([filled], gpus)
