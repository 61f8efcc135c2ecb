from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from report_data import DEFAULT, SPLIT, WIDE, Searched, add_study, failed, timed
from tilescout.errors import UnknownNameError, UsageError
from tilescout.tuner.records import Provenance, Toolchain
from tilescout.tuner.report.changes import Changes, Selection, compare_results
from tilescout.tuner.store import Store
from toy_op import ToyProblem

PROBLEM = ToyProblem(4096)


@pytest.fixture
def after(toy, tmp_path):
    with Store.open(tmp_path / "after.db") as opened:
        yield opened


def add(store, device, times, *, provenance=Provenance.MEASURED, problem=PROBLEM, failures=()):
    """A study whose first config wins; ``times`` are (config, us)."""
    searched = Searched(problem, device, provenance)
    trials = [timed(searched, config, time_us) for config, time_us in times]
    trials += [failed(searched, config, status, "why") for config, status in failures]
    return add_study(store, searched, trials, [config for config, _ in times[:1]])


@pytest.mark.parametrize(
    ("time_us", "verdict"),
    [
        pytest.param(10.05, "within noise", id="intervals overlap"),
        pytest.param(11.0, "slower", id="above"),
        pytest.param(9.0, "faster", id="below"),
    ],
)
def test_a_measured_time_changed_where_the_intervals_are_apart(
    store, after, h200, time_us, verdict
):
    add(store, h200, [(SPLIT, 10.0)])
    add(after, h200, [(SPLIT, time_us)])
    (row,) = compare_results(store, after).rows
    assert row.verdict == verdict
    assert row.change_percent == pytest.approx(10 * time_us - 100)
    assert row.same_config_percent == row.change_percent
    assert row.winner == "same config"


def test_a_prediction_has_no_noise(store, after, h200):
    add(store, h200, [(SPLIT, 10.0)], provenance=Provenance.PREDICTED)
    add(after, h200, [(SPLIT, 10.05)], provenance=Provenance.PREDICTED)
    assert compare_results(store, after).rows[0].verdict == "slower"


def test_a_measurement_without_samples_settles_nothing(store, after, h200):
    searched = Searched(PROBLEM, h200)
    for where, time_us in ((store, 10.0), (after, 20.0)):
        trial = timed(searched, SPLIT, time_us)
        assert trial.timing is not None
        bare = replace(trial, timing=replace(trial.timing, num_samples=0))
        add_study(where, searched, [bare], [SPLIT])
    changes = compare_results(store, after)
    assert changes.rows[0].verdict == "noise unknown"
    assert changes.failures(5) == ()


def test_another_winner_and_the_old_one_timed_again(store, after, h200):
    add(store, h200, [(SPLIT, 10.0), (WIDE, 12.0)])
    add(after, h200, [(WIDE, 9.0), (SPLIT, 15.0)])
    (row,) = compare_results(store, after).rows
    assert row.verdict == "faster"
    assert row.same_config_percent == pytest.approx(50.0)
    assert "block_n 64 -> 128" in row.winner


def test_configs_that_stopped_working_are_named(store, after, h200):
    add(store, h200, [(SPLIT, 10.0), (WIDE, 12.0)], failures=[(DEFAULT, "timeout")])
    add(
        after,
        h200,
        [(WIDE, 10.0)],
        failures=[(SPLIT, "compile_error"), (DEFAULT, "compile_error")],
    )
    changes = compare_results(store, after)
    (stopped,) = changes.stopped
    assert (stopped.config, stopped.was_winner) == (str(SPLIT), True)
    assert (stopped.status, stopped.reason) == ("compile_error", "why")
    assert changes.rows[0].num_stopped == 1


def test_what_is_lost_or_new(store, after, h200, b200):
    lost, found, gone, new = (ToyProblem(size) for size in (1, 2, 3, 4))
    add(store, h200, [(SPLIT, 10.0)], problem=lost)
    add(after, h200, [], problem=lost, failures=[(SPLIT, "crashed")])
    add(store, h200, [], problem=found, failures=[(SPLIT, "crashed")])
    add(after, h200, [(SPLIT, 10.0)], problem=found)
    add(store, h200, [(SPLIT, 10.0)], problem=gone)
    add(after, h200, [(SPLIT, 10.0)], problem=new)
    changes = compare_results(store, after)
    assert {row.problem.split()[0]: row.verdict for row in changes.rows} == {
        "size=1": "no longer works",
        "size=2": "works now",
        "size=3": "only before",
        "size=4": "only after",
    }
    assert [row.verdict for row in changes.failures(1000)] == ["no longer works"]


@pytest.mark.parametrize(("percent", "num_failures"), [(9.0, 1), (11.0, 0)])
def test_a_guard_refuses_what_is_slower_by_more(store, after, h200, percent, num_failures):
    add(store, h200, [(SPLIT, 10.0)])
    add(after, h200, [(SPLIT, 11.0)])
    assert len(compare_results(store, after).failures(percent)) == num_failures


def test_two_compilers_in_one_database(store, h200):
    for version, time_us in (("3.7.1", 10.0), ("3.9.0", 8.0)):
        searched = replace(Searched(PROBLEM, h200), toolchain=Toolchain(triton=version))
        add_study(store, searched, [timed(searched, SPLIT, time_us)], [SPLIT])
    (row,) = compare_results(
        store,
        store,
        base_selection=Selection.parse(["triton=3.7.1"]),
        selection=Selection.parse(["triton=3.9.0"]),
    ).rows
    assert (row.verdict, row.base_versions, row.versions) == (
        "faster",
        "triton 3.7.1",
        "triton 3.9.0",
    )


def test_dates_select(store, h200):
    add(store, h200, [(SPLIT, 10.0)])
    today = datetime.now(UTC).date()
    late = Selection.parse([f"since={today + timedelta(days=2)}"])
    early = Selection.parse([f"until={today - timedelta(days=2)}"])
    both = Selection.parse([f"since={today - timedelta(days=2)}", "until=2999-01-01"])
    assert len(compare_results(store, store, base_selection=both, selection=both).rows) == 1
    for selection in (late, early):
        with pytest.raises(UsageError, match="nothing to compare"):
            compare_results(store, store, selection=selection)


@pytest.mark.parametrize("text", ["triton", "ptxas=1", "since=yesterday", "driver="])
def test_wrong_conditions(text):
    with pytest.raises(UsageError, match=r"is no (condition|date)"):
        Selection.parse([text])


def test_nothing_in_common(store, after, h200, b200):
    add(store, h200, [(SPLIT, 10.0)])
    add(after, b200, [(SPLIT, 10.0)])
    with pytest.raises(UsageError, match=r"\(1 results\) and .* \(1 results\) have no problem"):
        compare_results(store, after)
    with pytest.raises(UnknownNameError, match="'h900'"):
        compare_results(store, after, gpus=["h900"])


def test_counts_and_what_is_told_first(store, after, h200):
    same, other, lost, slower = (ToyProblem(size) for size in (1, 2, 3, 4))
    for problem in (same, other, lost, slower):
        add(store, h200, [(SPLIT, 10.0), (WIDE, 10.1)], problem=problem)
    add(after, h200, [(SPLIT, 10.0), (WIDE, 10.1)], problem=same)
    add(after, h200, [(WIDE, 10.0), (SPLIT, 10.1)], problem=other)
    add(after, h200, [], problem=lost, failures=[(SPLIT, "compile_error"), (WIDE, "crashed")])
    add(after, h200, [(SPLIT, 20.0), (WIDE, 30.0)], problem=slower)
    changes = compare_results(store, after)
    assert changes.counts == {
        "no longer works": 1,
        "slower": 1,
        "within noise": 2,
        "another winner": 1,
        "configs that stopped working": 2,
    }
    assert [row.name for row in changes.telling] == ["size=3", "size=4", "size=2"]
    assert Changes((), ()).telling == ()
