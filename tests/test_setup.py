"""tools/setup.sh chooses torch and triton rightly; pip is replaced by a script that takes notes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUP = ROOT / "tools" / "setup.sh"

pytestmark = pytest.mark.skipif(
    Path("/dev/nvidia0").exists(), reason="the script would see this machine's GPU"
)

# Stands for the environment's python: notes what pip is asked for, refuses what it is told to.
PYTHON = """#!/usr/bin/env bash
if [[ $1 == - ]]; then PYTHONPATH=$FAKE_SITE exec {real} "$@"; fi
echo "${{*: -1}} | $*" >>"$NOTES"
[[ -z $REFUSES || "$*" != *$REFUSES* ]]
"""


class Machine:
    """A machine with a made-up package index, torch and driver."""

    def __init__(self, folder: Path) -> None:
        self.venv = folder / "venv"
        self.log = folder / "pip.log"
        self.tools = folder / "bin"
        self.site = folder / "site"
        for path in (self.venv / "bin", self.tools, self.site):
            path.mkdir(parents=True)
        self.script(self.venv / "bin" / "python", PYTHON.format(real=sys.executable))
        self.script(self.venv / "bin" / "tilescout", "#!/bin/sh\n")
        self.torch_requires()
        self.driver("exit 1")

    @staticmethod
    def script(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def torch_requires(self, *lines: str) -> None:
        info = self.site / "torch-2.13.0.dist-info"
        info.mkdir(exist_ok=True)
        needs = "".join(f"Requires-Dist: {line}\n" for line in lines)
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: torch\nVersion: 2\n{needs}")

    def driver(self, body: str) -> None:
        self.script(self.tools / "nvidia-smi", f"#!/bin/sh\n{body}\n")

    def setup(self, *, refuses: str = "", index: str = "") -> tuple[list[str], str]:
        """Runs the script; the last word and the whole line of each pip call, and its messages."""
        self.log.write_text("")
        environment = {
            **os.environ,
            "PATH": f"{self.tools}{os.pathsep}{os.environ['PATH']}",
            "NOTES": str(self.log),
            "REFUSES": refuses,
            "FAKE_SITE": str(self.site),
            "TORCH_INDEX_URL": index,
        }
        done = subprocess.run(
            [SETUP, self.venv], env=environment, capture_output=True, text=True, check=True
        )
        return self.log.read_text().splitlines(), done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def asked(calls: list[str]) -> list[str]:
    return [call.split(" | ")[0] for call in calls]


def test_without_gpu_the_cpu_build_and_a_triton_of_our_choice(machine):
    calls, _ = machine.setup()
    assert asked(calls) == ["torch==2.13.0+cpu", f"{ROOT}[dev]"]
    assert "triton==3.9.0" in calls[1]
    assert all("constraints.txt" in call for call in calls)


def test_with_gpu_the_plain_build_and_the_triton_that_torch_pins(machine):
    machine.driver("echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'")
    machine.torch_requires('triton==3.7.1; platform_system == "Linux"')
    calls, _ = machine.setup()
    assert asked(calls) == ["torch==2.13.0,!=2.13.0+cpu", f"{ROOT}[dev]"]
    assert "triton" not in calls[1].split(" | ")[1]


def test_a_requirement_for_another_platform_does_not_count(machine):
    machine.torch_requires('triton==3.7.1; platform_system == "Plan9"')
    calls, _ = machine.setup()
    assert "triton==3.9.0" in calls[-1]


def test_the_cpu_build_comes_from_the_named_index_where_the_usual_ones_lack_it(machine):
    calls, messages = machine.setup(refuses="constraints.txt torch==2.13.0+cpu", index="https://x")
    assert asked(calls)[:2] == ["torch==2.13.0+cpu"] * 2
    assert "--extra-index-url https://x" in calls[1]
    assert "instead" not in messages


@pytest.mark.parametrize("index", ["", "https://x"])
def test_without_any_cpu_build_the_plain_one_and_a_word_about_it(machine, index):
    calls, messages = machine.setup(refuses="+cpu", index=index)
    assert asked(calls)[-2:] == ["torch==2.13.0", f"{ROOT}[dev]"]
    assert "installing torch==2.13.0 instead" in messages
    assert "TORCH_INDEX_URL" in messages


def test_a_second_run_does_nothing_until_a_gpu_appears(machine):
    first, _ = machine.setup()
    second, _ = machine.setup()
    machine.driver("echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'")
    third, _ = machine.setup()
    assert (len(first), len(second), len(third)) == (2, 0, 2)


def test_a_failed_installation_is_tried_again(machine):
    with pytest.raises(subprocess.CalledProcessError):
        machine.setup(refuses="[dev]")
    calls, _ = machine.setup()
    assert len(calls) == 2


def test_no_suitable_python_is_said_with_what_to_install(tmp_path):
    done = subprocess.run(
        [SETUP, tmp_path / "venv"],
        env={**os.environ, "PYTHON": "python2.7"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no Python 3.11 or newer among: python2.7" in done.stderr
    assert not (tmp_path / "venv").exists()
