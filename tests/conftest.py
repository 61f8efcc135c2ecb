"""Fixtures of all tests: databases live in a temporary folder, GPU tests skip cleanly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tilescout.kernels.device import DeviceSpec

# Worker processes import the test support modules too.
_SUPPORT = str(Path(__file__).parent / "support")
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (_SUPPORT, os.environ.get("PYTHONPATH", "")) if part
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is None:
        skip = pytest.mark.skip(reason="no NVIDIA GPU here")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _hermetic(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("TILESCOUT_DB", str(home / "user.db"))


@pytest.fixture
def h200() -> DeviceSpec:
    """An H200-like device, independent of configs/gpus."""
    return DeviceSpec(
        sku="h200",
        name="NVIDIA H200",
        architecture="hopper",
        compute_capability=(9, 0),
        num_sms=132,
        memory_bytes=141 * 10**9,
        l2_bytes=60 * 2**20,
        smem_per_block_bytes=227 * 1024,
        smem_per_sm_bytes=228 * 1024,
        registers_per_sm=65536,
        max_threads_per_sm=2048,
        max_blocks_per_sm=32,
        bandwidth_gbps=4800.0,
        peak_tflops={"bfloat16": 989.0, "float16": 989.0, "float32": 67.0},
        clock_mhz=1980.0,
    )


@pytest.fixture
def toy() -> object:
    """The toy operation, registered."""
    import toy_op
    from tilescout.kernels import registry
    from tilescout.search_spaces import registry as spaces

    registry.register("toy", toy_op.MODULE)
    spaces.register("toy", toy_op.MODULE)
    return toy_op
