"""Compiled kernels that only write down what they are launched with, for every test of calls."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import compiled_stand_in
import pytest
from compiled_stand_in import Launches
from prepared_outcomes import forget
from tilescout.kernels.gdn_chunk_fwd import triton_launcher as gdn_chunk_launcher
from tilescout.ops.launchers import LauncherCache
from tilescout.tuner import dispatch

TRITON_VERSIONS = ["3.9.0", "3.6.0"]


@pytest.fixture(params=TRITON_VERSIONS)
def launches(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Launches]:
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    dispatch.refresh()
    forget()
    for module in ("attention_states", "decode_launch", "gdn", "gdn_chunk", "fp4_launch"):
        # Scratch memory lies elsewhere when a launcher is built anew, so none may be dropped.
        found = LauncherCache(max_launchers=10_000)
        monkeypatch.setattr(import_module(f"tilescout.ops.{module}"), "_launchers", found)
    yield compiled_stand_in.install(monkeypatch, version=request.param)
    forget()
    gdn_chunk_launcher._bound.cache_clear()
    dispatch.refresh()
