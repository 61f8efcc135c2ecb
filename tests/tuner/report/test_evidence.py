from __future__ import annotations

from dataclasses import replace

import pytest
from report_data import DEFAULT, HUGE, SMALL, SPLIT, WIDE, Searched, add_study, failed, timed
from tilescout.kernels.base import Config
from tilescout.tuner.records import Provenance
from tilescout.tuner.report.evidence import (
    accuracy_row,
    best_config_rows,
    importance_rows,
    started_weighings,
)
from tilescout.tuner.report.refusals import refusal
from tilescout.tuner.report.rows import result_row
from tilescout.tuner.report.searches import load_searches
from tilescout.tuner.report.second_process import SecondProcess
from tilescout.tuner.report.transfer import (
    transfer_missing_rows,
    transfer_pair_rows,
    transfer_rows,
)
from tilescout.tuner.search.importance import TEMPLATE, parameter_importance
from toy_op import ToyProblem

PROBLEM = ToyProblem(1 << 20)
TOO_LARGE = Config.of("triton", {"block_n": 256, "num_stages": 4, "split_rule": "none"})
ODD = Config.of("triton", {"block_n": 96, "num_stages": 1, "split_rule": "none"})


def searched_once(store, searched, trials, finals=()):
    add_study(store, searched, trials, finals)
    (search,) = load_searches([store], None)
    return search


def test_finalists_come_first_in_their_order_then_the_others_by_time(store, h200):
    searched = Searched(PROBLEM, h200)
    trials = [
        timed(searched, DEFAULT, 9.0),
        timed(searched, SPLIT, 10.0),
        timed(searched, WIDE, 10.1),
        timed(searched, SMALL, 8.0, status="pruned"),
        failed(searched, HUGE, "crashed", "signal 11"),
    ]
    search = searched_once(store, searched, trials, [SPLIT, WIDE])
    rows = list(best_config_rows(search))
    assert [row.config for row in rows] == [str(SPLIT), str(WIDE), str(DEFAULT)]
    assert [row.rank for row in rows] == [1, 2, 3]
    assert [row.is_finalist for row in rows] == [True, True, False]
    assert rows[1].over_best == pytest.approx(1.01)
    assert rows[0].ci_low_us == pytest.approx(9.9)


@pytest.mark.parametrize(
    ("second_us", "is_settled"),
    [
        pytest.param(13.5, True, id="intervals apart"),
        pytest.param(12.6, False, id="intervals overlap"),
    ],
)
def test_an_order_is_settled_where_the_intervals_are_apart(store, h200, second_us, is_settled):
    searched = Searched(PROBLEM, h200)
    trials = [timed(searched, SPLIT, 12.5), timed(searched, WIDE, second_us)]
    search = searched_once(store, searched, trials, [SPLIT, WIDE])
    assert [row.is_settled for row in best_config_rows(search)] == [None, is_settled]
    assert result_row(search).is_settled is is_settled


def test_predictions_have_no_interval_and_settle_nothing(store, h200):
    searched = Searched(PROBLEM, h200, Provenance.PREDICTED)
    trials = [timed(searched, SPLIT, 12.5), timed(searched, WIDE, 20.0)]
    search = searched_once(store, searched, trials, [SPLIT, WIDE])
    assert [row.ci_low_us for row in best_config_rows(search)] == [None, None]
    assert [row.is_settled for row in best_config_rows(search)] == [None, None]
    assert result_row(search).is_settled is None
    assert accuracy_row(search) is None


def test_accuracy_tells_the_errors_and_what_was_wrong(store, h200):
    searched = Searched(PROBLEM, h200)
    right = [
        replace(timed(searched, SPLIT, 12.5), max_abs_error=0.25, relative_rms_error=1e-3),
        replace(timed(searched, WIDE, 20.0), max_abs_error=0.5, relative_rms_error=2e-3),
    ]
    wrong = [failed(searched, HUGE, "incorrect", "off"), failed(searched, SMALL, "timeout", "")]
    row = accuracy_row(searched_once(store, searched, [*right, *wrong], [SPLIT]))
    assert row is not None
    assert (row.num_right, row.num_incorrect, row.num_unrepeatable) == (2, 1, 0)
    assert (row.max_abs_error, row.relative_rms_error) == (0.25, 1e-3)
    assert (row.largest_abs_error, row.largest_relative_rms_error) == (0.5, 2e-3)


def grid(stages=(1, 2, 3)):
    return [
        Config.of("triton", {"block_n": block, "num_stages": stage, "split_rule": "none"})
        for block in (16, 32, 64, 128, 256)
        for stage in stages
    ]


def test_the_parameter_that_decides_has_the_largest_share():
    times = [(config, float(config["block_n"]) + 0.01 * config["num_stages"]) for config in grid()]
    shares = parameter_importance(times)
    assert next(iter(shares)) == "block_n"
    assert shares["block_n"] > 0.6
    assert sum(shares.values()) == pytest.approx(1.0)
    assert "split_rule" not in shares


def test_equal_shares_are_in_the_order_of_their_names():
    names = ("b", "d", "a", "c")
    times = [
        (Config.of("triton", {**dict.fromkeys(names, index % 5), "e": index % 3}), float(index))
        for index in range(30)
    ]
    shares = parameter_importance(times)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert [name for name in shares if name != "e"] == sorted(names)
    assert len({shares[name] for name in names}) == 1


def test_the_template_is_a_parameter_and_an_inactive_one_a_value():
    other = [Config.of("other", {"threads": threads}) for threads in (64, 128, 256, 512)]
    times = [(config, 10.0 + i) for i, config in enumerate(grid())]
    shares = parameter_importance([*times, *((config, 1.0) for config in other)])
    assert {TEMPLATE, "threads", "block_n"} <= set(shares)


@pytest.mark.parametrize(
    "times",
    [
        pytest.param([], id="nothing"),
        pytest.param([(config, 1.0) for config in grid()[:7]], id="too few"),
        pytest.param([(SPLIT, float(i)) for i in range(20)], id="nothing varies"),
    ],
)
def test_too_little_says_nothing(times):
    assert parameter_importance(times) == {}


def test_importance_pools_the_searches_of_an_operation(store, h200):
    for size, scale in ((64, 1.0), (128, 1000.0)):
        searched = Searched(ToyProblem(size), h200)
        trials = [timed(searched, c, scale * (1 + c["num_stages"])) for c in grid()]
        add_study(store, searched, trials)
    rows = list(importance_rows(started_weighings(load_searches([store], None), SecondProcess())))
    assert rows[0].parameter == "num_stages"
    assert (rows[0].num_searches, rows[0].num_times) == (2, 30)


def test_what_a_winner_costs_elsewhere(store, h200, b200):
    here = Searched(PROBLEM, h200)
    add_study(store, here, [timed(here, SPLIT, 10.0), timed(here, WIDE, 12.0)], [SPLIT])
    there = Searched(PROBLEM, b200, Provenance.PREDICTED)
    add_study(store, there, [timed(there, SPLIT, 6.0), timed(there, WIDE, 5.0)], [WIDE])
    rows = list(transfer_rows(load_searches([store], None), ["h200", "b200"]))
    assert [(r.from_sku, r.sku, r.cost, r.provenance, r.status) for r in rows] == [
        ("h200", "b200", 1.2, "predicted", "ok"),
        ("b200", "h200", 1.2, "measured", "ok"),
    ]
    first, _ = transfer_pair_rows(rows)
    assert (first.num_common, first.num_timed, first.geomean_cost) == (1, 1, pytest.approx(1.2))


@pytest.mark.parametrize(
    ("config", "ended", "status", "constraint", "reason"),
    [
        pytest.param(
            SPLIT, None, "not tried", None, "the search there has no trial of it", id="not tried"
        ),
        pytest.param(
            SPLIT, "compile_error", "compile_error", None, "no such instruction", id="failed there"
        ),
        pytest.param(TOO_LARGE, None, "not valid", "smem", "smem: ", id="refused by a constraint"),
        pytest.param(ODD, None, "not valid", "values", "block_n=96 is not one of", id="no value"),
    ],
)
def test_a_winner_without_a_time_elsewhere_says_why(
    store, h200, b200, config, ended, status, constraint, reason
):
    here, there = Searched(PROBLEM, h200), Searched(PROBLEM, b200)
    add_study(store, here, [timed(here, config, 10.0)], [config])
    trials = [timed(there, DEFAULT, 5.0)]
    trials += [failed(there, config, ended, "no such instruction")] if ended else []
    add_study(store, there, trials, [DEFAULT])
    row, _ = transfer_rows(load_searches([store], None), ["h200", "b200"])
    assert (row.time_us, row.cost, row.status) == (None, None, status)
    (pair,) = transfer_pair_rows([row])
    counts = (pair.num_failed, pair.num_not_valid, pair.num_not_tried)
    assert counts == (status == "compile_error", status == "not valid", status == "not tried")
    assert (pair.num_timed, pair.geomean_cost) == (0, None)
    (missing,) = transfer_missing_rows([row])
    assert (missing.status, missing.constraint, missing.num_problems) == (status, constraint, 1)
    assert missing.reasons.startswith(reason)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        pytest.param(
            ToyProblem(64, "float16"), SPLIT, "dtype='float16' is not float32", id="unsupported"
        ),
        pytest.param(PROBLEM, Config.of("cuda", {}), "unknown template", id="unknown"),
    ],
)
def test_what_no_template_serves_is_refused_as_a_whole(toy, h200, problem, config, reason):
    refused = refusal(problem, config, h200)
    assert refused is not None
    assert refused.constraint == "support"
    assert reason in refused.reason


def test_measured_where_it_was_measured_and_predicted_where_not(store, h200, b200):
    for size, measured in ((64, (SPLIT, WIDE)), (128, (SPLIT,))):
        problem = ToyProblem(size)
        here = Searched(problem, h200)
        add_study(store, here, [timed(here, c, 10.0 + c["block_n"]) for c in measured], [SPLIT])
        model = Searched(problem, h200, Provenance.PREDICTED)
        add_study(store, model, [timed(model, SPLIT, 8.0), timed(model, WIDE, 12.0)], [SPLIT])
        there = Searched(problem, b200, Provenance.PREDICTED)
        add_study(store, there, [timed(there, WIDE, 5.0), timed(there, SPLIT, 6.0)], [WIDE])
    rows = list(transfer_rows(load_searches([store], None), ["h200", "b200"]))
    back = [row for row in rows if row.sku == "h200"]
    assert [(r.provenance, r.cost) for r in back] == [
        ("measured", 138.0 / 74.0),
        ("predicted", 12.0 / 8.0),
    ]
    _, pair = transfer_pair_rows(rows)
    assert (pair.provenance, pair.num_timed) == ("measured 1, predicted 1", 2)
    assert list(transfer_missing_rows(rows)) == []
