from __future__ import annotations

import json
from pathlib import Path

import pytest
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import catalog, cli
from tilescout.tuner.records import Provenance
from tilescout.tuner.store import Store
from winner_databases import MadeUpWinner, write_winners


@pytest.fixture
def databases(tmp_path: Path) -> tuple[str, str]:
    """The same winner in two files, 40% slower in the second."""
    problem, device = catalog.first_problem("paged_decode"), catalog.gpu("h200")
    default = joint_space(problem, device).default
    paths = tmp_path / "before.db", tmp_path / "after.db"
    for path, time_us in zip(paths, (10.0, 14.0), strict=True):
        # A prediction has no noise: every difference counts.
        made_up = MadeUpWinner(problem, device, default, Provenance.PREDICTED, time_us=time_us)
        write_winners(path, [made_up])
    return str(paths[0]), str(paths[1])


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_a_slower_result_fails_a_guard_and_is_named(capsys, databases):
    code, out, err = run(capsys, *databases, "--format", "json", "--fail-over", "20")
    (row,) = json.loads(out)["changes"]
    assert row["change_percent"] == pytest.approx(40.0)
    assert (row["verdict"], code) == ("slower", 1)
    assert "over 20%: paged_decode" in err
    assert "+40.0%" in err


def test_what_stays_below_the_limit_passes(capsys, databases):
    for arguments in (["--fail-over", "50"], []):
        code, out, err = run(capsys, *databases, *arguments)
        assert (code, err) == (0, "")
        assert "Changes, the slowest first" in out
    assert run(capsys, databases[0], databases[0], "--fail-over", "0")[0] == 0


def test_a_table_leaves_out_what_did_not_change_and_names_problems_briefly(capsys, databases):
    _, out, _ = run(capsys, *databases)
    assert "another winner                0\n" in out
    (line,) = (line for line in out.splitlines() if line.startswith("slower  ") and "h200" in line)
    assert " 40 " in line
    assert "has_soft_cap" not in line
    _, out, _ = run(capsys, databases[0], databases[0])
    assert "within noise" in out
    assert "h200" not in out


def test_csv_has_a_row_for_each_problem(capsys, databases):
    _, out, _ = run(capsys, *databases, "--format", "csv")
    assert len(out.splitlines()) == 2
    assert out.startswith("op,problem,sku,provenance")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", "ptxas=1"], "'ptxas=1' is no condition"),
        (["--where", "triton=0.1"], "nothing to compare"),
        (["--op", "decode"], "no results of op='decode'; they have: paged_decode"),
        (["--gpu", "h900"], "unknown GPU 'h900'"),
    ],
)
def test_wrong_options(capsys, databases, arguments, message):
    code, _, err = run(capsys, *databases, *arguments)
    assert (code, message in err) == (2, True)


def test_databases_that_are_none(capsys, databases, tmp_path):
    code, _, err = run(capsys, databases[0], str(tmp_path / "none.db"))
    assert code == 1
    assert "none.db" in err
    assert run(capsys, databases[0], " ")[0] == 2


def test_empty_databases_have_nothing_to_compare(capsys, tmp_path):
    path = tmp_path / "empty.db"
    with Store.open(path):
        pass
    code, _, err = run(capsys, str(path), str(path))
    assert (code, "nothing to compare" in err) == (2, True)
