"""The table of docs/fp4_attention.md is what benchmarks/fp4_binaries.py prints."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu

ROOT = Path(__file__).parents[3]
SKUS = ("h200", "b200", "rtx5090", "b300")
MODES = ("nvfp4", "direct", "fp8_p")
COMPILERS = {"triton": "3.9.0", "tilelang": "0.1.15"}
"""What the table was made with, as the docs say above it."""
same_compilers = pytest.mark.skipif(
    any(version(name) != wanted for name, wanted in COMPILERS.items()),
    reason="other compilers than those of the table",
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("_binaries", ROOT / "benchmarks/fp4_binaries.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def documented(script):
    """Rows of the table, each a tuple of its cells."""
    lines = (ROOT / "docs/fp4_attention.md").read_text().splitlines()
    start = lines.index(f"| {' | '.join(script.COLUMNS)} |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return rows


def problem_and_seeds(sku, mode, script):
    device = gpu(sku)
    problem = script.problem_of(mode, device)
    return device, problem, joint_space(problem, device).valid_seeds()


def test_every_seed_has_a_row_and_none_spills(documented, script) -> None:
    shown = [row[:7] for row in documented]
    for sku in SKUS:
        for mode in MODES:
            device, problem, seeds = problem_and_seeds(sku, mode, script)
            for config in seeds:
                sku_mode_template_tile = script.head_of(problem, config, device)
                found = [row for row in shown if row[:4] == sku_mode_template_tile]
                stages = {(row[5], row[6]) for row in found}
                assert (str(config["num_stages"]), script.variant_of(config)) in stages, config
    assert {row[9] for row in documented} == {"0"}


@same_compilers
@pytest.mark.slow
@pytest.mark.parametrize("sku", SKUS)
@pytest.mark.parametrize("mode", MODES)
def test_the_default_compiles_to_its_row(sku, mode, documented, script) -> None:
    device, problem, seeds = problem_and_seeds(sku, mode, script)
    assert script.row_of(problem, seeds[0], device) in documented


@same_compilers
@pytest.mark.slow
def test_a_tilelang_seed_compiles_to_its_row(documented, script) -> None:
    device, problem, seeds = problem_and_seeds("h200", "fp8_p", script)
    config = next(c for c in seeds if c.template == "tilelang_emulated")
    assert script.row_of(problem, config, device) in documented
