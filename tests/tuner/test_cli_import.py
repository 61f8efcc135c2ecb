"""``tilescout import``: the table form; that of exports is in ``test_cli``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tilescout.tuner import cli
from tilescout.tuner.store import Store

TABLE = """gpu,op,shape,library,library_version,mode,us
NVIDIA H200,paged_decode,batch=1 kv=8192 Hq=32 Hkv=8 D=128 page=16 NHD bf16,fi:fa2,1,{mode},29.58
NVIDIA H200,matmul,m=1,fi,1,graph replay cold L2,29.58
"""
ABOUT = ("--source", "a paper", "--date", "2026-08-11")


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "table.csv"
    path.write_text(TABLE.format(mode="graph replay cold L2"), encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["import", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_a_table_goes_in_and_what_does_not_is_listed(capsys, table, tmp_path):
    db = tmp_path / "new.db"
    code, out, _ = run(capsys, "--published", table, *ABOUT, "--db", str(db), "--format", "json")
    assert code == 0
    shown = json.loads(out)
    assert (shown["rows"], shown["added"], shown["refused"]) == (2, 1, 1)
    assert "'matmul' is no operation here" in shown["refusals"][0]["reason"]
    with Store.open(db, read_only=True) as store:
        (study,) = store.baselines()
        assert study.created_at.date().isoformat() == "2026-08-11"
    code, out, _ = run(capsys, "--published", table, *ABOUT, "--db", str(db))
    assert (code, out.split()[:6]) == (0, ["rows", "2", "added", "0", "present", "1"])
    assert "Refused" in out


def test_measured_runs_of_ones_own(capsys, table, tmp_path):
    db = str(tmp_path / "new.db")
    assert run(capsys, "--published", table, *ABOUT, "--db", db, "--provenance", "measured")[0] == 0
    with Store.open(db, read_only=True) as store:
        assert [study.key.provenance.value for study in store.baselines()] == ["measured"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--published", *ABOUT[:2]], "--published needs --date"),
        (["--published", *ABOUT[2:]], "--published needs --source"),
        (["--published", *ABOUT[:3], "yesterday"], "'yesterday' is no date"),
        (["--published", *ABOUT[:3], "2999-01-01"], "between 1970 and today"),
        (["--published", *ABOUT, "--policy", "cold"], "--policy 'cold' must be one of"),
        ([*ABOUT], "--source is for --published tables only"),
        (["--provenance", "measured"], "--provenance is for --published tables only"),
    ],
)
def test_wrong_options_are_refused_and_leave_no_database(
    capsys, table, tmp_path, arguments, message
):
    db = tmp_path / "new.db"
    code, _, err = run(capsys, table, "--db", str(db), *arguments)
    assert code == 2
    assert message in err
    assert not db.exists()


def test_a_table_on_standard_input_is_refused(capsys, tmp_path):
    db = tmp_path / "new.db"
    code, _, err = run(capsys, "-", "--published", *ABOUT, "--db", str(db))
    assert (code, "from a file, not from standard input" in err) == (2, True)
    assert not db.exists()


def test_a_wrong_table_leaves_no_database(capsys, tmp_path):
    path, db = tmp_path / "table.csv", tmp_path / "new.db"
    path.write_text("gpu,op\n", encoding="utf-8")
    code, _, err = run(capsys, "--published", str(path), *ABOUT, "--db", str(db))
    assert code == 2
    assert "column 'library' is missing" in err
    assert not db.exists()
