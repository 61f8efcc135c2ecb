"""After a warm-up nothing is built: the launchers are there, for either kind of table and pool."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest
import tilescout
import torch
from decode_calls import assert_right, call, pool_of, problem_of
from tilescout.errors import UsageError
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.paged_decode.triton_template import PagedDecodeTriton
from tilescout.ops.launchers import LauncherCache, keeping_launchers
from tilescout.ops.warmup import launch_once
from tilescout.tuner import dispatch

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)
PROBLEM = problem_of(lengths="mixed")
WORKLOAD = """
name = "small"
description = "One small problem."
source = "made up"

[[problems]]
op = "paged_decode"
label = "small"
batch = 3
kv_len = 64
num_qo_heads = 4
num_kv_heads = 2
head_dim = 64
page_size = 16
dtype = "float16"
"""


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LauncherCache:
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    dispatch.refresh()
    found = LauncherCache()
    monkeypatch.setattr(import_module("tilescout.ops.decode_launch"), "_launchers", found)
    return found


def inputs_of(*, is_dense: bool, device: str, lengths=(50, 7, 64)):
    return ref.paged_inputs(PROBLEM, list(lengths), device=device, seed=1, is_dense=is_dense)


def forbid_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a launcher was built")

    monkeypatch.setattr(PagedDecodeTriton, "build", forbidden)


class OnADevice:
    device: str

    @pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
    @pytest.mark.parametrize("is_joined", [False, True], ids=["pair", "pool"])
    def test_calls_after_it_build_nothing(
        self, launchers, monkeypatch: pytest.MonkeyPatch, is_dense: bool, is_joined: bool
    ) -> None:
        assert launch_once(PROBLEM, torch.device(self.device)) == 8
        forbid_building(monkeypatch)
        inputs = inputs_of(is_dense=is_dense, device=self.device)
        pair = (inputs.k_cache.contiguous(), inputs.v_cache.contiguous())
        cache = pool_of(inputs) if is_joined else pair
        assert_right(inputs, *call(inputs, kv_cache=cache, return_lse=True))
        assert_right(inputs, call(inputs, kv_cache=cache), None)
        assert len(launchers) == 8


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@interpreted
class TestInterpreted(OnADevice):
    device = "cpu"


@pytest.mark.gpu
class TestOnGpu(OnADevice):
    device = "cuda"

    def test_the_first_call_after_it_may_be_captured(
        self, launchers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        workload = tmp_path / "small.toml"
        workload.write_text(WORKLOAD)
        done = tilescout.warmup(str(workload))
        assert done.num_calls >= 8
        forbid_building(monkeypatch)
        inputs = inputs_of(is_dense=False, device=self.device, lengths=(64, 64, 64))
        out = torch.empty_like(inputs.q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(inputs, kv_cache=pool_of(inputs), out=out)
        graph.replay()
        assert_right(inputs, out, None)


class _Nothing:
    def launch(self, inputs: object, outputs: object) -> None:
        pass


def test_what_is_kept_is_not_dropped_for_others() -> None:
    cache, cpu = LauncherCache(max_launchers=2), torch.device("cpu")
    with keeping_launchers():
        kept = cache.get("kept", cpu, _Nothing)
    for name in ("a", "b", "c", "d"):
        cache.get(name, cpu, _Nothing)
    assert cache.get("kept", cpu, _Nothing) is kept
    assert len(cache) == 3
    # One that was built before is kept from its first use inside on.
    d = cache.get("d", cpu, _Nothing)
    with keeping_launchers():
        assert cache.get("d", cpu, _Nothing) is d
    for name in ("e", "f", "g"):
        cache.get(name, cpu, _Nothing)
    assert cache.get("d", cpu, _Nothing) is d


def test_a_capture_takes_over_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, cpu = LauncherCache(), torch.device("cpu")
    with keeping_launchers():
        kept = cache.get("kept", cpu, _Nothing)
    module = import_module("tilescout.ops.launchers")
    monkeypatch.setattr(module, "_stream_of", lambda device: (7, True))
    assert cache.get("kept", cpu, _Nothing) is kept
    with pytest.raises(UsageError, match=r"or tilescout\.warmup"):
        cache.get("other", cpu, _Nothing)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels do not compile"
)
def test_without_a_gpu_everything_is_compiled_for_the_named_one(tmp_path: Path) -> None:
    workload = tmp_path / "small.toml"
    workload.write_text(WORKLOAD)
    done = tilescout.warmup(str(workload), gpu="h200", num_workers=2)
    assert done.num_calls == 0
    assert {kernel.kernel for kernel in done.kernels} >= {"paged_decode_kernel"}
    assert {result.problem.lengths for result in done.results} == {"equal", "mixed"}
