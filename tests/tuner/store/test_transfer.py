"""JSON export and import: everything is in it, nothing half is taken, twice is once."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import store_cases as cases
from tilescout.errors import UsageError
from tilescout.tuner.records import SCHEMA_VERSION, MeasurementPolicy, Provenance, TrialStatus
from tilescout.tuner.store import ImportSummary, Store, export_json, import_json

pytestmark = pytest.mark.usefixtures("toy")


def fill(store: Store) -> None:
    """Three studies: measured, warm, predicted for another SKU; two of them decided."""
    one = store.study(cases.study_key(1), seed=11).study_id
    rubbish = replace(
        cases.failed(20, TrialStatus.INCORRECT), max_abs_error=math.nan, relative_rms_error=math.inf
    )
    failures = [cases.failed(index, status) for index, status in enumerate(TrialStatus, 30)][1:]
    store.add_trials(one, [*(cases.measured(i) for i in range(4)), rubbish, *failures])
    store.decide(one, [cases.measured(2, 9.0), cases.measured(0, 9.5)])
    two = store.study(
        cases.study_key(policy=MeasurementPolicy(is_cuda_graph=False, is_cold_l2=False)), seed=0
    ).study_id
    store.add_trial(two, cases.measured(0, template="tilelang"))
    b200 = replace(cases.DEVICE, sku="b200", compute_capability=(10, 0), aliases=(), sources={})
    three = store.study(cases.study_key(device=b200, provenance=Provenance.PREDICTED), seed=-5)
    store.add_trial(three.study_id, cases.predicted(7, 3.0))
    store.decide(three.study_id, [cases.predicted(7, 3.0)])


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "filled.db") as store:
        fill(store)
        yield store


@pytest.fixture
def empty() -> Iterator[Store]:
    with Store.open("sqlite://") as store:
        yield store


def through_text(data: object) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))


def without_ids(data: dict[str, Any]) -> dict[str, Any]:
    """The export with ids replaced by the places of their rows."""
    places = {row["trial_id"]: place for place, row in enumerate(data["trials"])}
    data = copy.deepcopy(data)
    for row in [*data["trials"], *data["winners"]]:
        row["trial_id"] = places[row["trial_id"]]
    for winner in data["winners"]:
        winner["finals"] = [places[trial_id] for trial_id in winner["finals"]]
    return data


def test_export_has_the_words_of_lookup(filled: Store) -> None:
    data = export_json(filled)
    assert list(data) == ["schema", "trials", "winners"]
    assert data["schema"] == SCHEMA_VERSION
    for winner in data["winners"]:
        assert {"op", "gpu", "problem", "config", "template", "provenance", "trial_id"} <= set(
            winner
        )
    winner = data["winners"][0]
    assert winner["problem"] == {"size": 1, "dtype": "float32"}
    assert winner["config"] == {"block_n": 2, "split_rule": "none", "is_wide": True}
    assert (winner["op"], winner["gpu"], winner["template"]) == ("toy", "h200", "triton")
    assert (winner["provenance"], winner["policy"]) == ("measured", "cuda_graph/cold_l2")
    assert (winner["time_us"], winner["trial_id"], winner["finals"]) == (9.0, 3, [3, 1])
    assert [w["provenance"] for w in data["winners"]] == ["measured", "predicted"]


def test_export_is_everything_in_readable_form(filled: Store) -> None:
    data = through_text(export_json(filled))
    first = data["trials"][2]
    assert first["status"] == "ok"
    assert len(first["timing"]["samples_us"]) == first["timing"]["num_samples"] == 40
    assert first["facts"][0]["instruction_mix"] == {"mma": 64, "load_global": 12, "store": 4}
    assert first["toolchain"]["torch"] == "2.13.0"
    assert first["device"]["num_sms"] == 132
    assert "samples_us" not in data["trials"][1]["timing"]
    assert (data["trials"][4]["max_abs_error"], data["trials"][4]["relative_rms_error"]) == (
        "nan",
        "inf",
    )
    assert {row["status"] for row in data["trials"]} == {status.value for status in TrialStatus}


def test_export_survives_import_apart_from_ids(filled: Store, empty: Store) -> None:
    data = through_text(export_json(filled))
    other = empty.study(cases.study_key(99), seed=0).study_id
    empty.add_trials(other, [cases.measured(i) for i in range(50, 60)])
    assert import_json(empty, data) == ImportSummary(3, len(data["trials"]), 2)
    again = through_text(export_json(empty))
    again["trials"] = again["trials"][10:]
    assert again["trials"][0]["trial_id"] != data["trials"][0]["trial_id"]
    assert without_ids(again) == without_ids(data)


def test_import_gives_back_equal_records(filled: Store, empty: Store) -> None:
    import_json(empty, through_text(export_json(filled)))
    for original, imported in zip(filled.studies(), empty.studies(), strict=True):
        device = replace(original.key.device, aliases=(), sources={})
        assert imported.key == replace(original.key, device=device)
        assert imported.seed == original.seed
        pairs = zip(filled.trials(original.study_id), empty.trials(imported.study_id), strict=True)
        for old, new in pairs:
            if old.evaluation.status is TrialStatus.INCORRECT and old.number == 4:
                assert math.isnan(new.evaluation.max_abs_error or 0)
                assert new.evaluation.relative_rms_error == math.inf
            else:
                assert new.evaluation == old.evaluation
            assert (new.number, new.created_at) == (old.number, old.created_at)


def test_importing_again_changes_nothing(filled: Store, empty: Store) -> None:
    data = export_json(filled)
    import_json(empty, data)
    before = export_json(empty)
    assert import_json(empty, data) == ImportSummary(0, 0, 0)
    assert import_json(filled, data) == ImportSummary(0, 0, 0)
    assert export_json(empty) == before
    assert export_json(filled) == data


def test_import_merges_and_the_newer_decision_stands(filled: Store, empty: Store) -> None:
    import_json(empty, export_json(filled))
    study_id = empty.studies()[0].study_id
    extra = empty.add_trial(study_id, cases.measured(500))
    older = export_json(filled)
    empty.decide(study_id, [cases.measured(500, 4.0), cases.measured(2, 9.9)])
    decided = empty.winners()
    assert import_json(empty, older) == ImportSummary(0, 0, 0)
    assert empty.winners() == decided
    assert import_json(filled, export_json(empty)) == ImportSummary(0, 1, 1)
    winner = next(w for w in filled.winners() if w.study.key.problem.as_dict()["size"] == 1)
    assert winner.trial.evaluation.config == extra.evaluation.config
    assert winner.trial.evaluation.time_us == 4.0
    assert len(winner.finals) == 2
    assert winner.decided_at == decided[-1].decided_at or winner.decided_at in {
        w.decided_at for w in decided
    }


def test_numbers_that_are_taken_continue(filled: Store, empty: Store) -> None:
    study_id = empty.study(cases.study_key(1), seed=0).study_id
    empty.add_trials(study_id, [cases.measured(600), cases.measured(601)])
    import_json(empty, export_json(filled, skus=["h200"]))
    trials = empty.trials(study_id)
    assert sorted(trial.number for trial in trials) == list(range(len(trials)))
    assert trials[0].evaluation.config == cases.config(600)


def test_export_filters(filled: Store) -> None:
    assert {row["gpu"] for row in export_json(filled, skus=["b200"])["trials"]} == {"b200"}
    assert len(export_json(filled, skus=["b200"])["winners"]) == 1
    assert export_json(filled, op="other") == {
        "schema": SCHEMA_VERSION,
        "trials": [],
        "winners": [],
    }


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=99), "export.schema=99 is newer than"),
        (lambda d: d.update(schema="1"), "export.schema='1' must be an integer of at least 1"),
        (lambda d: d.pop("winners"), "export lacks the field 'winners'"),
        (lambda d: d.update(extra=1), "export has an unknown field 'extra': known are schema,"),
        (lambda d: d.update(trials={}), "export.trials={} must be a list"),
        (lambda d: d["trials"].insert(0, 5), "trials[0]=5 must be an object"),
        (lambda d: d["trials"][1].pop("status"), "trials[1] lacks the field 'status'"),
        (lambda d: d["trials"][1].update(statu=1), "trials[1] has an unknown field 'statu'"),
        (lambda d: d["trials"][1].update(op="x"), "trials[1].op='x' must be one of"),
        (lambda d: d["trials"][1].update(gpu="h100"), "trials[1].gpu='h100' must be 'h200'"),
        (lambda d: d["trials"][1].update(status="good"), "trials[1].status='good' must be one of"),
        (lambda d: d["trials"][1].update(policy="x"), "trials[1].policy='x' must be one of cuda_"),
        (lambda d: d["trials"][1].update(number=-1), "trials[1].number=-1 must be an integer of"),
        (lambda d: d["trials"][1].update(number=True), "trials[1].number=True must be an integer"),
        (lambda d: d["trials"][1].update(number=2**70), "must be an integer of at least 0"),
        (lambda d: d["trials"][1].update(compile_s=None), "compile_s=None must be a number from 0"),
        (lambda d: d["trials"][1].update(compile_s=10**400), "must be a number from 0 to 1e+09"),
        (lambda d: d["trials"][1].update(max_abs_error="big"), "max_abs_error='big' must be a num"),
        (lambda d: d["trials"][1].update(template="cuda"), "template='cuda' must be one of templ"),
        (lambda d: d["trials"][1].update(timing=None), "trials[1].time_us=10.143 must"),
        (lambda d: d["trials"][1].update(timing=None, time_us=None), "timing=None must be an obj"),
        (
            lambda d: d["trials"][1].update(time_us=math.nan),
            "time_us=nan must be a number from 0 to 1e+12",
        ),
        (lambda d: d["trials"][1].update(created_at="now"), "created_at='now' must be a time with"),
        (
            lambda d: d["trials"][1].update(created_at="2026-01-31T12:00:00"),
            "created_at='2026-01-31T12:00:00' must be a time with its zone",
        ),
        (
            lambda d: d["trials"][1]["timing"].update(p10_us="fast"),
            "trials[1].timing.p10_us='fast' must be a number from 0",
        ),
        (
            lambda d: d["trials"][2]["timing"]["samples_us"].append("x"),
            "trials[2].timing.samples_us=[",
        ),
        (
            lambda d: d["trials"][2]["timing"]["samples_us"].append(1.0),
            "trials[2].timing.num_samples=40 must be 41",
        ),
        (
            lambda d: d["trials"][1]["facts"][1].update(registers=-1),
            "trials[1].facts[1].registers=-1 must be an integer of at least 0",
        ),
        (
            lambda d: d["trials"][1]["config"].update(block_n=0.5),
            "trials[1].config.block_n=0.5 must be an integer, true, false or text",
        ),
        (
            lambda d: d["trials"][1]["problem"].update(size=0),
            "trials[1].problem: size=0 of a toy problem must be at least 1",
        ),
        (
            lambda d: d["trials"][1]["problem"].update(shape=0),
            "trials[1].problem: unknown field of a toy problem 'shape'",
        ),
        (
            lambda d: d["trials"][1]["device"].update(num_sms=0),
            "trials[1].device.num_sms=0 must be an integer of at least 1",
        ),
        (
            lambda d: d["trials"][1]["device"].update(bandwidth_gbps=0),
            "trials[1].device.bandwidth_gbps=0 must be a finite number above 0",
        ),
        (
            lambda d: d["trials"][1]["device"]["peak_tflops"].update(bfloat16=-1.5),
            "trials[1].device.peak_tflops.bfloat16=-1.5 must be a finite number above 0",
        ),
        (
            lambda d: d["trials"][1]["toolchain"].pop("torch"),
            "trials[1].toolchain lacks the field 'torch'",
        ),
        (
            lambda d: d["trials"][1].update(trial_id=d["trials"][0]["trial_id"]),
            "trials[1].trial_id=1 is there already, in trials[0]",
        ),
        (
            lambda d: d["trials"][1].update(config=d["trials"][0]["config"]),
            "is there already, in trials[0]",
        ),
        (lambda d: d["trials"][1].update(number=0), "trials[1].number=0 is there already"),
        (lambda d: d["winners"][1].update(trial_id=777), "winners[1].trial_id=777 must be the"),
        (
            lambda d: d["winners"][0].update(time_us=1.0),
            "winners[0].time_us=1.0 must be 9.0, as",
        ),
        (lambda d: d["winners"][0].update(gpu="b200"), "winners[0].gpu='b200' must be 'h200', as"),
        (lambda d: d["winners"][0].update(finals=[]), "winners[0].finals=[] must be a list that"),
        (lambda d: d["winners"][0].update(finals=[1, 3]), "must be a list that begins with the"),
        (lambda d: d["winners"][0].update(finals=[3, 3]), "must be different trial_ids"),
        (lambda d: d["winners"][0].update(finals=[3, 1, 999]), "must be different trial_ids of"),
        (lambda d: d["winners"].append(d["winners"][0]), "winners[2] decides the same study as wi"),
        (lambda d: d["trials"][2].update(status="pruned"), "winners[0].trial_id=3 must be a trial"),
    ],
)
def test_a_bad_file_is_refused_whole(
    filled: Store, empty: Store, change: Change, message: str
) -> None:
    data = json.loads(json.dumps(export_json(filled)))
    change(data)
    with pytest.raises(UsageError, match=re.escape(message)):
        import_json(empty, data)
    assert empty.studies() == []
    assert empty.winners() == []


def test_something_else_is_refused(empty: Store) -> None:
    with pytest.raises(UsageError, match=r"export=\[1, 2\] must be an object"):
        import_json(empty, [1, 2])


def test_a_failing_import_leaves_nothing(
    filled: Store, empty: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilescout.tuner.store.writing import Writer

    def fail(*_: object) -> None:
        raise RuntimeError("the disk is gone")

    data = export_json(filled)
    monkeypatch.setattr(Writer, "winner", fail)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        import_json(empty, data)
    assert export_json(empty)["trials"] == []
