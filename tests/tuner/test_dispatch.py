"""Each tier is reached, in order, by databases made for it; the answer says where it comes from."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tilescout.errors import NoWinnerError, UnsupportedError, UsageError
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.search_spaces.registry import joint_space
from tilescout.search_spaces.space import JointSpace
from tilescout.tuner import catalog, dispatch
from tilescout.tuner import snapshot as snapshot_module
from tilescout.tuner.dispatch import Snapshot
from tilescout.tuner.records import MeasurementPolicy, Provenance, Toolchain
from toy_op import ToyProblem
from winner_databases import MadeUpWinner, sibling_of, write_winners

pytestmark = pytest.mark.usefixtures("toy")


def config(block_n: int, num_stages: int = 2) -> Config:
    return Config.of("triton", {"block_n": block_n, "num_stages": num_stages, "split_rule": "none"})


DEFAULT = config(16, 1)


@pytest.fixture(autouse=True)
def _fresh_snapshots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    monkeypatch.setattr(snapshot_module, "current_toolchain", lambda: Toolchain(triton="3.9.0"))
    dispatch.refresh()


class Databases:
    """Writes made-up winners into ``a.db`` of a test and looks problems up in it."""

    def __init__(self, folder: Path, device: DeviceSpec) -> None:
        self.path, self.device = folder / "a.db", device

    def add(self, size: int, block_n: int, *, device: DeviceSpec | None = None, **facts) -> int:
        path = facts.pop("path", self.path)
        made_up = MadeUpWinner(ToyProblem(size), device or self.device, config(block_n), **facts)
        return write_winners(path, [made_up])[0]

    def lookup(self, size: int, **options):
        return Snapshot.load([self.path]).lookup(ToyProblem(size), self.device, **options)

    def explain(self, size: int, **options):
        return Snapshot.load([self.path]).explain(ToyProblem(size), self.device, **options)


@pytest.fixture
def database(tmp_path: Path, h200: DeviceSpec) -> Databases:
    return Databases(tmp_path, h200)


def test_exact_beats_every_other_tier(database: Databases) -> None:
    database.add(1024, 32, provenance=Provenance.PREDICTED)
    database.add(2048, 64)
    trial_id = database.add(1024, 128)
    result = database.lookup(1024)
    assert (result.tier, result.provenance, result.distance) == ("exact", "measured", 0.0)
    assert (result.config, result.template) == (config(128), "triton")
    assert (result.op, result.gpu, result.problem) == ("toy", "h200", ToyProblem(1024))
    assert (result.trial_id, result.database) == (trial_id, str(database.path))
    assert result.notes == ()


def test_nearest_takes_the_fewest_doublings_and_says_what_it_was_tuned_for(
    database: Databases,
) -> None:
    database.add(4096, 32)
    nearest = database.add(512, 64)
    result = database.lookup(1024)
    assert (result.tier, result.distance, result.trial_id) == ("nearest", 1.0, nearest)
    assert result.notes == ("tuned for size=512",)


@pytest.mark.parametrize(("size", "tier"), [(4096, "nearest"), (4097, "default")])
def test_nearest_ends_at_a_factor_of_four(database: Databases, size: int, tier: str) -> None:
    database.add(size, 64)
    assert database.lookup(1024).tier == tier


def test_static_fields_must_match_exactly(database: Databases, h200: DeviceSpec) -> None:
    other = MadeUpWinner(ToyProblem(1024, dtype="float64"), h200, config(64))
    write_winners(database.path, [other])
    assert database.lookup(1024).tier == "default"


def test_sibling_is_another_sku_of_the_same_compute_capability(
    database: Databases, h200: DeviceSpec
) -> None:
    trial_id = database.add(1024, 64, device=sibling_of(h200, "h20"))
    database.add(1024, 128, device=replace(h200, sku="b200", compute_capability=(10, 0)))
    database.add(1024, 32, provenance=Provenance.PREDICTED)
    result = database.lookup(1024)
    assert (result.tier, result.provenance, result.trial_id) == ("sibling", "measured", trial_id)
    assert result.gpu == "h200"
    assert result.notes == ("tuned for SKU h20",)


def test_predicted_prefers_this_sku_to_a_nearer_problem_of_a_sibling(
    database: Databases, h200: DeviceSpec
) -> None:
    sibling = sibling_of(h200, "h20")
    database.add(1024, 64, device=sibling, provenance=Provenance.PREDICTED)
    assert database.lookup(1024).config == config(64)
    database.add(2048, 128, provenance=Provenance.PREDICTED)
    result = database.lookup(1024)
    assert (result.tier, result.provenance, result.distance) == ("predicted", "predicted", 1.0)
    assert result.config == config(128)


def test_default_is_what_an_empty_database_gives(database: Databases) -> None:
    write_winners(database.path, [])
    result = database.lookup(1024)
    assert (result.tier, result.provenance) == ("default", "default")
    assert (result.config, result.distance, result.trial_id) == (DEFAULT, None, None)


@pytest.mark.parametrize(
    ("change", "tier"),
    [
        ({"memory_bytes": 137 * 10**9, "sku": "h200-nvl"}, "exact"),
        ({"memory_bytes": 80 * 10**9}, "sibling"),
        ({"num_sms": 114}, "sibling"),
        ({"compute_capability": (10, 0)}, "default"),
    ],
    ids=["memory within 5%", "less memory", "fewer SMs", "other capability"],
)
def test_a_sku_is_what_performs_alike(
    database: Databases, h200: DeviceSpec, change: dict, tier: str
) -> None:
    database.add(1024, 64, device=replace(h200, **change))
    assert database.lookup(1024).tier == tier


def test_a_config_that_is_invalid_for_this_problem_is_passed_over(
    database: Databases, h200: DeviceSpec
) -> None:
    too_big = MadeUpWinner(ToyProblem(2048), h200, config(256, 4))
    (passed_over,) = write_winners(database.path, [too_big])
    used = database.add(4096, 64)
    explanation = database.explain(1024)
    assert explanation.result.trial_id == used
    (refusal,) = explanation.steps[-1].refused
    assert refusal.winner.trial_id == passed_over
    assert "too much shared memory" in refusal.reason


def test_winners_of_another_measurement_policy_are_left_alone(database: Databases) -> None:
    eager = MeasurementPolicy(is_cuda_graph=False)
    database.add(1024, 64, policy=eager)
    assert database.lookup(1024).tier == "default"
    assert database.lookup(1024, measurement=eager).config == config(64)
    assert database.explain(1024).other_policy == 1


def test_a_later_database_overlays_an_earlier_one(
    tmp_path: Path, database: Databases, h200: DeviceSpec
) -> None:
    for name, block_n in (("shipped.db", 32), ("b.db", 64), ("c.db", 128)):
        database.add(1024, block_n, path=tmp_path / name)
    problem = ToyProblem(1024)
    assert dispatch.lookup(problem, gpu=h200).config == config(32)
    explicit = [tmp_path / "b.db", tmp_path / "c.db"]
    assert dispatch.lookup(problem, gpu=h200, databases=explicit).config == config(128)
    assert dispatch.lookup(problem, gpu=h200, databases=explicit[::-1]).config == config(64)


def test_the_users_database_overlays_the_shipped_one(
    tmp_path: Path, database: Databases, h200: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILESCOUT_DB", str(tmp_path / "user.db"))
    database.add(1024, 32, path=tmp_path / "shipped.db")
    database.add(2048, 32, path=tmp_path / "shipped.db")
    database.add(1024, 64, path=tmp_path / "user.db")
    assert dispatch.lookup(ToyProblem(1024), gpu=h200).config == config(64)
    assert dispatch.lookup(ToyProblem(2048), gpu=h200).tier == "exact"


def test_the_newest_decision_of_a_database_serves(database: Databases) -> None:
    database.add(1024, 32, toolchain=Toolchain(triton="3.9.0", torch="2.12.0"))
    newest = database.add(1024, 64, toolchain=Toolchain(triton="3.9.0"))
    assert database.lookup(1024).trial_id == newest


def test_strict_refuses_all_but_an_exact_measured_winner(database: Databases) -> None:
    database.add(2048, 64)
    database.add(1024, 64, provenance=Provenance.PREDICTED)
    with pytest.raises(NoWinnerError, match=r"size=1024 .* on h200.*`tilescout tune .*--gpu h200"):
        database.lookup(1024, policy="strict")
    trial_id = database.add(1024, 128)
    assert database.lookup(1024, policy="strict").trial_id == trial_id


def test_another_toolchain_is_said_and_strict_refuses_it(database: Databases) -> None:
    old = Toolchain(triton="3.7.1", tilelang="0.1.0", torch="2.13.0")
    trial_id = database.add(1024, 64, toolchain=old)
    result = database.lookup(1024)
    assert result.tier == "exact"
    assert result.notes == ("found with another toolchain: triton 3.7.1 (now 3.9.0)",)
    with pytest.raises(NoWinnerError, match=r"triton 3\.7\.1 \(now 3\.9\.0\)"):
        database.lookup(1024, policy="strict")
    allowed = database.lookup(1024, policy="strict", allow_other_toolchain=True)
    assert allowed.trial_id == trial_id


def test_an_older_winner_with_this_toolchain_satisfies_strict(database: Databases) -> None:
    same = database.add(1024, 32, toolchain=Toolchain(triton="3.9.0+git1"))
    database.add(1024, 64, toolchain=Toolchain(triton="3.7.1"))
    assert database.lookup(1024, policy="strict").trial_id == same


def test_unknown_policy_is_refused(database: Databases) -> None:
    write_winners(database.path, [])
    with pytest.raises(UsageError, match="'loose' is not one of nearest, strict"):
        database.lookup(1024, policy="loose")


def test_answers_are_kept_and_misses_logged_and_counted_once(
    database: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    database.add(1024, 64)
    snapshot = Snapshot.load([database.path])
    with caplog.at_level(logging.WARNING):
        exact = snapshot.lookup(ToyProblem(1024), database.device)
        assert not caplog.records
        first = snapshot.lookup(ToyProblem(2048), database.device)
        assert snapshot.lookup(ToyProblem(2048), database.device) is first
        snapshot.explain(ToyProblem(512), database.device)
    assert snapshot.lookup(ToyProblem(1024), database.device) is exact
    (record,) = caplog.records
    message = record.getMessage()
    assert "toy size=2048 dtype=float32 on h200: tier nearest serves" in message
    assert snapshot.misses == (first,)


def test_threads_get_one_answer(database: Databases, caplog: pytest.LogCaptureFixture) -> None:
    database.add(1024, 64)
    snapshot = Snapshot.load([database.path])
    found = []
    barrier = threading.Barrier(8)

    def look_up() -> None:
        barrier.wait()
        found.append(snapshot.lookup(ToyProblem(2048), database.device))

    threads = [threading.Thread(target=look_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(result) for result in found}) == 1
    assert len(caplog.records) == 1


def test_refresh_reads_the_databases_again(
    database: Databases, h200: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILESCOUT_DB", str(database.path))
    problem = ToyProblem(1024)
    assert dispatch.lookup(problem, gpu=h200).tier == "default"
    database.add(1024, 64)
    assert dispatch.lookup(problem, gpu=h200).tier == "default"
    dispatch.refresh()
    assert dispatch.lookup(problem, gpu=h200).tier == "exact"


def test_gpu_may_be_a_name(database: Databases) -> None:
    database.add(1024, 64, device=catalog.gpu("h200"))
    result = dispatch.lookup(ToyProblem(1024), gpu="H200", databases=[database.path])
    assert (result.gpu, result.tier) == ("h200", "exact")


def test_explain_shows_the_whole_walk(database: Databases, h200: DeviceSpec) -> None:
    database.add(1024, 32, provenance=Provenance.PREDICTED)
    database.add(65536, 32)
    database.add(1024, 64, source_hash="older")
    rows = {row["tier"]: row for row in database.explain(1024).tier_rows()}
    assert [row["outcome"] for row in rows.values()] == [
        *["nothing"] * 3,
        "served",
        "not tried",
    ]
    assert rows["exact"]["detail"] == "no measured winner of this problem on h200"
    assert "(1 farther away)" in rows["nearest"]["detail"]
    assert "compute capability 9.0" in rows["sibling"]["detail"]
    assert rows["predicted"]["detail"] == "trial 1, 12.5 us predicted on h200"
    explanation = database.explain(1024)
    (read,) = explanation.database_rows()
    assert (read["winners"], read["of_this_op"], read["role"]) == (3, 3, "explicit")
    (skipped,) = explanation.skipped_rows()
    assert "changed since" in skipped["reason"]


def test_explain_of_strict_says_what_lookup_would_have_raised(database: Databases) -> None:
    database.add(2048, 64)
    explanation = database.explain(1024, policy="strict")
    assert explanation.result is None
    with pytest.raises(NoWinnerError) as raised:
        database.lookup(1024, policy="strict")
    assert explanation.failure == str(raised.value)
    assert [row["outcome"] for row in explanation.tier_rows()] == ["nothing", *["not tried"] * 4]


def test_dispatch_imports_no_heavy_library() -> None:
    code = (
        "import sys; import tilescout; tilescout.lookup; import tilescout.tuner.dispatch; "
        "heavy = {'optuna', 'sqlalchemy', 'alembic', 'pandas', 'torch', 'rich', 'typer'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_template_that_is_left_out_neither_wins_nor_defaults(
    database: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.add(1024, 32)
    assert database.lookup(1024).tier == "exact"
    with pytest.raises(UnsupportedError, match="no template of toy is left for size=1024"):
        database.lookup(1024, without={"triton"})
    part = joint_space(ToyProblem(1024), database.device).spaces[0]
    other = replace(
        part, template="other", default=Config.of("other", part.default.as_dict()), seeds=()
    )
    monkeypatch.setattr(snapshot_module, "joint_space", lambda *_: JointSpace((part, other)))
    snapshot = Snapshot.load([database.path])
    found = snapshot.lookup(ToyProblem(1024), database.device, without={"triton"})
    assert (found.tier, found.template) == ("default", "other")
    assert snapshot.lookup(ToyProblem(1024), database.device).tier == "exact"
