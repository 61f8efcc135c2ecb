"""Recordings of three formats become spaces; what is broken is named with file and field."""

from __future__ import annotations

import copy
import gzip
import json

import pytest
from recordings import BEST, kernel_tuner_cache, t4_results, write_json
from tilescout.errors import UsageError
from tilescout.kernels.base import Config
from tilescout.tuner.records import TrialStatus
from tilescout.tuner.replay.reading import read_recorded
from tilescout.tuner.store import Store
from toy_study import search_toy


@pytest.mark.parametrize("make", [kernel_tuner_cache, t4_results], ids=["kernel-tuner", "t4"])
def test_valid_set_times_and_failures_are_the_recorded_ones(make, tmp_path):
    (space,) = read_recorded(write_json(tmp_path / "space.json", make()))
    assert space.space.count() == len(space.evaluations) == 50
    assert set(space.space) == set(space.evaluations)
    best = Config.of("recorded", BEST)
    assert space.optimum_us == space.evaluations[best].time_us == 1000.0
    assert space.evaluations[best].timing.samples_us == pytest.approx((990.0, 1000.0, 1010.0))
    broken = space.evaluations[best.replace(a=16, b=5)]
    assert (broken.status, broken.time_us) == (TrialStatus.COMPILE_ERROR, None)
    assert space.num_failed == 2
    assert space.space.check(best.replace(a=32)) is not None


@pytest.mark.parametrize("make", [kernel_tuner_cache, t4_results], ids=["kernel-tuner", "t4"])
def test_numbers_with_more_than_two_values_are_ordered(make, tmp_path):
    (space,) = read_recorded(write_json(tmp_path / "space.json", make()))
    (part,) = space.space.spaces
    assert {p.name: p.is_ordered for p in part.parameters} == {"a": True, "b": True, "mode": False}
    centre = Config.of("recorded", {"a": 4, "b": 2, "mode": 0})
    steps = [{"a": 2}, {"a": 8}, {"b": 1}, {"b": 3}, {"mode": 1}]
    assert set(part.neighbours(centre)) == {centre.replace(**step) for step in steps}


def test_gzip_is_read(tmp_path):
    path = tmp_path / "space.json.gz"
    path.write_bytes(gzip.compress(json.dumps(kernel_tuner_cache()).encode()))
    assert read_recorded(path)[0].optimum_us == 1000.0


def test_every_study_of_an_export_is_a_space(tmp_path, toy, h200):
    from tilescout.tuner.store.transfer import export_json

    with Store.open(tmp_path / "trials.db") as store:
        for size in (64, 128):
            search_toy(store, h200, size=size, num_trials=30)
        data = export_json(store)
    path = write_json(tmp_path / "export.json", data)
    spaces = read_recorded(path)
    assert [space.label for space in spaces] == [
        f"{path}#1: toy h200 size=64 dtype=float32",
        f"{path}#2: toy h200 size=128 dtype=float32",
    ]
    for space in spaces:
        assert space.space.count() == 30
        assert space.optimum_us == min(map(toy.toy_time_us, space.evaluations))
        # Configs without num_splits are there beside those that have it.
        assert {len(config.values) for config in space.evaluations} == {3, 4}


def broken_cache(**changes) -> dict:
    data = kernel_tuner_cache()
    data["cache"]["1,1,0"] |= changes
    return data


BROKEN = {
    "time-text": (broken_cache(time="slow"), ".cache.1,1,0.time='slow' must be"),
    "time-negative": (broken_cache(time=-1.0), ".cache.1,1,0.time=-1.0 must be"),
    "value-unknown": (broken_cache(a=3), ".cache.1,1,0.a=3 must be one of 1, 2, 4"),
    "samples": (broken_cache(times=["x"]), ".cache.1,1,0.times="),
    "no-names": ({"cache": {}}, "lacks the field 'tune_params_keys'"),
    "objective": ({**kernel_tuner_cache(), "objective": "GFLOP/s"}, ".objective='GFLOP/s'"),
    "empty": ({**kernel_tuner_cache(), "cache": {}}, ".cache is empty"),
    "repeated-value": (
        {**kernel_tuner_cache(), "tune_params": {"a": [1, 1], "b": [1], "mode": [0]}},
        ".tune_params.a=[1, 1] must be",
    ),
    "not-ours": ({"rows": []}, "has none of the fields 'cache'"),
    "a-list": ([1], "has none of the fields"),
    "t4-empty": ({"results": []}, ".results has no valid config"),
    "t4-invalidity": (
        {"results": [{**t4_results()["results"][0], "invalidity": "odd"}]},
        ".results[0].invalidity='odd' must be one of",
    ),
    "t4-no-time": (
        {"results": [{**t4_results()["results"][0], "measurements": []}]},
        ".results[0].measurements=[] must be a list with one named time",
    ),
    "export-empty": ({"trials": []}, ".trials is empty"),
    "export-field": ({"trials": [{"op": "toy"}]}, ".trials[0] lacks the field 'gpu'"),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_file_is_named_with_its_field(data, message, tmp_path):
    path = write_json(tmp_path / "broken.json", copy.deepcopy(data))
    with pytest.raises(UsageError) as caught:
        read_recorded(path)
    assert str(caught.value).startswith(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"{", b"\x1f\x8b broken", gzip.compress(b'{"cache": {}}')[:-6], b"\xff\xfe\x00"],
    ids=["cut-json", "bad-gzip", "cut-gzip", "no-text"],
)
def test_damaged_file_is_named(content, tmp_path):
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"damaged\.json"):
        read_recorded(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.json cannot be read"):
        read_recorded(tmp_path / "nowhere.json")


def test_config_recorded_twice_is_refused(tmp_path):
    data = t4_results()
    data["results"].append(data["results"][0])
    with pytest.raises(UsageError, match="recorded twice"):
        read_recorded(write_json(tmp_path / "twice.json", data))


def test_recording_of_failures_only_is_refused(tmp_path):
    data = kernel_tuner_cache()
    for record in data["cache"].values():
        record["time"] = "RuntimeFailedConfig"
    with pytest.raises(UsageError, match="none of the 50 recorded configs has a time"):
        read_recorded(write_json(tmp_path / "failed.json", data))
