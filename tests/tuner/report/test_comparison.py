from __future__ import annotations

import pytest
from report_data import POLICY, SPLIT, WIDE, Searched, add_study, timed
from tilescout.kernels.base import Config
from tilescout.tuner.prediction.roofline import roofline_us
from tilescout.tuner.records import MeasurementPolicy, Provenance
from tilescout.tuner.report.comparison import comparison_rows
from tilescout.tuner.report.searches import load_searches
from tilescout.tuner.report.wording import changed_parameters
from toy_op import ToyProblem

PROBLEM = ToyProblem(1 << 20)


def add(store, device, time_us, provenance=Provenance.MEASURED, policy=POLICY):
    searched = Searched(PROBLEM, device, provenance, policy)
    add_study(store, searched, [timed(searched, SPLIT, time_us)], [SPLIT])


def compared(store, *skus):
    return list(comparison_rows(load_searches([store], None), skus))


def test_a_predicted_time_against_a_measured_one_is_called_mixed(filled, h200, b200):
    (row,) = compared(filled, "h200", "b200")
    assert (row.base_sku, row.base_time_us, row.base_provenance) == ("h200", 12.5, "measured")
    assert (row.sku, row.time_us, row.provenance) == ("b200", 8.0, "predicted")
    assert row.speedup_provenance == "mixed: measured / predicted"
    assert row.speedup == pytest.approx(12.5 / 8.0)
    assert row.bandwidth_ratio == pytest.approx(8000 / 4800)
    assert row.speedup_over_bandwidth_ratio == pytest.approx(12.5 / 8.0 / (8000 / 4800))
    assert row.peak_ratio == pytest.approx(75 / 67)
    rooflines = [roofline_us(PROBLEM, device) for device in (h200, b200)]
    assert row.roofline_ratio == pytest.approx(rooflines[0] / rooflines[1])
    assert row.share_of_roofline == pytest.approx(rooflines[1] / 8.0)
    assert row.changed_parameters == (
        "block_n 64 -> 128, num_splits 4 -> none, num_stages 3 -> 2, split_rule fixed -> none"
    )
    assert "driver" in row.base_versions
    assert "driver" not in row.versions


def test_the_first_sku_named_is_the_base(filled):
    (row,) = compared(filled, "b200", "h200")
    assert (row.base_sku, row.sku) == ("b200", "h200")
    assert row.speedup == pytest.approx(8.0 / 12.5)


def test_like_is_compared_with_like_where_there_is_one(store, h200, b200):
    add(store, h200, 10.0)
    add(store, h200, 11.0, Provenance.PREDICTED)
    add(store, b200, 5.0, Provenance.PREDICTED)
    (row,) = compared(store, "h200", "b200")
    assert (row.base_time_us, row.speedup_provenance) == (11.0, "predicted")
    assert row.speedup == pytest.approx(2.2)


def test_without_a_like_the_measured_base_counts(store, h200, b200):
    add(store, h200, 11.0, Provenance.PREDICTED)
    add(store, b200, 10.0)
    add(store, b200, 9.0, Provenance.PUBLISHED)
    row = next(r for r in compared(store, "b200", "h200"))
    assert (row.base_time_us, row.base_provenance) == (10.0, "measured")


def test_policies_are_not_compared_with_each_other(store, h200, b200):
    add(store, h200, 10.0)
    add(store, b200, 5.0, policy=MeasurementPolicy(is_cold_l2=False))
    assert compared(store, "h200", "b200") == []


def test_a_search_without_a_time_is_not_compared(store, h200, b200):
    add(store, h200, 10.0)
    add_study(store, Searched(PROBLEM, b200), [])
    assert compared(store, "h200", "b200") == []


def test_changed_parameters_names_the_template_and_says_when_nothing_changed():
    other = Config.of("tilelang", {"block_n": 64})
    assert changed_parameters(Config.of("triton", {"block_n": 64}), other) == (
        "template triton -> tilelang"
    )
    assert changed_parameters(WIDE, WIDE) == "same config"
