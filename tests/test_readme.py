"""The documents cannot drift: what they show is run, what they name is looked up.

Console blocks hold the true output of the commands in them; ``--update-golden`` writes it anew.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import catalog
from tilescout.tuner.records import Provenance, TrialStatus
from tilescout.tuner.tiers import Tier
from tilescout.tuner.workload_file import parse_workload
from typer.main import get_command

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
WIDTH = 96
"""Characters shown of an output line."""
BY_NAME = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@dataclass(frozen=True)
class Command:
    """One ``$ ...`` line of a console block and the output below it."""

    line: str
    output: str


def blocks(document: Path, language: str) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield Command(line, output)


def run(arguments: list[str], folder: Path) -> str:
    """Standard output of a command that must succeed, run in ``folder`` with a database there."""
    environment = {
        **os.environ,
        "TILESCOUT_DB": str(folder / "user.db"),
        "COLUMNS": "100",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fit_to_print(output: str, folder: Path) -> str:
    """The output without the paths of this machine, the middle of wide lines cut out."""
    text = output.replace(str(folder), "...").replace(str(ROOT), "...")
    lines = text.splitlines()
    if any(line.startswith("─") for line in lines):  # a table: cut all rows at one place
        longest = max(map(len, lines))
        lines = [line.ljust(longest) for line in lines]
    return "".join(f"{cut(line)}\n" for line in lines)


def cut(line: str) -> str:
    half = WIDTH // 2
    return (line if len(line) <= WIDTH else f"{line[:half]} ... {line[-half:]}").rstrip()


STEADY = {"op", "gpu", "problem", "template", "tier", "provenance", "distance"}
"""Lines of a look-up that stay when times and choices change."""


def what_stays(output: str) -> list[str]:
    """The steady lines of an output, and the first word of every other."""
    lines = [line.split() for line in output.splitlines() if line.strip()]
    return [" ".join(words) if words[0] in STEADY else words[0] for words in lines]


@pytest.mark.slow
def test_console_blocks_of_the_readme_show_true_output(tmp_path, request):
    text = README.read_text(encoding="utf-8")
    shown, true = [], []
    for block in blocks(README, "console"):
        found = list(commands(block))
        assert found
        outputs = [
            fit_to_print(run(shlex.split(command.line), tmp_path), tmp_path) for command in found
        ]
        shown += [what_stays(command.output) for command in found]
        true += [what_stays(output) for output in outputs]
        pairs = zip(found, outputs, strict=True)
        renewed = "".join(f"$ {command.line}\n{output}" for command, output in pairs)
        text = text.replace(block, renewed)
    if request.config.getoption("--update-golden"):
        README.write_text(text, encoding="utf-8")
    else:
        assert shown == true


@pytest.mark.slow
def test_python_blocks_of_the_readme_run(tmp_path):
    (code,) = blocks(README, "python")
    assert len(code.splitlines()) <= 13
    printed = run([sys.executable, "-P", "-c", code], tmp_path)
    tier, _, config = printed.partition(" ")
    assert tier in set(Tier)
    assert "block_n=" in config


def test_the_example_of_a_new_operation_works(monkeypatch):
    example = ModuleType("scale_example")
    monkeypatch.setitem(sys.modules, example.__name__, example)
    for code in blocks(ROOT / "docs" / "adding_an_operation.md", "python"):
        exec(compile(code, "adding_an_operation.md", "exec"), example.__dict__)
    problem = example.ScaleProblem.from_dict({"size": "4096"})
    assert (problem.size, problem.bytes_moved) == (4096, 32768)
    space = example.SPACES["triton"](problem, catalog.gpu("h200"))
    assert space.check(space.default) is None
    assert 1 < len(list(space)) < 7 * 4 * 4


def test_the_example_of_a_workload_is_valid():
    (text,) = blocks(ROOT / "CONTRIBUTING.md", "toml")
    problems = parse_workload(text, "CONTRIBUTING.md").problems
    assert len(problems) == 8
    assert {entry.weight for entry in problems} == {1.0, 2.0, 3.0, 6.0}


@BY_NAME
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


@BY_NAME
def test_paths_in_backticks_exist(document):
    text = document.read_text(encoding="utf-8")
    folders = "benchmarks|configs|docs|kernels|ops|search_spaces|tests|tools|tuner"
    named = re.findall(rf"`((?:{folders})/[\w./*-]*)`", text)
    # The example operation is made up; a folder of benchmarks may come with its first claim.
    real = [name for name in named if "scale" not in name]
    assert [name for name in real if not list(ROOT.glob(name.rstrip("/")))] == []


def cli() -> dict[str, set[str]]:
    """Options of every command."""
    from tilescout.tuner.cli import app

    group = get_command(app)
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in group.commands.items()
    }


@BY_NAME
def test_every_command_and_option_named_exists(document):
    known = cli()
    text = document.read_text(encoding="utf-8")
    calls = re.findall(r"(?:`|\$ |bin/)tilescout ([a-z]+)([^`\n|]*)", text)
    unknown = [name for name, _ in calls if name not in known]
    assert unknown == []
    for name, rest in calls:
        assert set(re.findall(r"--[a-z-]+", rest)) <= known[name] | {"--help"}, f"{name}{rest}"


@BY_NAME
def test_every_make_target_named_exists(document):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = re.findall(r"`make ([a-z]+)`", document.read_text(encoding="utf-8"))
    assert set(named) <= targets


def table_rows(heading: str) -> list[list[str]]:
    """Cells of the last table under a heading of the README, its first two lines left out."""
    section = README.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    table = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[-1]
    return [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_table_of_devices_is_the_catalogue():
    def row(spec: DeviceSpec) -> list[str]:
        bandwidth = f"{spec.bandwidth_gbps:.0f} GB/s"
        return [f"`{spec.sku}`", spec.compute_capability_text, str(spec.num_sms), bandwidth]

    shown = [[row[0], *row[2:]] for row in table_rows("Kernels and devices")]
    assert sorted(shown) == sorted(row(catalog.gpu(name)) for name in catalog.gpu_names())


def test_every_workload_is_named():
    text = README.read_text(encoding="utf-8")
    assert [name for name in catalog.workload_names() if f"`{name}`" not in text] == []


def test_the_table_of_variables_is_complete():
    shown = {row[0].strip("`") for row in table_rows("Environment variables")}
    read = set()
    for folder in ("kernels", "ops", "search_spaces", "tuner"):
        for path in (ROOT / folder).rglob("*.py"):
            code = path.read_text(encoding="utf-8")
            read |= set(re.findall(r"environ(?:\.get\(|\[)\s*[\"'](TILESCOUT\w+)", code))
            read |= set(re.findall(r"_VARIABLE = [\"'](TILESCOUT\w+)", code))
    setup = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    read |= set(re.findall(r"\$\{([A-Z_]+):-", setup))
    assert shown == read


@pytest.mark.parametrize("words", [TrialStatus, Tier, Provenance], ids=lambda words: words.__name__)
def test_the_glossary_has_every_status_tier_and_provenance(words):
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert [word.value for word in words if not re.search(rf"\b{word.value}\b", text)] == []
