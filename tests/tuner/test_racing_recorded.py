"""The racing rule on samples that others recorded on real GPUs; benchmarks/racing.py shows all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import tilescout

ROOT = Path(tilescout.__file__).resolve().parent
RECORDED = ROOT.parent / "shared" / "replay"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("racing_bench", ROOT / "benchmarks" / "racing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["racing_bench"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["racing_bench"]


@pytest.mark.parametrize(
    "space",
    [
        pytest.param("convolution_milo-A4000", id="clock falls midway: two modes"),
        pytest.param("convolution_milo-W7800", id="scatter of 4%, gaps of 1%"),
    ],
)
def test_a_third_of_the_samples_finds_the_best(benchmark: Any, space: str) -> None:
    path = RECORDED / f"{space}.json.gz"
    if not path.exists():
        pytest.skip(f"no recorded space at {path}")
    row = benchmark.judge(path, num_draws=100, seed=7)
    assert row.num_samples == 31
    assert row.hit_rate >= 0.95
    assert row.sample_share <= 1 / 3
    assert 6 <= row.trial_samples < row.num_samples
