from __future__ import annotations

import pytest
from published_data import add_baseline
from report_data import SPLIT, Searched, add_study, timed
from tilescout.tuner.prediction.roofline import roofline_us
from tilescout.tuner.records import MeasurementPolicy, Provenance
from tilescout.tuner.report.baseline_rows import (
    baseline_rows,
    library_rows,
)
from tilescout.tuner.report.baselines import load_baselines
from tilescout.tuner.report.library_summaries import library_summary_rows
from tilescout.tuner.report.rows import result_row, summary_rows
from tilescout.tuner.report.searches import load_searches, ordered_skus, with_baselines
from toy_op import ToyProblem

PROBLEM = ToyProblem(1 << 20)
EAGER = MeasurementPolicy(is_cuda_graph=False)


@pytest.fixture
def ours(store, h200):
    """One measured search: 12.5 us."""
    searched = Searched(PROBLEM, h200)
    add_study(store, searched, [timed(searched, SPLIT, 12.5)], [SPLIT])
    return store


def loaded(store):
    baselines = load_baselines([store], None)
    return baselines, with_baselines(load_searches([store], None), baselines)


def test_the_fastest_of_the_same_policy_is_the_baseline(ours, h200):
    add_baseline(ours, PROBLEM, h200, 25.0, variant="slow", provenance=Provenance.MEASURED)
    add_baseline(ours, PROBLEM, h200, 15.0, provenance=Provenance.MEASURED)
    add_baseline(ours, PROBLEM, h200, 1.0, policy=EAGER)
    add_baseline(ours, ToyProblem(64), h200, 1.0)
    _, (search,) = loaded(ours)
    row = result_row(search)
    assert (row.baseline, row.baseline_version, row.baseline_time_us) == ("rival fast", "1.2", 15.0)
    assert row.speedup_over_baseline == pytest.approx(1.2)
    assert (row.baseline_provenance, row.speedup_provenance) == ("measured", "measured")
    (summary,) = summary_rows([search], [row])
    assert (summary.num_with_baseline, summary.speedup_provenance) == (1, "measured")
    assert summary.geomean_speedup_over_baseline == pytest.approx(1.2)


def test_a_measured_baseline_comes_before_a_faster_published_one(ours, h200):
    add_baseline(ours, PROBLEM, h200, 10.0)
    _, (search,) = loaded(ours)
    row = result_row(search)
    assert row.speedup_over_baseline == pytest.approx(0.8)
    assert row.speedup_provenance == "mixed: published / measured"
    add_baseline(ours, PROBLEM, h200, 15.0, provenance=Provenance.MEASURED)
    _, (search,) = loaded(ours)
    assert result_row(search).baseline_time_us == 15.0


def test_a_baseline_of_another_policy_is_shown_and_says_so(ours, h200):
    add_baseline(ours, PROBLEM, h200, 25.0, policy=EAGER)
    baselines, searches = loaded(ours)
    assert result_row(searches[0]).baseline == "none"
    (row,) = baseline_rows(baselines, searches)
    assert row.speedup == pytest.approx(2.0)
    assert row.compared == (
        "mixed: published / measured; policies differ: eager/cold_l2 / cuda_graph/cold_l2"
    )
    assert row.share_of_roofline == pytest.approx(roofline_us(PROBLEM, h200) / 25.0)
    assert (row.date, row.source, row.policy) == (
        "2026-08-11T12:00:00Z",
        "a paper",
        "eager/cold_l2",
    )


def test_a_baseline_without_a_search_stands_alone(store, b200):
    add_baseline(store, PROBLEM, b200, 25.0)
    baselines, searches = loaded(store)
    assert searches == ()
    (row,) = baseline_rows(baselines, searches)
    assert (row.our_time_us, row.speedup, row.compared) == (None, None, "nothing of ours")


def test_baselines_beside_a_time_of_ours_come_first(ours, h200, b200):
    add_baseline(ours, ToyProblem(1), h200, 25.0)
    add_baseline(ours, PROBLEM, h200, 25.0)
    rows = baseline_rows(*loaded(ours))
    assert [row.our_time_us for row in rows] == [12.5, None]


def test_baselines_in_two_databases_count_once(ours, h200, tmp_path):
    from tilescout.tuner.store import Store

    add_baseline(ours, PROBLEM, h200, 25.0)
    with Store.open(tmp_path / "second.db") as second:
        add_baseline(second, PROBLEM, h200, 25.0)
        add_baseline(second, PROBLEM, h200, 24.0, version="1.3")
        found = load_baselines([ours, second], ["h200"])
    assert sorted(baseline.time_us for baseline in found) == [24.0, 25.0]


def test_skus_with_baselines_only_come_after_those_measured(ours, h200, b200):
    add_baseline(ours, PROBLEM, b200, 5.0)
    baselines, searches = loaded(ours)
    assert ordered_skus(searches, None, baselines) == ("h200", "b200")


def test_a_library_on_two_skus(store, h200, b200):
    for size in (64, 128):
        add_baseline(store, ToyProblem(size), h200, 20.0)
        add_baseline(store, ToyProblem(size), b200, 20.0 * 64 / size, version="1.3")
    add_baseline(store, ToyProblem(64), h200, 1.0, library="other")
    baselines, _ = loaded(store)
    rows = list(library_rows(baselines, ["h200", "b200"]))
    assert [(row.base_sku, row.sku, row.ratio) for row in rows] == [
        ("h200", "b200", 1.0),
        ("h200", "b200", 2.0),
    ]
    assert rows[0].bandwidth_ratio == pytest.approx(8000 / 4800)
    assert rows[0].ratio_provenance == "published"
    (summary,) = library_summary_rows(rows)
    assert summary.geomean_ratio == pytest.approx(2**0.5)
    assert (summary.num_problems, summary.smallest_ratio, summary.largest_ratio) == (2, 1.0, 2.0)
    assert (summary.base_library_versions, summary.library_versions) == ("1.2", "1.3")


def test_like_is_compared_with_like_and_a_mixture_is_named(store, h200, b200):
    add_baseline(store, PROBLEM, h200, 30.0, provenance=Provenance.MEASURED)
    add_baseline(store, PROBLEM, b200, 10.0)
    baselines, _ = loaded(store)
    (row,) = library_rows(baselines, ["h200", "b200"])
    assert (row.ratio, row.ratio_provenance) == (3.0, "mixed: measured / published")
    add_baseline(store, PROBLEM, h200, 20.0)
    baselines, _ = loaded(store)
    (row,) = library_rows(baselines, ["h200", "b200"])
    assert (row.ratio, row.ratio_provenance) == (2.0, "published")


def test_libraries_under_different_policies_are_not_compared(store, h200, b200):
    add_baseline(store, PROBLEM, h200, 30.0)
    add_baseline(store, PROBLEM, b200, 10.0, policy=EAGER)
    baselines, _ = loaded(store)
    assert list(library_rows(baselines, ["h200", "b200"])) == []
