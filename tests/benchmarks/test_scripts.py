"""Every benchmark explains itself, and says what it lacks where there is no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(p for p in FOLDER.glob("*.py") if '__name__ == "__main__"' in p.read_text())
NEED_GPU = [
    "fp4_backward.py",
    "paged_decode.py",
    "paged_decode_mla.py",
    "gdn.py",
    "shared_prefix.py",
]


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_help_shows_what_the_script_measures(script: Path) -> None:
    ended = run(script, "--help")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("usage: ")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
@pytest.mark.parametrize("name", NEED_GPU)
def test_without_a_gpu_it_ends_with_a_sentence(name: str) -> None:
    ended = run(FOLDER / name)
    assert ended.returncode == 1
    assert "needs an NVIDIA GPU" in ended.stderr
    assert "Traceback" not in ended.stderr
