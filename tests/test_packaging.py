"""The wheel holds the package, whole and nothing else, and works where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
CODE_FOLDERS = ("configs", "kernels", "ops", "search_spaces", "tuner")
DATA_SUFFIXES = {".html", ".mako", ".toml"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_files() -> set[str]:
    """What belongs in the wheel: code and data of the package, as paths below the root."""
    files = {"__init__.py", "__main__.py", "errors.py", "py.typed"}
    if (ROOT / "results.db").exists():
        files.add("results.db")
    for folder in CODE_FOLDERS:
        files |= {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".py", *DATA_SUFFIXES}
        }
    return files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that no build folder of the checkout leaks in."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "build", "__pycache__", "*.egg-info", ".*_c*"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--no-index", "-v", "-w", target, source],
        capture_output=True,
        text=True,
        check=False,
        cwd=target,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Warning" not in done.stdout, done.stdout
    (built,) = target.glob("*.whl")
    return built


def test_every_folder_with_code_is_a_listed_package():
    folders = {Path(name).parent.as_posix() for name in package_files() if name.endswith(".py")}
    packages = {
        "tilescout" if folder == "." else f"tilescout.{folder.replace('/', '.')}"
        for folder in folders
    }
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert packages == set(listed)
    assert listed == sorted(listed)


def test_the_wheel_holds_exactly_the_package(wheel):
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name.removeprefix("tilescout/") for name in names if name.startswith("tilescout/")}
    assert inside == package_files()
    outside = {name for name in names if not name.startswith("tilescout/")}
    assert all(name.split("/")[0].endswith(".dist-info") for name in outside)
    assert any(name.endswith("licenses/LICENSE") for name in outside)


def test_the_wheel_works_where_it_is_installed(wheel, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*install, "--target", site, wheel], check=True, cwd=tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import tilescout\n"
        "from tilescout.tuner import catalog\n"
        "print(tilescout.__file__, tilescout.__version__)\n"
        "print(*catalog.gpu_names(), *catalog.workload_names(), *catalog.budget_names())\n"
    )
    # -P keeps the checkout's folders (a `kernels`, an `ops`) off the path.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, site],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    place, names = done.stdout.splitlines()
    assert Path(place.split()[0]).is_relative_to(site)
    assert {"h200", "quickstart", "full"} <= set(names.split())


def test_constraints_pin_every_dependency_but_torch_and_triton():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonical(name) for name in pins}
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {canonical(line.split(">=")[0]) for line in wanted}
    assert names - pinned == {"torch", "triton"}
    assert not pinned & {"torch", "triton", "pip", "tilescout"}


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")
