"""The public paged-decode function: what it checks, which config it runs, and what comes out."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tilescout import ops
from tilescout.errors import UsageError
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeInputs, PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.paged_decode.triton_template import PagedDecodeTriton
from tilescout.ops.launchers import LauncherCache
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import catalog, dispatch, environment
from winner_databases import MadeUpWinner, write_winners

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

PROBLEM = PagedDecodeProblem(
    batch=3,
    kv_len=64,
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim=64,
    page_size=16,
    dtype="float16",
)
LENGTHS = [50, 0, 64]


def inputs_of(
    problem: PagedDecodeProblem = PROBLEM, lengths: list[int] = LENGTHS, device: str = "cpu"
) -> PagedDecodeInputs:
    return ref.paged_inputs(
        problem, lengths, device=device, seed=1, num_unused_pages=2, poison=True
    )


def call(inputs: PagedDecodeInputs, **options):
    tables = (inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)
    return ops.paged_decode(inputs.q, inputs.kv_cache, *tables, **options)


def assert_right(inputs: PagedDecodeInputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    comparison = ref.compare(PROBLEM, inputs, PagedDecodeOutputs(out, lse))
    assert comparison.is_ok, comparison.reason


@pytest.fixture(autouse=True)
def _fresh_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    monkeypatch.setenv("TILESCOUT_DB", str(tmp_path / "user.db"))
    dispatch.refresh()
    yield
    dispatch.refresh()


WRONG = {
    "q of two dimensions": (
        lambda i: replace(i, q=i.q[0]),
        r"shape of q .* \(8, 64\): must be \[batch",
    ),
    "q in fp32": (
        lambda i: replace(i, q=i.q.float()),
        r"dtype of q .*float32: must be torch\.bfloat16 or torch\.float16",
    ),
    "cache without the K and V axis": (
        lambda i: replace(i, kv_cache=i.kv_cache[:, 0]),
        r"shape of kv_cache .*must be \[num_pages, 2, page_size, num_kv_heads, 64\] \(NHD",
    ),
    "cache of another head_dim": (
        lambda i: replace(i, kv_cache=i.kv_cache[..., :32]),
        r"shape of kv_cache",
    ),
    "cache of another dtype": (
        lambda i: replace(i, kv_cache=i.kv_cache.bfloat16()),
        r"dtype of kv_cache .*must be that of q, torch\.float16",
    ),
    "heads that do not divide": (
        lambda i: replace(i, q=i.q[:, :7]),
        r"num_qo_heads of q .* is 7: must be a multiple of the 2 KV heads",
    ),
    "q with strided rows": (
        lambda i: replace(i, q=i.q.transpose(1, 2).contiguous().transpose(1, 2)),
        r"last stride of q .*: must be 1",
    ),
    "indptr too short": (
        lambda i: replace(i, kv_indptr=i.kv_indptr[:-1]),
        r"shape of kv_indptr .* \(3,\): must be \[4\]",
    ),
    "int64 indices": (
        lambda i: replace(i, kv_indices=i.kv_indices.long()),
        r"dtype of kv_indices .*int64: must be torch\.int32",
    ),
    "strided indices": (
        lambda i: replace(i, kv_indices=i.kv_indices.repeat_interleave(2)[::2]),
        r"stride of kv_indices .*\(2,\): must be \(1,\)",
    ),
    "last_page_len of another batch": (
        lambda i: replace(i, kv_last_page_len=i.kv_last_page_len[:2]),
        r"shape of kv_last_page_len .* \(2,\): must be \[3\]",
    ),
    "table elsewhere": (
        lambda i: replace(i, kv_indptr=i.kv_indptr.to("meta")),
        r"device of kv_indptr .*'meta': must be that of q, 'cpu'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_named(case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(UsageError, match=message):
        call(change(inputs_of()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q[:2], "shape of out"),
        (lambda q: q.float(), "dtype of out"),
        (lambda q: q.to("meta"), "device of out"),
        (lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "last stride of out"),
    ],
    ids=["shape", "dtype", "device", "stride"],
)
def test_wrong_out_is_named(change, message: str) -> None:
    inputs = inputs_of()
    with pytest.raises(UsageError, match=message):
        call(inputs, out=change(inputs.q.clone()))


def test_a_scale_must_be_finite() -> None:
    with pytest.raises(UsageError, match="sm_scale=nan"):
        call(inputs_of(), sm_scale=math.nan)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter runs CPU tensors")
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    with pytest.raises(UsageError, match=r"tensors on 'cpu'.*TRITON_INTERPRET=1"):
        call(inputs_of())


def test_no_requests_give_empty_outputs() -> None:
    inputs = inputs_of(lengths=[])
    out, lse = call(inputs, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((0, 8, 64), (0, 8), torch.float32)


class OnADevice:
    """What holds wherever the kernel runs; ``device`` says where."""

    device: str

    def sku(self):
        raise NotImplementedError

    def write_winner(self, problem: PagedDecodeProblem, config: Config) -> None:
        path = Path(os.environ["TILESCOUT_DB"])
        write_winners(path, [MadeUpWinner(problem, self.sku(), config)])
        dispatch.refresh()

    @pytest.fixture
    def built(self, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
        """Configs that the template was asked to build, in order."""
        configs: list[Config] = []
        build = PagedDecodeTriton.build

        def spy(template, problem, config, inputs):
            configs.append(config)
            return build(template, problem, config, inputs)

        monkeypatch.setattr(PagedDecodeTriton, "build", spy)
        return configs

    @pytest.fixture(autouse=True)
    def _no_launchers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # ``ops.paged_decode`` is the function; the module of that name is found by import only.
        module = import_module("tilescout.ops.paged_decode")
        monkeypatch.setattr(module, "_launchers", LauncherCache())

    def test_output_and_lse_are_right(self) -> None:
        inputs = inputs_of(device=self.device)
        out, lse = call(inputs, return_lse=True)
        assert_right(inputs, out, lse)
        assert out[1].abs().max() == 0
        assert torch.isneginf(lse[1]).all()

    def test_out_is_written_in_place_and_scale_counts(self) -> None:
        inputs = inputs_of(device=self.device)
        out = torch.full_like(inputs.q, math.nan)
        assert call(inputs, out=out, sm_scale=0.5) is out
        assert_right(replace(inputs, sm_scale=0.5), out, None)
        assert not ref.compare(PROBLEM, inputs, PagedDecodeOutputs(out, None)).is_ok

    def test_another_winner_in_the_database_changes_the_config_that_runs(self, built) -> None:
        inputs = inputs_of(device=self.device)
        space = joint_space(PROBLEM, self.sku())
        first = space.default.replace(num_splits=2)
        second = space.default.replace(num_splits=2, block_n=16, num_stages=2)
        assert space.check(first) is space.check(second) is None
        for config in (first, second):
            self.write_winner(PROBLEM, config)
            result = ops.resolve_paged_decode(inputs.q, inputs.kv_cache, inputs.kv_indices)
            assert (result.tier, result.config) == ("exact", config)
            out, lse = call(inputs, return_lse=True)
            assert built[-1] == config
            assert_right(inputs, out, lse)
        assert built == [first, second]

    def test_a_growing_cache_builds_once_a_power_of_two(self, built) -> None:
        buckets = []
        for length in (33, 48, 64):
            inputs = inputs_of(lengths=[length, 0, length], device=self.device)
            result = ops.resolve_paged_decode(inputs.q, inputs.kv_cache, inputs.kv_indices)
            buckets.append(result.problem.kv_len)
            assert_right(inputs, call(inputs), None)
        assert buckets == [32, 32, 64]
        assert len(built) == 2

    def test_requests_without_any_page(self) -> None:
        inputs = inputs_of(lengths=[0, 0, 0], device=self.device)
        out, lse = call(inputs, return_lse=True)
        assert out.abs().max() == 0
        assert torch.isneginf(lse).all()


@pytest.mark.interpreter
@pytest.mark.skipif(not IS_INTERPRETED, reason="set TRITON_INTERPRET=1 (make test does)")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
class TestInterpreted(OnADevice):
    device = "cpu"

    def sku(self):
        return catalog.gpu(catalog.gpu_names()[0])

    @pytest.fixture(autouse=True)
    def _shim(self) -> None:
        import interpreter_shim

        interpreter_shim.install()


@pytest.mark.gpu
class TestOnGpu(OnADevice):
    device = "cuda"

    def sku(self):
        return environment.current_device()

    def test_two_streams_do_not_share_scratch(self, built) -> None:
        inputs = inputs_of(device="cuda")
        self.write_winner(PROBLEM, joint_space(PROBLEM, self.sku()).default.replace(num_splits=2))
        outputs = [call(inputs)]
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            outputs.append(call(inputs))
        torch.cuda.synchronize()
        assert len(built) == 2
        for out in outputs:
            assert_right(inputs, out, None)

    def test_a_captured_graph_follows_the_lengths(self, built) -> None:
        inputs = inputs_of(device="cuda")
        out = torch.empty_like(inputs.q)
        call(inputs, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(inputs, out=out)
        assert len(built) == 1
        inputs.kv_last_page_len.sub_(1)
        inputs.q.mul_(0.5)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(inputs, out, None)
        assert_right(inputs, call(inputs), None)
        assert len(built) == 2

    def test_capture_of_shapes_never_called_is_refused(self) -> None:
        inputs = inputs_of(device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inputs.q.mul_(1.0)  # an empty graph would warn
            with pytest.raises(UsageError, match="call the function once"):
                call(inputs)
