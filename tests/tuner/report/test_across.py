"""SKUs and libraries in a line each, tables with a column for each SKU, libraries beside ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_data import add_baseline
from report_data import DEFAULT, SPLIT, WIDE, Searched, add_study, failed, timed
from tilescout.kernels.base import Config
from tilescout.tuner.records import BinaryFacts, MeasurementPolicy, Provenance
from tilescout.tuner.report import contests, searches
from tilescout.tuner.report.collected import collect
from toy_op import ToyProblem

SMALL_PROBLEM, LARGE_PROBLEM = ToyProblem(1 << 20), ToyProblem(1 << 24)


def rows_of(store, name, *skus):
    frame = getattr(collect([store], list(skus) or None).frames, name)
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def add(store, problem, device, trials, provenance=Provenance.MEASURED):
    searched = Searched(problem, device, provenance)
    evaluations = [timed(searched, config, time_us) for config, time_us in trials]
    add_study(store, searched, evaluations, [evaluations[0].config])


@pytest.fixture
def measured_twice(store, h200, b200):
    """Two problems, both measured on both: SPLIT wins on the H200, WIDE on the B200."""
    for problem, scale in ((SMALL_PROBLEM, 1.0), (LARGE_PROBLEM, 10.0)):
        add(store, problem, h200, [(SPLIT, 10.0 * scale), (WIDE, 12.0 * scale)])
    add(store, SMALL_PROBLEM, b200, [(WIDE, 5.0), (SPLIT, 6.0)])
    add(store, LARGE_PROBLEM, b200, [(WIDE, 80.0), (DEFAULT, 90.0)])
    return store


def test_two_skus_in_a_line(measured_twice):
    (row,) = rows_of(measured_twice, "comparison_summary", "h200", "b200")
    assert (row["base_sku"], row["sku"], row["provenance"]) == ("h200", "b200", "measured")
    assert (row["num_problems"], row["num_same_config"]) == (2, 0)
    assert row["geomean_speedup"] == pytest.approx((2.0 * 1.25) ** 0.5)
    assert (row["smallest_speedup"], row["largest_speedup"]) == (1.25, 2.0)
    assert row["bandwidth_ratio"] == pytest.approx(8000 / 4800)
    assert row["peak_ratio"] == pytest.approx(75 / 67)


def test_ratios_of_other_provenance_have_a_line_of_their_own(measured_twice, h200, b200):
    third = ToyProblem(1 << 22)
    add(measured_twice, third, h200, [(SPLIT, 10.0)])
    add(measured_twice, third, b200, [(SPLIT, 4.0)], Provenance.PREDICTED)
    rows = rows_of(measured_twice, "comparison_summary")
    found = {row["provenance"]: row["num_problems"] for row in rows}
    assert found == {"measured": 2, "mixed: measured / predicted": 1}


def test_parameters_that_changed_are_counted(measured_twice):
    rows = {row["parameter"]: row for row in rows_of(measured_twice, "parameter_changes")}
    assert set(rows) == {"block_n", "num_splits", "num_stages", "split_rule"}
    assert rows["block_n"]["changes"] == "64 -> 128 (2)"
    assert rows["num_splits"]["changes"] == "4 -> none (2)"
    assert (rows["block_n"]["num_changed"], rows["block_n"]["share_changed"]) == (2, 1.0)


def test_what_carrying_a_winner_over_costs_by_sku(measured_twice):
    first, second = rows_of(measured_twice, "transfer_matrix", "h200", "b200")
    assert (first["from_sku"], first["h200_cost"]) == ("h200", None)
    assert first["b200_cost"] == pytest.approx(6.0 / 5.0)
    assert first["b200_provenance"] == "measured, 1 of 2 problems"
    assert second["h200_cost"] == pytest.approx(1.2)
    assert second["h200_provenance"] == "measured, 2 of 2 problems"


def test_a_predicted_cost_says_so(filled):
    rows = {row["from_sku"]: row for row in rows_of(filled, "transfer_matrix")}
    assert rows["h200"]["b200_provenance"] == "predicted, 1 of 1 problems"
    assert rows["b200"]["from_provenance"] == "predicted"


def test_times_stand_side_by_side_with_their_provenance(filled, h200, b200):
    for device, time_us in ((h200, 15.0), (b200, 7.5), (b200, 7.0)):
        add_baseline(filled, SMALL_PROBLEM, device, time_us, variant=f"v{time_us > 7}")
    ours, theirs = rows_of(filled, "times")
    assert (ours["library"], ours["h200_time_us"], ours["b200_time_us"]) == ("tilescout", 12.5, 8.0)
    assert (ours["h200_provenance"], ours["b200_provenance"]) == ("measured", "predicted")
    assert (theirs["library"], theirs["h200_time_us"]) == ("rival vTrue", 15.0)
    assert (theirs["b200_time_us"], theirs["b200_provenance"]) == (7.5, "published")


def test_binaries_stand_side_by_side(store, h200, b200):
    for device, main in (
        (h200, BinaryFacts("scan", 128, 168, 16, 4096, 0, 700, "HGMMA.64x128x16")),
        (b200, BinaryFacts("scan", 128, 96, 0, 8192, 256, 500, "UTCHMMA")),
    ):
        merge = BinaryFacts("merge", 128, 32, 4, 0, 0, 50, "none")
        searched = Searched(SMALL_PROBLEM, device)
        trial = replace(timed(searched, SPLIT, 10.0), facts=(main, merge))
        add_study(store, searched, [trial], [SPLIT])
    (row,) = rows_of(store, "binary_comparison", "h200", "b200")
    assert (row["base_num_kernels"], row["num_kernels"]) == (2, 2)
    assert (row["base_registers"], row["registers"]) == (168, 96)
    assert (row["base_spill_bytes"], row["spill_bytes"]) == (20, 4)
    assert (row["base_smem_bytes"], row["smem_bytes"]) == (4096, 8192)
    assert (row["base_tmem_columns"], row["tmem_columns"]) == (0, 256)
    assert (row["base_mma_kind"], row["mma_kind"]) == ("HGMMA.64x128x16", "UTCHMMA")
    assert (row["base_num_instructions"], row["num_instructions"]) == (750, 550)


def test_a_library_against_ours_in_a_line_for_each_kind_of_comparison(filled, h200):
    for problem, time_us in ((SMALL_PROBLEM, 15.0), (LARGE_PROBLEM, 180.0)):
        add_baseline(filled, problem, h200, time_us, provenance=Provenance.MEASURED)
    add_baseline(filled, SMALL_PROBLEM, h200, 25.0, policy=MeasurementPolicy(is_cold_l2=False))
    add_baseline(filled, ToyProblem(64), h200, 1.0)
    rows = {row["compared"]: row for row in rows_of(filled, "baselines_summary")}
    alike = rows.pop("measured")
    assert (alike["library"], alike["num_problems"], alike["num_faster"]) == ("rival fast", 2, 1)
    assert (alike["smallest_speedup"], alike["largest_speedup"]) == (0.9, 1.2)
    assert alike["geomean_speedup"] == pytest.approx((1.2 * 0.9) ** 0.5)
    ((compared, other),) = rows.items()
    assert "mixed: published / measured; policies differ: cuda_graph/warm_l2" in compared
    assert other["num_problems"] == 1


def test_libraries_measured_beside_our_winner_are_baselines(filled, h200, monkeypatch):
    for module in (searches, contests):
        monkeypatch.setattr(module, "is_library", lambda op, name: name == "rival")
    searched = Searched(SMALL_PROBLEM, h200)
    key = replace(
        searched.key, template_hashes=(("rival", "1.2"), ("triton", "toy-1")), space_fingerprint="c"
    )
    study = filled.study(key, seed=1)
    rival = Config.of("rival", {"variant": "fast"})
    trials = [timed(searched, SPLIT, 12.6), timed(searched, rival, 10.0)]
    lost = failed(searched, Config.of("rival", {"variant": "other"}), "crashed", "signal 11")
    filled.add_trials(study.study_id, [*trials, lost])
    filled.decide(study.study_id, trials[::-1])
    shown = {row["problem"]: row for row in rows_of(filled, "results", "h200")}
    result = shown[str(SMALL_PROBLEM)]
    assert (result["time_us"], result["default_time_us"]) == (12.5, 20.0)
    assert (result["baseline"], result["baseline_time_us"]) == ("rival", 10.0)
    assert (result["speedup_over_baseline"], result["speedup_provenance"]) == (0.8, "measured")
    (row,) = rows_of(filled, "baselines", "h200")
    assert row["source"] == "measured beside ours by tilescout tune"
    states = {row["study_digest"]: row["is_shown"] for row in rows_of(filled, "searches", "h200")}
    assert states[key.digest] is False
