"""Bad input: what is wrong, what is allowed, what to do; exit code 2 for usage, 1 for the rest."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
from tilescout.tuner import catalog, cli, dispatch, environment
from tilescout.tuner import tune as tune_module
from tilescout.tuner.records import SCHEMA_VERSION, Provenance
from tilescout.tuner.tune_summary import TuneRow, TuneSummary
from toy_op import ToyProblem, toy_space
from winner_databases import MadeUpWinner, write_winners

pytestmark = pytest.mark.usefixtures("toy")

TOY = ("toy", "--gpu", "h200", "size=64")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILESCOUT_DB", str(tmp_path / "user.db"))
    for module in ("dispatch", "paths"):
        monkeypatch.setattr(
            f"tilescout.tuner.{module}.shipped_database_path", lambda: tmp_path / "shipped.db"
        )
    dispatch.refresh()
    yield
    dispatch.refresh()


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]):
    def check(*arguments: object, code: int, says: str) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert out == ""
        assert re.search(says, " ".join(err.split())), err
        assert "Traceback" not in err
        assert "internal error" not in err
        assert ended.value.code == code

    return check


KNOWN_GPUS = r"known are b200, b300, gb200, h100, h200, rtx5090, rtxpro6000"

USAGE = {
    "no such command": (("tun",), r"No such command 'tun'"),
    "no such option": (("lookup", *TOY, "--fast"), r"No such option: --fast"),
    "policy": (("lookup", *TOY, "--policy", "any"), r"'any' is not one of 'nearest', 'strict'"),
    "format": (("lookup", *TOY, "--format", "xml"), r"'xml' is not one of 'table', 'csv', 'json'"),
    "op": (("lookup", "gemm"), r"unknown operation 'gemm': known are .*paged_decode, .*toy"),
    "op of spaces": (("spaces", "gemm"), r"unknown operation 'gemm': known are"),
    "op of export": (("export", "--op", "gemm"), r"unknown operation 'gemm': known are"),
    "SKU": (("lookup", "toy", "--gpu", "h9", "size=64"), rf"unknown GPU 'h9': {KNOWN_GPUS}"),
    "SKU of tune": (("tune", "--gpu", "h200,h9"), rf"unknown GPU 'h9': {KNOWN_GPUS}"),
    "SKU of export": (("export", "--gpu", "h9"), rf"unknown GPU 'h9': {KNOWN_GPUS}"),
    "SKU of report": (("report", "--out", "r", "--gpu", "h9"), rf"unknown GPU 'h9': {KNOWN_GPUS}"),
    "SKU of spaces": (("spaces", *TOY[:1], "--gpu", "h9", "size=64"), r"unknown GPU 'h9'"),
    "empty SKU": (("tune", "--gpu", "h200,,b200"), r"'h200,,b200' has an empty name"),
    "no KEY=VALUE": (("lookup", "toy", "64"), r"'64' is not KEY=VALUE, e\.g\. batch=16"),
    "key twice": (("lookup", "toy", "size=1", "size=2"), r"size is given twice: '1' and '2'"),
    "no such key": (
        ("lookup", "toy", "length=4"),
        r"unknown field of a toy problem 'length': known are dtype, size",
    ),
    "key missing": (("lookup", "toy"), r"a toy problem needs size: got none"),
    "not a number": (
        ("lookup", "toy", "size=big"),
        r"size='big' of a toy problem must be an integer",
    ),
    "out of range": (("lookup", "toy", "size=0"), r"size=0 of a toy problem must be at least 1"),
    "workload": (("tune", "gpt"), r"unknown workload 'gpt': known are .*quickstart"),
    "workload file": (
        ("tune", "none.toml"),
        r"workload file 'none\.toml' cannot be read: No such file or directory; check the path",
    ),
    "budget": (("tune", "--budget", "huge"), r"unknown budget 'huge': known are full, quick"),
    "mode": (("tune", "--mode", "guess"), r"'guess' is not one of 'auto', 'measure', 'predict'"),
    "trials": (("tune", "--trials", "0"), r"'--trials': .*greater than or equal to 1"),
    "trials no number": (("tune", "--trials", "few"), r"'--trials': .*integer"),
    "time budget": (("tune", "--time-budget", "0"), r"time_budget_s=0\.0 must be more than 0"),
    "seed": (("tune", "--seed", "-1"), r"'--seed': .*greater than or equal to 0"),
    "seed too large": (("tune", "--seed", "4294967296"), r"seed=4294967296 must be between 0 and"),
    "empty --db of lookup": (("lookup", *TOY, "--db", ""), r"--db '' names no database"),
    "empty --db of tune": (("tune", "--db", " "), r"--db ' ' names no database"),
    "empty --db of report": (("report", "--out", "r", "--db", ""), r"--db '' names no database"),
    "empty --db of export": (("export", "--db", ""), r"--db '' names no database"),
    "empty --db of import": (("import", "x.json", "--db", ""), r"--db '' names no database"),
    "empty --out of report": (("report", "--out", ""), r"--out '' names no folder"),
    "report without --out": (("report",), r"report needs --out DIR"),
    "import of nothing": (("import", "none.json"), r"cannot read 'none\.json': No such file"),
    "a server for look-ups": (
        ("lookup", *TOY, "--db", "postgresql://host/db"),
        r"look-ups read SQLite files only",
    ),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_ends_with_2(case: str, fails, h200) -> None:
    write_winners(Path("user.db"), [MadeUpWinner(ToyProblem(8), h200, toy_space(0, 0).default)])
    arguments, says = USAGE[case]
    fails(*arguments, code=2, says=says)


def test_a_workload_with_a_wrong_field(fails) -> None:
    Path("w.toml").write_text(
        'name = "w"\ndescription = "d"\nsource = "s"\n'
        '[[problems]]\nop = "toy"\nlabel = "x"\nlength = 4\n'
    )
    fails("tune", "w.toml", "--gpu", "h200", code=2, says=r"'length'.*dtype, size")


def test_a_problem_that_no_template_supports(fails) -> None:
    says = r"no template of toy supports the problem size=64 dtype=int8 on h200: toy/triton: dtype"
    fails("lookup", *TOY, "dtype=int8", code=1, says=says)
    fails("explain", *TOY, "dtype=int8", code=1, says=says)
    fails("spaces", *TOY, "dtype=int8", code=1, says=says)


def test_no_gpu(fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "current_device", lambda: None)
    dispatch._current_device.cache_clear()
    for command in ("lookup", "explain", "spaces"):
        says = r"no NVIDIA GPU is at hand: name one with gpu= \(--gpu\), of b200, .*h200"
        fails(command, "toy", "size=64", code=1, says=says)
    fails("tune", "--mode", "measure", "--gpu", "auto", code=1, says=r"GPU.*predict")


def test_measuring_a_gpu_that_is_not_at_hand(fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "current_device", lambda: catalog.gpu("h200"))
    says = r"b200 .*cannot be measured: the GPU at hand is h200"
    fails("tune", "--mode", "measure", "--gpu", "h200,b200", code=2, says=says)


READERS = {
    "lookup": ("lookup", *TOY),
    "explain": ("explain", *TOY),
    "export": ("export",),
    "report": ("report", "--out", "r"),
}
WRITERS = {
    "tune": ("tune", "w.toml", "--gpu", "h200", "--mode", "predict", "--trials", "1"),
    "import": ("import", "empty.json"),
}


@pytest.fixture
def database(h200) -> Path:
    """A good database in rollback-journal mode, and what the commands read besides."""
    path = Path("a.db").resolve()
    write_winners(path, [MadeUpWinner(ToyProblem(64), h200, toy_space(None, None).default)])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    Path("w.toml").write_text(
        'name = "w"\ndescription = "d"\nsource = "s"\n'
        '[[problems]]\nop = "toy"\nlabel = "x"\nsize = 64\n'
    )
    Path("empty.json").write_text(
        json.dumps({"schema": SCHEMA_VERSION, "trials": [], "winners": []})
    )
    return path


@pytest.mark.parametrize("command", [*READERS, *WRITERS])
def test_a_corrupt_database(command: str, fails, database: Path) -> None:
    database.write_bytes(b"no database " * 1000)
    arguments = (READERS | WRITERS)[command]
    fails(*arguments, "--db", database, code=1, says=r"a\.db.*(damaged|not a SQLite database)")


@pytest.mark.parametrize("command", [*READERS, *WRITERS])
def test_a_database_of_a_newer_schema(command: str, fails, database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    arguments = (READERS | WRITERS)[command]
    fails(*arguments, "--db", database, code=1, says=r"a\.db.*schema.*[Uu]pgrade")


@pytest.mark.parametrize("command", READERS)
def test_a_database_that_is_not_there(command: str, fails) -> None:
    fails(*READERS[command], "--db", "none.db", code=1, says=r"none\.db")


@pytest.mark.parametrize("command", ["export", "report"])
def test_no_database_at_all(command: str, fails) -> None:
    says = r"no database yet: .*user\.db' does not exist; make one with `tilescout tune`"
    fails(*READERS[command], code=1, says=says)


@pytest.mark.parametrize("command", ["lookup", "explain"])
def test_a_locked_database(command: str, fails, database: Path, monkeypatch) -> None:
    monkeypatch.setattr("tilescout.tuner.winner_rows.LOCK_TIMEOUT_S", 0.1)
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        says = r"a\.db' is locked by another process .* try again"
        fails(*READERS[command], "--db", database, code=1, says=says)


def test_a_place_that_cannot_be_written(fails, database: Path) -> None:
    Path("file").touch()
    for command in ("tune", "import"):
        fails(*WRITERS[command], "--db", "file/a.db", code=1, says=r"file/a\.db")
    fails("export", "file/x.json", "--db", database, code=2, says=r"cannot write 'file/x\.json'")
    fails("report", "--out", "file/r", "--db", database, code=2, says=r"file/r")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"'x\.json' is not JSON .*`tilescout export` wrote"),
        ("[]", r"'x\.json' cannot be imported: .*must be an object"),
        ('{"schema": 1}', r"lacks the field 'trials'"),
        (f'{{"schema": {SCHEMA_VERSION + 1}}}', r"newer than"),
        ('{"schema": 1, "trials": [{}], "winners": []}', r"trials\[0\] lacks the field"),
    ],
)
def test_an_import_file_that_does_not_fit(text: str, says: str, fails, database: Path) -> None:
    Path("x.json").write_text(text)

    def content() -> list[str]:
        with closing(sqlite3.connect(database)) as connection:
            return list(connection.iterdump())

    before = content()
    fails("import", "x.json", "--db", database, code=2, says=says)
    assert content() == before
    fails("import", "x.json", "--db", "new.db", code=2, says=says)
    assert not Path("new.db").exists()


def test_a_problem_without_a_winner_is_a_failure(
    database: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = TuneRow("x", ToyProblem(64), "h200", Provenance.PREDICTED, reason="2 compile_error: no")
    summary = TuneSummary((row,), is_dry_run=False, database=str(database), elapsed_s=1.0)
    monkeypatch.setattr(tune_module, "tune", lambda *args, **options: summary)
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", "w.toml", "--gpu", "h200"])
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert err == "tilescout: no winner for x on h200: 2 compile_error: no\n"
    assert "predicted" in out


def test_an_interrupt_while_it_loads_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loading(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "tilescout.tuner.tune", Loading("tilescout.tuner.tune"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune"])
    assert ended.value.code == 130
    assert "run the same command again to go on" in capsys.readouterr().err


def test_debug_anywhere_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--debug", "lookup", "gemm"], ["lookup", "gemm", "--debug"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        err = capsys.readouterr().err
        assert ended.value.code == 2
        assert "Traceback (most recent call last)" in err
        assert "tilescout: unknown operation 'gemm': known are" in err.splitlines()[-1]


def test_a_bug_of_ours_is_owned_up_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode() -> None:
        raise TypeError("oops")

    monkeypatch.setattr(environment, "describe", explode)
    with pytest.raises(SystemExit) as ended:
        cli.main(["env"])
    assert ended.value.code == 1
    message = "tilescout: internal error, TypeError: oops; run it again with --debug and report "
    assert capsys.readouterr().err.startswith(message)
