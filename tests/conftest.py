"""Fixtures of all tests: databases live in a temporary folder, GPU tests skip cleanly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from devices import H200
from tilescout.kernels import external
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
    # Other people's libraries that happen to be installed must not change a search space.
    monkeypatch.setenv(external.EXTERNAL_VARIABLE, "never")
    monkeypatch.setattr(external, "_chosen", None)


@pytest.fixture
def h200() -> DeviceSpec:
    """An H200-like device, independent of configs/gpus."""
    return H200


@pytest.fixture
def toy() -> object:
    """The toy operation, registered."""
    import toy_op
    from tilescout.kernels import registry
    from tilescout.search_spaces import registry as spaces

    registry.register("toy", toy_op.MODULE)
    spaces.register("toy", toy_op.MODULE)
    return toy_op
