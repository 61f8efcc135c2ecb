from __future__ import annotations

import pytest
from report_data import DEFAULT, HUGE, SMALL, SPLIT, WIDE, Searched, add_study, failed, timed
from tilescout.tuner.prediction.roofline import roofline_us
from tilescout.tuner.records import Provenance
from tilescout.tuner.report import rows, search_rows
from tilescout.tuner.report.searches import Search, load_searches
from toy_op import ToyProblem

PROBLEM = ToyProblem(1 << 20)


def searched_once(store, searched, trials, finals=()) -> Search:
    add_study(store, searched, trials, finals)
    (search,) = load_searches([store], None)
    return search


def test_result_of_a_measured_search(store, h200):
    searched = Searched(PROBLEM, h200)
    trials = [timed(searched, DEFAULT, 20.0), timed(searched, SPLIT, 12.5)]
    search = searched_once(store, searched, trials, [SPLIT])
    row = rows.result_row(search)
    winner = store.winners()[0]
    assert row.time_us == winner.trial.evaluation.time_us == 12.5
    assert row.trial_id == winner.trial.trial_id
    assert row.config_id == SPLIT.config_id
    assert (row.default_time_us, row.default_status) == (20.0, "ok")
    assert row.gain_over_default == pytest.approx(1.6)
    assert row.achieved_gbps == pytest.approx(8 * (1 << 20) / 12.5e-6 / 1e9)
    assert row.achieved_tflops == pytest.approx((1 << 20) / 12.5e-6 / 1e12)
    assert row.share_of_roofline == pytest.approx(roofline_us(PROBLEM, h200) / 12.5)
    assert (row.p10_us, row.p90_us, row.num_samples) == (0.99 * 12.5, 1.02 * 12.5, 100)
    assert (row.baseline, row.baseline_time_us, row.speedup_over_baseline) == ("none", None, None)
    assert row.trials_by_status == "ok 2"
    assert (row.sku, row.device, row.provenance) == ("h200", "NVIDIA H200", "measured")
    assert row.policy == "cuda_graph/cold_l2"
    assert row.versions == "triton 3.7.1, torch 2.13.0, cuda 13.0, driver 580.95"
    assert row.date == winner.decided_at.strftime("%Y-%m-%dT%H:%M:%SZ")


def test_a_prediction_has_no_spread_and_no_driver(store, h200):
    searched = Searched(PROBLEM, h200, Provenance.PREDICTED)
    search = searched_once(store, searched, [timed(searched, SPLIT, 12.5)], [SPLIT])
    row = rows.result_row(search)
    assert row.provenance == "predicted"
    assert (row.p10_us, row.p90_us, row.ci_low_us, row.ci_high_us) == (None,) * 4
    assert row.num_samples == 0
    assert "driver" not in row.versions


def test_a_winner_slower_than_the_default_stays_in(store, h200):
    searched = Searched(PROBLEM, h200)
    trials = [timed(searched, DEFAULT, 10.0), timed(searched, SPLIT, 12.5)]
    row = rows.result_row(searched_once(store, searched, trials, [SPLIT]))
    assert row.gain_over_default == pytest.approx(0.8)


def test_nothing_worked_leaves_times_blank_and_counts_the_trials(store, h200):
    searched = Searched(PROBLEM, h200)
    trials = [
        failed(searched, DEFAULT, "crashed", "signal 11"),
        failed(searched, SPLIT, "timeout", "60 s"),
        failed(searched, WIDE, "timeout", "60 s"),
    ]
    row = rows.result_row(searched_once(store, searched, trials))
    assert row.state == "nothing worked"
    assert row.trials_by_status == "timeout 2, crashed 1"
    assert row.default_status == "crashed"
    blank = (row.time_us, row.gain_over_default, row.share_of_roofline, row.config, row.trial_id)
    assert blank == (None,) * 5


def test_progress_follows_the_best_ok_time(store, h200):
    searched = Searched(PROBLEM, h200)
    trials = [
        failed(searched, HUGE, "invalid", "spills"),
        timed(searched, DEFAULT, 20.0),
        timed(searched, SMALL, 5.0, "pruned"),
        timed(searched, SPLIT, 12.5),
        timed(searched, WIDE, 15.0),
    ]
    found = search_rows.progress_columns([searched_once(store, searched, trials)])
    assert found["best_us"] == [None, 20.0, 20.0, 12.5, 12.5]
    assert found["time_us"] == [None, 20.0, 5.0, 12.5, 15.0]
    assert found["number"] == [0, 1, 2, 3, 4]
    assert found["config"] == [str(trial.config) for trial in trials]
    assert {len(values) for values in found.values()} == {5}


def test_failures_are_counted_by_status_with_the_commonest_reasons_last(store, h200):
    searched = Searched(PROBLEM, h200)
    trials = [
        timed(searched, DEFAULT, 20.0),
        failed(searched, SPLIT, "invalid", "spills 64 bytes"),
        failed(searched, WIDE, "invalid", "spills 64 bytes"),
        failed(searched, HUGE, "invalid", "spills 8 bytes"),
        failed(searched, SMALL, "crashed", ""),
    ]
    found = list(search_rows.failure_rows([searched_once(store, searched, trials)]))
    assert [(row.status, row.num_trials) for row in found] == [("invalid", 3), ("crashed", 1)]
    assert [row.reasons for row in found] == [
        "spills 64 bytes (2); spills 8 bytes (1)",
        "no reason given (1)",
    ]
    assert found[0].share_of_trials == pytest.approx(0.6)


def test_reasons_beyond_the_commonest_are_counted(store, h200):
    searched = Searched(PROBLEM, h200)
    configs = [DEFAULT, SPLIT, WIDE, HUGE, SMALL]
    trials = [failed(searched, c, "invalid", f"spills {i}") for i, c in enumerate(configs)]
    (row,) = search_rows.failure_rows([searched_once(store, searched, trials)])
    assert row.reasons.endswith("; 2 other reasons")


def test_binary_facts_are_those_of_the_winner(store, h200):
    searched = Searched(PROBLEM, h200)
    search = searched_once(store, searched, [timed(searched, SPLIT, 12.5)], [SPLIT])
    (row,) = search_rows.binary_rows(search)
    (facts,) = store.winners()[0].trial.evaluation.facts
    assert (row.kernel, row.registers, row.smem_bytes) == ("toy_kernel", 96, 4096)
    assert (row.registers, row.mma_kind) == (facts.registers, facts.mma_kind)
    assert row.instruction_mix == "mma 8, store 2"
    assert row.provenance == "measured"


def test_summary_speaks_of_the_problems_that_have_both_times(filled):
    searches = sorted(load_searches([filled], None), key=lambda s: s.is_predicted)
    measured, predicted = rows.summary_rows(searches, list(map(rows.result_row, searches)))
    assert (measured.num_problems, measured.num_compared) == (2, 2)
    assert measured.geomean_gain_over_default == pytest.approx(1.6)
    assert (predicted.num_problems, predicted.provenance) == (1, "predicted")
    assert predicted.smallest_gain_over_default == pytest.approx(2.0)


def test_devices_say_what_data_there_is(filled):
    found = {row.sku: row for row in rows.device_rows(load_searches([filled], None))}
    assert (found["h200"].num_studies, found["h200"].num_trials) == (2, 10)
    assert found["b200"].bandwidth_gbps == 8000.0
    assert found["b200"].provenance == "predicted"


def test_a_problem_of_a_shipped_workload_has_its_label(store, h200):
    from tilescout.tuner.catalog import workload

    labelled = workload("quickstart").problems[0]
    from tilescout.search_spaces.registry import joint_space

    searched = Searched(labelled.problem, h200)
    default = joint_space(labelled.problem, h200).default
    search = searched_once(store, searched, [timed(searched, default, 50.0)], [default])
    row = rows.result_row(search)
    assert f"quickstart: {labelled.label}" in row.workload
    assert row.gain_over_default == 1.0
