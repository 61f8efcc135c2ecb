"""What each command prints, as people, programs and exit codes see it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tilescout.errors import StoreError
from tilescout.tuner import catalog, cli, dispatch
from tilescout.tuner.records import Provenance
from tilescout.tuner.store import Store
from toy_op import ToyProblem, toy_space
from winner_databases import MadeUpWinner, write_winners

pytestmark = pytest.mark.usefixtures("toy")

LOOKUP_KEYS = ["op", "gpu", "problem", "config", "template", "tier", "provenance", "distance"]
LOOKUP_KEYS.append("trial_id")
WORKLOAD = """
name = "two_sizes"
description = "Two sizes of the toy operation."
source = "made up"

[[problems]]
op = "toy"
label = "size {size}"
size = [1024, 4096]
dtype = "float32"
"""


class CommandLine:
    """Runs commands in this process; remembers what the last one printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.code, self.out, self.err = 0, "", ""

    def __call__(self, *arguments: object, code: int = 0) -> str:
        dispatch.refresh()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        self.code = ended.value.code
        self.out, self.err = self._capsys.readouterr()
        assert self.code == code, f"{self.out}\n{self.err}"
        assert "Traceback" not in self.out + self.err
        return self.out

    def json(self, *arguments: object) -> object:
        return json.loads(self(*arguments, "--format", "json"))

    def rows(self, *arguments: object) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self(*arguments, "--format", "csv"))))


@pytest.fixture
def tilescout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> CommandLine:
    monkeypatch.setenv("TILESCOUT_DB", str(tmp_path / "user.db"))
    for module in ("dispatch", "paths"):
        monkeypatch.setattr(
            f"tilescout.tuner.{module}.shipped_database_path", lambda: tmp_path / "shipped.db"
        )
    yield CommandLine(capsys)
    dispatch.refresh()


@pytest.fixture
def h200():
    return catalog.gpu("h200")


@pytest.fixture
def winner(tmp_path: Path, h200) -> MadeUpWinner:
    """A measured winner of size 1024 on an H200, in the user's database."""
    config = toy_space(None, None).default.replace(block_n=64)
    made_up = MadeUpWinner(ToyProblem(1024), h200, config)
    write_winners(tmp_path / "user.db", [made_up])
    return made_up


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "two_sizes.toml"
    path.write_text(WORKLOAD, encoding="utf-8")
    return path


def test_lookup_prints_one_object_with_exactly_these_keys(tilescout, winner) -> None:
    found = tilescout.json("lookup", "toy", "--gpu", "h200", "size=1024")
    assert list(found) == LOOKUP_KEYS
    assert found == {
        "op": "toy",
        "gpu": "h200",
        "problem": {"size": 1024, "dtype": "float32"},
        "config": winner.config.as_dict(),
        "template": "triton",
        "tier": "exact",
        "provenance": "measured",
        "distance": 0.0,
        "trial_id": 1,
    }
    assert tilescout.err == ""


def test_lookup_as_table_and_csv(tilescout, winner) -> None:
    table = tilescout("lookup", "toy", "size=2048", "dtype=float32", "--gpu", "H200")
    lines = dict(line.split(None, 1) for line in table.splitlines())
    assert lines["tier"] == "nearest"
    assert lines["config"] == "block_n=64 num_stages=1 split_rule=none"
    assert lines["notes"] == "tuned for size=1024"
    (row,) = tilescout.rows("lookup", "toy", "size=2048", "--gpu", "h200")
    assert list(row) == LOOKUP_KEYS
    assert (row["distance"], json.loads(row["config"])) == ("1.0", winner.config.as_dict())


def test_lookup_reads_a_named_database_over_the_others(tilescout, winner, tmp_path, h200) -> None:
    other = winner.config.replace(block_n=128)
    write_winners(tmp_path / "b.db", [MadeUpWinner(ToyProblem(1024), h200, other)])
    arguments = ("lookup", "toy", "--gpu", "h200", "size=1024")
    assert tilescout.json(*arguments)["config"]["block_n"] == 64
    assert tilescout.json(*arguments, "--db", tmp_path / "b.db")["config"]["block_n"] == 128


def test_strict_finds_or_fails(tilescout, winner) -> None:
    arguments = ("lookup", "toy", "--gpu", "h200", "--policy", "strict")
    assert "exact" in tilescout(*arguments, "size=1024")
    assert tilescout(*arguments, "size=2048", code=1) == ""
    assert re.search(r"size=2048 .* on h200: .*`tilescout tune .* --gpu h200", tilescout.err)


def test_explain_shows_tiers_databases_and_bad_rows(tilescout, winner, tmp_path, h200) -> None:
    bad = MadeUpWinner(ToyProblem(1024), h200, winner.config, source_hash="older")
    write_winners(tmp_path / "user.db", [bad])
    text = tilescout("explain", "toy", "--gpu", "h200", "size=2048")
    assert re.search(r"^exact +nothing +no measured winner of this problem on h200", text, re.M)
    assert re.search(
        r"^nearest +served +trial 1, 12.5 us measured on h200 for size=1024", text, re.M
    )
    assert re.search(r"^default +not tried", text, re.M)
    assert re.search(r"user\.db +user +yes +2 +2$", text, re.M)
    assert re.search(r"user\.db +2 +template toy/triton has changed since", text, re.M)
    found = tilescout.json("explain", "toy", "--gpu", "h200", "size=2048")
    assert found["result"]["tier"] == "nearest"
    assert [row["tier"] for row in found["tiers"]] == [
        *("exact", "nearest", "sibling", "predicted", "default")
    ]
    assert found["skipped"][0]["trial_id"] == 2
    rows = tilescout.rows("explain", "toy", "--gpu", "h200", "size=2048")
    assert [row["outcome"] for row in rows].count("served") == 1


def test_explain_of_a_strict_failure_is_an_answer(tilescout, winner) -> None:
    text = tilescout("explain", "toy", "--gpu", "h200", "size=2048", "--policy", "strict")
    assert "policy strict found no winner" in text
    assert "not allowed under policy strict" in text


def test_spaces_counts_what_each_constraint_refuses(tilescout, h200) -> None:
    found = tilescout.json("spaces", "toy", "--gpu", "h200", "size=64", "dtype=float32")
    (template,) = found["templates"]
    space = toy_space(ToyProblem(64), h200)
    assert template["valid_size"] == space.count()
    assert template["product_size"] == space.product_size()
    assert template["constraints"] == [{"constraint": "smem", "refuses": space.refusals()["smem"]}]
    assert template["parameters"][3] == {
        "parameter": "num_splits",
        "kind": "ordered",
        "values": [2, 4, 8],
        "condition": "split_rule is fixed",
    }
    assert [c["first"] for c in template["first_configs"]] == ["default", "seed"]
    table = tilescout("spaces", "toy", "--gpu", "h200", "size=64")
    assert re.search(r"^triton +split_rule +nominal +none, fixed +-$", table, re.M)
    rows = tilescout.rows("spaces", "toy", "--gpu", "h200", "size=64", "dtype=float32")
    assert rows[0] == {
        "template": "triton",
        "parameter": "block_n",
        "kind": "ordered",
        "values": "[16,32,64,128,256]",
        "condition": "",
    }


def test_spaces_takes_missing_keys_from_the_first_workload_problem(tilescout) -> None:
    found = tilescout.json("spaces", "paged_decode", "--gpu", "b200", "kv_len=77")
    first = catalog.first_problem("paged_decode").as_dict()
    assert found["problem"] == {**first, "kv_len": 77}
    assert found["gpu"] == "b200"


def test_a_field_that_follows_another_goes_with_it(tilescout) -> None:
    wide = ("head_dim=256", "num_kv_heads=1", "dtype=float16")
    found = tilescout.json("spaces", "paged_decode", "--gpu", "b200", *wide)["problem"]
    assert (found["head_dim_v"], found["kv_dtype"]) == (256, "float16")
    latent = tilescout.json("spaces", "paged_decode", "--gpu", "b200", *wide, "head_dim_v=128")
    assert latent["problem"]["head_dim_v"] == 128
    tilescout("spaces", "paged_decode", "--gpu", "b200", "window_left=-5", code=2)
    assert "window_left=-5 of a paged_decode problem must be -1 (none) or a" in tilescout.err


def test_env_says_why_there_is_no_gpu(tilescout) -> None:
    found = tilescout.json("env")
    assert {"gpu", "driver", "triton", "torch", "python", "tilescout"} <= set(found)
    assert found["gpu"] or found["reason"]


def tune(tilescout, workload: Path, *options: object, code: int = 0) -> str:
    return tilescout("tune", workload, "--mode", "predict", "--trials", 3, *options, code=code)


def test_tune_prints_what_it_found_and_keeps_it(tilescout, workload, tmp_path) -> None:
    table = tune(tilescout, workload, "--gpu", "h200,b200")
    heading, _, *lines = table.splitlines()
    assert heading.split() == [
        *("problem", "sku", "template", "config", "time_us", "speedup", "share_of_roofline"),
        *("provenance", "trial_id", "trials"),
    ]
    assert [line.split()[:3] for line in lines] == [
        ["size", size, sku] for sku in ("h200", "b200") for size in ("1024", "4096")
    ]
    assert all(" predicted " in line and "ok=3" in line for line in lines)
    assert "size 1024 on h200: 3 trials" in tilescout.err
    with Store.open(tmp_path / "user.db", read_only=True) as store:
        winners = store.winners()
    assert len(winners) == 4
    assert {winner.study.key.provenance for winner in winners} == {Provenance.PREDICTED}
    found = tilescout.json("lookup", "toy", "--gpu", "h200", "size=1024")
    assert (found["tier"], found["provenance"]) == ("predicted", "predicted")


def test_tune_again_runs_nothing_twice_and_quiet_says_nothing(
    tilescout, workload, tmp_path
) -> None:
    db = tmp_path / "other.db"
    first = tune(tilescout, workload, "--gpu", "h200", "--db", db, "--quiet")
    assert tilescout.err == ""
    assert tune(tilescout, workload, "--gpu", "h200", "--db", db) == first
    assert "3 of them from an earlier run" in tilescout.err
    assert not (tmp_path / "user.db").exists()
    with Store.open(db, read_only=True) as store:
        assert [study.num_trials for study in store.studies()] == [3, 3]


def test_dry_run_says_size_and_time_and_writes_nothing(tilescout, workload, tmp_path) -> None:
    arguments = ("tune", workload, "--gpu", "h200", "--mode", "predict", "--dry-run")
    rows = tilescout.rows(*arguments)
    size = toy_space(None, None).count()
    assert [(row["problem"], row["space_size"]) for row in rows] == [
        ('{"dtype":"float32","size":1024}', str(size)),
        ('{"dtype":"float32","size":4096}', str(size)),
    ]
    assert all(float(row["expected_s"]) > 0 for row in rows)
    assert not (tmp_path / "user.db").exists()
    assert "expected_s" in tilescout(*arguments)


def test_export_and_import_carry_everything(tilescout, winner, tmp_path) -> None:
    data = json.loads(tilescout("export"))
    assert set(data) == {"schema", "trials", "winners"}
    found = tilescout.json("lookup", "toy", "--gpu", "h200", "size=1024")
    (exported,) = data["winners"]
    shared = set(LOOKUP_KEYS) - {"tier", "distance"}
    assert {key: exported[key] for key in shared} == {key: found[key] for key in shared}
    file = tmp_path / "winners.json"
    assert tilescout("export", file, "--db", tmp_path / "user.db") == ""
    assert json.loads(file.read_text()) == data
    copy = tmp_path / "copy.db"
    added = {"studies": 1, "trials": 1, "winners": 1}
    assert tilescout.json("import", file, "--db", copy) == added
    assert tilescout.json("import", file, "--db", copy) == dict.fromkeys(added, 0)
    assert json.loads(tilescout("export", "--db", copy)) == data


def test_export_merges_the_users_database_over_the_shipped_one(
    tilescout, winner, tmp_path, h200
) -> None:
    shipped = [
        MadeUpWinner(problem, h200, winner.config)
        for problem in (ToyProblem(2048), ToyProblem(4096))
    ]
    write_winners(tmp_path / "shipped.db", shipped)
    data = json.loads(tilescout("export"))
    assert [row["problem"]["size"] for row in data["winners"]] == [1024, 2048, 4096]
    assert len({row["trial_id"] for row in data["trials"]}) == 3


def test_export_filters_by_operation_and_sku(tilescout, winner, tmp_path) -> None:
    on_b200 = MadeUpWinner(ToyProblem(1024), catalog.gpu("b200"), winner.config)
    write_winners(tmp_path / "user.db", [on_b200])
    assert len(json.loads(tilescout("export"))["winners"]) == 2
    (row,) = json.loads(tilescout("export", "--gpu", "B200"))["winners"]
    assert row["gpu"] == "b200"
    assert json.loads(tilescout("export", "--op", "paged_decode"))["winners"] == []


def test_report_prints_where_it_is(tilescout, winner, tmp_path) -> None:
    found = tilescout.json("report", "--out", tmp_path / "out", "--gpu", "h200")
    assert found["index"] == str(tmp_path / "out" / "index.html")
    assert "h200" in Path(found["index"]).read_text(encoding="utf-8").lower()
    assert all(Path(path).is_file() for path in (*found["tables"], *found["plots"]))
    copy = tmp_path / "copy.db"
    copy.write_bytes((tmp_path / "user.db").read_bytes())
    databases = ("--db", copy, "--db", tmp_path / "user.db")
    assert tilescout.json("report", "--out", tmp_path / "two", *databases)["tables"]


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tilescout", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_loses_nothing(tmp_path) -> None:
    db = tmp_path / "a.db"
    arguments = ("tune", "--gpu", "h200", "--mode", "predict", "--trials", 40, "--db", db)
    process = start(*arguments)
    deadline = time.monotonic() + 120
    num_trials = 0
    while num_trials == 0 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.5)
        if db.exists():
            # The file is there before its schema is.
            with suppress(StoreError), Store.open(db, read_only=True) as store:
                num_trials = sum(study.num_trials for study in store.studies())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert "every finished trial is kept: run the same command again" in err
    assert "Traceback" not in err
    with Store.open(db, read_only=True) as store:
        assert sum(study.num_trials for study in store.studies()) >= num_trials > 0


def test_a_reader_that_goes_away_is_no_error(winner, tmp_path) -> None:
    with start("export", "--db", tmp_path / "user.db") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1
