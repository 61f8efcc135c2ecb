"""Benchmarks of seeds without a GPU: what is compiled, and the line and the row of each seed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import CompileResult
from tilescout.tuner.records import BinaryFacts, TrialStatus

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROBLEM = GdnDecodeProblem(3, 1, 1, 2, 128, 128, "bfloat16", state_layout="VK")
FACTS = BinaryFacts("step", 32, 64, 0, 1024, 0, 100, "none")


@pytest.fixture
def seeds(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module("seeds")


def compiled(configs):
    broken = CompileResult(TrialStatus.COMPILE_ERROR, "no registers left")
    sound = CompileResult(TrialStatus.OK, facts=(FACTS,))
    return {(PROBLEM, c): sound if i else broken for i, c in enumerate(configs)}


def test_the_default_comes_first_and_no_seed_twice(seeds) -> None:
    device = gpu("h200")
    found = seeds.seeds_of(PROBLEM, device, ["triton"])
    joint = seeds.joint_space(PROBLEM, device, ["triton"])
    assert found[0] == joint.default
    assert len(found) == len(set(found)) > 1
    assert {config.template for config in found} == {"triton"}
    assert {config.template for config in seeds.seeds_of(PROBLEM, device)} > {"triton"}


def test_each_seed_has_its_time_or_its_reason(seeds, capsys) -> None:
    configs = seeds.seeds_of(PROBLEM, gpu("h200"), ["triton"])[:4]

    def measure(config):
        if config == configs[1]:
            raise RuntimeError("an illegal access\nand where")
        if config == configs[2]:
            return {"reason": "wrong"}
        return {"us": 2.0, "parts_us": {"scan": 1.5}}

    rows = seeds.print_seeds(PROBLEM, configs, compiled(configs), measure)
    assert [row.get("reason") for row in rows] == [
        *("no registers left", "RuntimeError: an illegal access", "wrong", None)
    ]
    assert [row["config"] for row in rows] == [config.as_dict() for config in configs]
    assert rows[3]["us"] == 2.0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[3].split()[:4] == ["2.00", f"{PROBLEM.flops / 2e6:.1f}", "64", "0"]
    assert lines[3].endswith("scan 1.5")


def test_nothing_is_timed_without_a_gpu(seeds, capsys) -> None:
    configs = seeds.seeds_of(PROBLEM, gpu("h200"), ["triton"])[:2]
    rows = seeds.print_seeds(PROBLEM, configs, compiled(configs), None)
    assert all("us" not in row for row in rows)
    assert capsys.readouterr().out.count("nan") == 4
