"""A lock pins what look-ups give: sorted, reviewed, the same on every rank; or it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tilescout
from tilescout.errors import DeviceError, NoWinnerError, StoreError, UsageError
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import dispatch, locked_snapshot, locking
from tilescout.tuner import snapshot as snapshot_module
from tilescout.tuner.lock_file import read_lock
from tilescout.tuner.records import Provenance, Toolchain
from toy_op import ToyProblem
from winner_databases import MadeUpWinner, sibling_of, write_winners

pytestmark = pytest.mark.usefixtures("toy")

HERE = Toolchain(triton="3.9.0", torch="2.13.0+cpu", driver="580")
WORKLOAD = """
name = "four"
description = "Problems of four tiers."
source = "made up"

[[problems]]
op = "toy"
label = "{size}"
size = [1000000, 4096, 2048, 1024]
"""


def config(block_n: int) -> Config:
    return Config.of("triton", {"block_n": block_n, "num_stages": 2, "split_rule": "none"})


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    for module in (snapshot_module, locked_snapshot, locking):
        monkeypatch.setattr(module, "current_toolchain", lambda: HERE)
    dispatch.refresh()
    yield
    dispatch.use_lock(None)
    monkeypatch.undo()
    dispatch.refresh()


@pytest.fixture
def database(tmp_path: Path, h200: DeviceSpec) -> Path:
    """1024 is measured here, 2048 within reach of it; 4096 within reach, 1,000,000 unknown."""
    path = tmp_path / "a.db"
    versions = {"toolchain": HERE}
    write_winners(path, [MadeUpWinner(ToyProblem(1024), h200, config(64), **versions)])
    return path


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "four.toml"
    path.write_text(WORKLOAD)
    return path


@pytest.fixture
def lock(tmp_path: Path, database: Path, workload: Path, h200: DeviceSpec) -> Path:
    path = tmp_path / "tilescout.lock.json"
    locking.write_lock(str(workload), path, gpu=h200, databases=[database])
    return path


def test_a_lock_is_sorted_and_equal_for_equal_answers(
    lock: Path, database: Path, workload: Path, h200: DeviceSpec, tmp_path: Path
) -> None:
    again = tmp_path / "again.json"
    written = locking.write_lock(str(workload), again, gpu=h200, databases=[database])
    assert again.read_text() == lock.read_text()
    assert written.lock_id == read_lock(lock).lock_id
    document = json.loads(lock.read_text())
    tiers = {w["problem"]["size"]: w["tier"] for w in document["winners"]}
    assert tiers == {1024: "exact", 2048: "nearest", 4096: "nearest", 1_000_000: "default"}
    keys = [(w["op"], json.dumps(w["problem"], sort_keys=True)) for w in document["winners"]]
    assert keys == sorted(keys)
    assert document["gpu"]["sku"] == "h200"
    assert "driver" not in document["toolchain"]


def test_in_force_it_answers_alone_and_does_not_move(
    lock: Path, database: Path, h200: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {
        s: dispatch.current_snapshot([database]).lookup(ToyProblem(s), h200) for s in (1024, 2048)
    }
    lock_id = tilescout.use_lock(lock)
    monkeypatch.setenv("TILESCOUT_DB", str(database))
    # A better winner appears on this rank only.
    write_winners(database, [MadeUpWinner(ToyProblem(2048), h200, config(128), time_us=1.0)])
    dispatch.refresh()
    for size, expected in before.items():
        found = tilescout.lookup(ToyProblem(size), gpu=h200)
        assert (found.config, found.tier) == (expected.config, expected.tier)
        assert found.notes == (f"pinned by lock {lock_id}",)
        assert found.database == str(lock)
    # A problem that is not in the lock is answered from the lock too.
    other = tilescout.lookup(ToyProblem(2000), gpu=h200)
    assert (other.tier, other.config) == ("nearest", config(64))
    assert f"not pinned by lock {lock_id}" in other.notes
    tilescout.use_lock(None)
    assert tilescout.lookup(ToyProblem(2048), gpu=h200).config == config(128)


def test_the_variable_puts_it_in_force(
    lock: Path, h200: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILESCOUT_LOCK", str(lock))
    dispatch._chosen_lock = None
    dispatch.refresh()
    assert tilescout.lookup(ToyProblem(1024), gpu=h200).notes[0].startswith("pinned by lock")
    with pytest.raises(UsageError, match="is in force and answers alone"):
        tilescout.lookup(ToyProblem(1024), gpu=h200, databases=[lock])


def test_strict_takes_what_was_measured_only(lock: Path, h200: DeviceSpec) -> None:
    tilescout.use_lock(lock)
    assert tilescout.lookup(ToyProblem(1024), gpu=h200, policy="strict").tier == "exact"
    with pytest.raises(NoWinnerError, match=r"pins one of tier nearest; tune with"):
        tilescout.lookup(ToyProblem(2048), gpu=h200, policy="strict")
    explanation = dispatch.explain(ToyProblem(2048), gpu=h200, policy="strict")
    assert "pins one of tier nearest" in explanation.failure
    with pytest.raises(NoWinnerError):
        tilescout.lookup(ToyProblem(77), gpu=h200, policy="strict")


def test_a_strict_lock_pins_nothing_else(
    database: Path, workload: Path, h200: DeviceSpec, tmp_path: Path
) -> None:
    with pytest.raises(NoWinnerError, match="size=1000000"):
        locking.write_lock(
            str(workload), tmp_path / "x.json", gpu=h200, databases=[database], policy="strict"
        )
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("change", [{"num_sms": 114}, {"compute_capability": (10, 0)}])
def test_another_gpu_is_refused_whatever_the_policy(
    lock: Path, h200: DeviceSpec, change: dict
) -> None:
    tilescout.use_lock(lock)
    other = replace(h200, sku="other", **change)
    with pytest.raises(DeviceError, match=r"is for h200 .* this is other .*write a lock"):
        tilescout.lookup(ToyProblem(1024), gpu=other)


def test_other_versions_are_refused_unless_allowed(
    lock: Path, h200: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changed, refused in (
        (replace(HERE, triton="3.10.0"), True),
        (replace(HERE, driver=""), False),
    ):
        monkeypatch.setattr(locked_snapshot, "current_toolchain", lambda now=changed: now)
        if refused:
            with pytest.raises(StoreError, match=r"written with triton 3\.9\.0 \(now 3\.10\.0\)"):
                tilescout.use_lock(lock)
        tilescout.use_lock(lock, allow_other_toolchain=True)
        assert tilescout.lookup(ToyProblem(1024), gpu=h200).config == config(64)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: "{", "malformed JSON"),
        (lambda d: d | {"format": "other"}, "is no lock"),
        (lambda d: d | {"version": 9}, "has version 9, this Tilescout reads 1"),
        (lambda d: {k: v for k, v in d.items() if k != "gpu"}, "damaged .*gpu"),
        (lambda d: d | {"winners": [d["winners"][0] | {"template_hash": "x"}]}, "changed since"),
        (lambda d: d | {"winners": [d["winners"][0] | {"template": "cuda"}]}, "unknown template"),
        (lambda d: d | {"winners": [d["winners"][0] | {"problem": {"size": -1}}]}, "size=-1"),
        (lambda d: d | {"winners": [d["winners"][0] | {"tier": "best"}]}, "damaged .*best"),
    ],
)
def test_a_lock_that_cannot_be_kept_is_loud(lock: Path, damage, reason: str) -> None:
    document = damage(json.loads(lock.read_text()))
    lock.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(StoreError, match=reason):
        tilescout.use_lock(lock)
    with pytest.raises(StoreError, match="cannot be read"):
        tilescout.use_lock(lock.parent / "missing.json")


def test_a_pinned_config_that_is_not_valid_is_loud(lock: Path, h200: DeviceSpec) -> None:
    document = json.loads(lock.read_text())
    for winner in document["winners"]:
        winner["config"]["block_n"] = 3
    lock.write_text(json.dumps(document))
    tilescout.use_lock(lock)
    with pytest.raises(StoreError, match=r"pins a config of toy .*block_n=3 is not one of"):
        tilescout.lookup(ToyProblem(1024), gpu=h200)


def test_a_predicted_winner_and_a_siblings_keep_their_tier(
    tmp_path: Path, workload: Path, h200: DeviceSpec
) -> None:
    database = tmp_path / "b.db"
    write_winners(
        database,
        [
            MadeUpWinner(ToyProblem(1024), sibling_of(h200, "h20"), config(64)),
            MadeUpWinner(ToyProblem(1_000_000), h200, config(128), Provenance.PREDICTED),
        ],
    )
    lock = tmp_path / "b.json"
    locking.write_lock(str(workload), lock, gpu=h200, databases=[database])
    tilescout.use_lock(lock)
    assert tilescout.lookup(ToyProblem(1024), gpu=h200).tier == "sibling"
    found = tilescout.lookup(ToyProblem(1_000_000), gpu=h200)
    assert (found.tier, found.provenance) == ("predicted", "predicted")


def test_the_command_writes_it(
    database: Path, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilescout.tuner import cli

    out = tmp_path / "cli.json"
    words = [str(workload), "--gpu", "h200", "--db", str(database), "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["lock", *words, "--format", "json"])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["lock_id"] == read_lock(out).lock_id
    assert printed["num_winners"] == sum(printed["tiers"].values()) == 4
    with pytest.raises(SystemExit) as ended:
        cli.main(["lock", *words[:-1], str(tmp_path / "no" / "folder.json")])
    assert ended.value.code == 1
    assert "cannot be written" in capsys.readouterr().err
