"""docs/cli.md says what the commands' help says; the example of each command runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import catalog, cli
from winner_databases import MadeUpWinner, write_winners

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMANDS = (
    *("tune", "lookup", "explain", "spaces", "env", "report", "export", "import"),
    *("compare", "replay"),
    *("warmup", "lock", "bundle"),
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tilescout", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
    )


def help_of(command: str) -> str:
    done = run(*([command] if command else []), "--help")
    assert done.returncode == 0, done.stderr
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def test_the_commands_are_the_documented_ones() -> None:
    listed = re.findall(r"^  (\w+) ", help_of("").partition("Commands:")[2], re.MULTILINE)
    assert listed == list(COMMANDS)
    assert re.findall(r"^## `tilescout (\w+)`$", PAGE.read_text(), re.MULTILINE) == listed


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_page_shows_the_help(command: str, request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    heading = f"## `tilescout {command}`\n" if command else "# Command line\n"
    before, found, after = page.partition(heading)
    assert found, heading
    shown = re.search(r"```text\n(.*?)\n```", after, re.DOTALL)
    assert shown is not None
    if request.config.getoption("--update-golden"):
        rest = after[: shown.start(1)] + help_of(command) + after[shown.end(1) :]
        PAGE.write_text(before + found + rest, encoding="utf-8")
    else:
        assert shown.group(1) == help_of(command)


def test_the_example_of_every_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILESCOUT_DB", str(tmp_path / "user.db"))
    # Compiling a whole workload takes minutes; test_bundle compiles one problem.
    monkeypatch.setattr("tilescout.tuner.precompile.reached_specs", lambda result: ())
    problem, device = catalog.first_problem("paged_decode"), catalog.gpu("h200")
    default = joint_space(problem, device).default
    write_winners(tmp_path / "user.db", [MadeUpWinner(problem, device, default)])
    for command in COMMANDS:
        text = " ".join(help_of(command).split())
        example = re.search(r"Example: tilescout (.*?)(?= Arguments:| Options:|$)", text)
        assert example is not None, command
        words = shlex.split(example.group(1))
        assert words[0] == command
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, *(["--dry-run"] if command == "tune" else [])])
        assert (ended.value.code, capsys.readouterr().err) == (0, ""), example.group(0)
    assert (tmp_path / "report" / "index.html").is_file()
    assert (tmp_path / "results.db").is_file()


def test_version_and_no_arguments() -> None:
    assert re.fullmatch(r"tilescout \d+\.\d+\.\d+\n", run("--version").stdout)
    assert "Usage: " in run().stdout + run().stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from tilescout.tuner import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'optuna', 'sqlalchemy', 'alembic', 'pandas', 'torch', 'triton', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
