"""The suites of the paged-decode benchmark: every target can be judged, and is judged rightly."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def suites(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module("paged_decode_suites")


@pytest.fixture
def benchmark_script(suites):
    return import_module("paged_decode")


def rows_of(suites, suite: str, *, ours: float, best: float) -> dict:
    us = {"tilescout": ours, "default": 99.0, "flashinfer:fa2": 2 * best, "flashinfer:xqa": best}
    return {
        cell.label: {"us": us if cell.has_baselines else {"tilescout": ours, "default": 99.0}}
        for cell in suites.SUITES[suite]
    }


def test_labels_differ_and_targets_name_cells_that_exist(suites) -> None:
    for suite, cells in suites.SUITES.items():
        labels = [cell.label for cell in cells]
        assert len(set(labels)) == len(labels)
        assert any(target.suite == suite for target in suites.TARGETS), suite
    for target in suites.TARGETS:
        labels = [cell.label for cell in suites.SUITES[target.suite]]
        assert {*target.cells, *target.against} <= set(labels)
        assert not target.against or len(target.against) == len(target.cells)


def test_the_grid_is_the_workload_whose_winners_ship(suites) -> None:
    from tilescout.tuner.catalog import workload

    shipped = {entry.problem for entry in workload("paged_decode_grid").problems}
    assert {cell.problem for cell in suites.SUITES["grid"]} == shipped


def test_every_cell_is_in_a_workload(suites) -> None:
    from tilescout.tuner.catalog import workload

    names = ("paged_decode_grid", "paged_decode_suites", "paged_decode_nvfp4")
    tuned = {entry.problem for name in names for entry in workload(name).problems}
    for cells in suites.SUITES.values():
        assert {cell.problem for cell in cells} <= tuned


def test_ratios_are_to_the_best_baseline_or_to_our_own_time(suites, benchmark_script) -> None:
    rows = rows_of(suites, "grid", ours=10.0, best=11.0)
    rows["1x8192"]["us"] = {"tilescout": 10.0, "default": 99.0, "flashinfer:xqa": 9.5}
    judged = {j["words"]: j for j in benchmark_script.judge_targets("grid", rows)}
    assert judged["worst cell"]["reached"] == pytest.approx(0.95)
    assert not judged["worst cell"]["is_met"]
    assert judged["16x8192"]["reached"] == pytest.approx(1.1)
    assert judged["16x8192"]["is_met"]
    assert judged["geometric mean"]["reached"] == pytest.approx((1.1**11 * 0.95) ** (1 / 12))

    rows = rows_of(suites, "window", ours=10.0, best=11.0)
    rows["64x32768"]["us"] = {**rows["64x32768"]["us"], "tilescout": 12.0}
    judged = {j["words"]: j for j in benchmark_script.judge_targets("window", rows)}
    (own,) = (j for words, j in judged.items() if "without a window" in words)
    assert own["reached"] == pytest.approx(1.2)
    assert own["is_upper"]
    assert not own["is_met"]

    rows = rows_of(suites, "fp8", ours=10.0, best=11.0)
    rows["bf16 64x8192"]["us"] = {"tilescout": 18.0, "default": 99.0}
    (fp8,) = benchmark_script.judge_targets("fp8", rows)
    assert fp8["reached"] == pytest.approx(1.8)
    assert fp8["is_met"]


@pytest.mark.parametrize("missing", ["a cell", "every baseline"])
def test_what_was_not_measured_is_not_reached(suites, benchmark_script, missing) -> None:
    rows = rows_of(suites, "uniform", ours=10.0, best=11.0)
    if missing == "a cell":
        del rows["64x16384"]
    else:
        rows["64x16384"]["us"] = {"tilescout": 10.0, "default": 99.0}
    (judged,) = benchmark_script.judge_targets("uniform", rows)
    assert judged["reached"] is None
    assert not judged["is_met"]


def test_a_wrong_problem_is_told_without_a_traceback() -> None:
    ended = subprocess.run(
        [sys.executable, FOLDER / "paged_decode.py", "--problem", "batch=1,kv_len=0"],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "kv_len=0" in ended.stderr
    assert "Traceback" not in ended.stderr
