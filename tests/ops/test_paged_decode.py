"""The public paged-decode function: which config it runs, what comes back, what it may not do."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from decode_calls import assert_right, call, problem_of, table_of
from tilescout import ops
from tilescout.errors import UnsupportedError, UsageError
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeInputs, PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.paged_decode.triton_template import PagedDecodeTriton
from tilescout.kernels.registry import template
from tilescout.ops.launchers import LauncherCache
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import catalog, dispatch, environment
from tilescout.tuner.records import Provenance
from torch.utils._python_dispatch import TorchDispatchMode
from winner_databases import MadeUpWinner, sibling_of, write_winners

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

PROBLEM = problem_of(lengths="mixed")
LENGTHS = [50, 0, 64]


def inputs_of(
    problem: PagedDecodeProblem = PROBLEM,
    lengths: list[int] = LENGTHS,
    device: str = "cpu",
    *,
    is_dense: bool = False,
) -> PagedDecodeInputs:
    return ref.paged_inputs(
        problem,
        lengths,
        device=device,
        seed=1,
        num_unused_pages=2,
        poison=True,
        is_dense=is_dense,
    )


def resolve(inputs: PagedDecodeInputs, **options):
    pair = (inputs.k_cache, inputs.v_cache)
    return ops.resolve_paged_decode(inputs.q, pair, table_of(inputs), **options)


@pytest.fixture(autouse=True)
def _fresh_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    monkeypatch.setenv("TILESCOUT_DB", str(tmp_path / "user.db"))
    dispatch.refresh()
    yield
    dispatch.refresh()


@pytest.fixture(autouse=True)
def _no_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("tilescout.ops.decode_launch")
    monkeypatch.setattr(module, "_launchers", LauncherCache())


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter runs CPU tensors")
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    with pytest.raises(UsageError, match=r"paged_decode got tensors on 'cpu'.*TRITON_INTERPRET=1"):
        call(inputs_of())
    with pytest.raises(UsageError, match=r"resolve_paged_decode got tensors on 'cpu'"):
        resolve(inputs_of())


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_a_launcher_is_built_for_the_fullest_table_without_allocating_it(
    monkeypatch: pytest.MonkeyPatch, is_dense: bool
) -> None:
    module = import_module("tilescout.ops.decode_launch")
    seen: list[torch.Tensor] = []
    fake = SimpleNamespace(build=lambda problem, config, inputs: seen.append(inputs.kv_indices))
    monkeypatch.setattr(module, "template", lambda *_: fake)
    bucket = replace(PROBLEM, kv_len=1 << 20)
    found = SimpleNamespace(op="paged_decode", template="fake", problem=bucket, config=None)
    module._build(found, inputs_of(is_dense=is_dense))
    (table,) = seen
    pages = (1 << 20) // PROBLEM.page_size
    assert table.shape == ((PROBLEM.batch, pages) if is_dense else (PROBLEM.batch * pages,))
    assert table.untyped_storage().nbytes() == table.element_size()


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_no_requests_give_empty_outputs(is_dense: bool) -> None:
    inputs = inputs_of(is_dense=is_dense)
    none = replace(
        inputs,
        q=inputs.q[:0],
        kv_indices=inputs.kv_indices[:0],
        kv_indptr=None if is_dense else inputs.kv_indptr[:1],
        kv_last_page_len=None if is_dense else inputs.kv_last_page_len[:0],
        seq_lens=inputs.seq_lens[:0] if is_dense else None,
    )
    out, lse = call(none, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((0, 4, 64), (0, 4), torch.float32)
    with pytest.raises(UsageError, match="page table of 0 requests"):
        resolve(none)


class OnADevice:
    """What holds wherever the kernel runs; ``device`` says where."""

    device: str

    def sku(self):
        raise NotImplementedError

    def default_config(self) -> Config:
        return joint_space(PROBLEM, self.sku()).default

    def write_winner(self, problem: PagedDecodeProblem, config: Config, **winner) -> None:
        path = Path(os.environ["TILESCOUT_DB"])
        write_winners(
            path, [MadeUpWinner(problem, **{"device": self.sku(), "config": config, **winner})]
        )
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

    def test_what_comes_back_is_what_was_asked_for(self) -> None:
        inputs = inputs_of(device=self.device)
        out = call(inputs)
        assert_right(inputs, out, None)
        given = torch.full_like(inputs.q, math.nan)
        lse = torch.full((3, 4), math.nan, device=self.device)
        assert call(inputs, out=given) is given
        assert torch.equal(given, out)
        results = call(inputs, out=given, lse=lse)
        assert results[0] is given
        assert results[1] is lse
        assert_right(inputs, *results)
        again = call(inputs, return_lse=True)
        assert torch.equal(again[1], lse)

    def test_another_scale_is_another_result(self) -> None:
        inputs = inputs_of(device=self.device)
        out = call(inputs, sm_scale=0.5)
        assert_right(replace(inputs, sm_scale=0.5), out, None)
        assert not ref.compare(PROBLEM, inputs, PagedDecodeOutputs(out, None)).is_ok
        assert_right(inputs, call(inputs, sm_scale=None), None)

    def test_another_winner_in_the_database_changes_the_config_that_runs(self, built) -> None:
        inputs = inputs_of(device=self.device)
        space = joint_space(PROBLEM, self.sku())
        first = space.default.replace(num_splits=2)
        second = space.default.replace(num_splits=2, block_n=16, num_stages=2)
        assert space.check(first) is space.check(second) is None
        for config in (first, second):
            self.write_winner(PROBLEM, config)
            result = resolve(inputs)
            assert (result.tier, result.config) == ("exact", config)
            out, lse = call(inputs, return_lse=True)
            assert built[-1] == config
            assert_right(inputs, out, lse)
        assert built == [first, second]

    def test_a_growing_cache_builds_once_a_power_of_two(self, built) -> None:
        buckets = []
        for length in (33, 48, 64):
            inputs = inputs_of(lengths=[length, 0, length], device=self.device)
            buckets.append(resolve(inputs).problem.kv_len)
            assert_right(inputs, call(inputs), None)
        assert buckets == [32, 32, 64]
        assert len(built) == 2

    def test_a_dense_table_counts_by_its_width(self, built) -> None:
        inputs = inputs_of(lengths=[3, 0, 64], device=self.device, is_dense=True)
        assert resolve(inputs).problem.kv_len == 64
        # Other rows of the same bucket, at another distance: the stride is part of the launcher.
        wide = inputs.kv_indices.new_zeros(3, 9)
        wide[:, :4] = inputs.kv_indices
        for table in (inputs.kv_indices, wide[:, :3], wide[:, :4]):
            narrow = replace(
                inputs, kv_indices=table, seq_lens=inputs.seq_lens.clamp_max(16 * table.shape[1])
            )
            assert_right(narrow, call(narrow), None)

    def test_the_problem_says_everything_that_a_winner_is_for(self) -> None:
        changes = {
            "query_len": 2,
            "window_left": 7,
            "has_sinks": True,
            "has_soft_cap": True,
            "kv_dtype": "float8_e4m3fn",
            "kv_layout": "HND",
            "lengths": "mixed",
        }
        inputs = inputs_of(problem_of(**changes), [64] * 3, self.device)
        options = {"sinks": inputs.sinks, "soft_cap": 3.0, "window_left": 7}
        assert resolve(inputs, **options).problem == problem_of(**changes)
        other = resolve(inputs, is_causal=False, rope=ops.Rope(), alibi_slopes=inputs.sinks).problem
        assert (other.is_causal, other.has_rope, other.has_alibi) == (False, True, True)

    def test_one_query_token_has_one_problem_causal_or_not(self) -> None:
        inputs = inputs_of(device=self.device)
        assert resolve(inputs, is_causal=False) == resolve(inputs)

    @pytest.mark.parametrize(
        ("tuned", "serves"),
        [
            ({}, ("default", "mixed")),
            ({"mixed": {}}, ("exact", "mixed")),
            ({"equal": {}}, ("exact", "equal")),
            ({"mixed": {}, "equal": {}}, ("exact", "mixed")),
            ({"mixed": {"kv_len": 128}, "equal": {}}, ("nearest", "mixed")),
            ({"mixed": {"provenance": Provenance.PREDICTED}, "equal": {}}, ("exact", "equal")),
            ({"mixed": {"sibling": True}, "equal": {"kv_len": 128}}, ("nearest", "equal")),
            ({"equal": {"provenance": Provenance.PREDICTED}}, ("predicted", "equal")),
            ({"skewed": {}}, ("default", "mixed")),
        ],
        ids=[
            *("nothing tuned", "mixed", "equal only", "both", "mixed is nearest"),
            *("mixed is predicted", "mixed is a sibling's", "equal is predicted", "skewed only"),
        ],
    )
    def test_unknown_lengths_take_mixed_where_it_was_measured_as_near(self, tuned, serves) -> None:
        for mix, how in tuned.items():
            problem = replace(PROBLEM, lengths=mix, kv_len=how.get("kv_len", 64))
            winner = {"provenance": how.get("provenance", Provenance.MEASURED)}
            if how.get("sibling"):
                winner["device"] = sibling_of(self.sku(), "another")
            self.write_winner(problem, self.default_config(), **winner)
        inputs = inputs_of(lengths=[64] * 3, device=self.device)
        found = resolve(inputs)
        assert (found.tier, found.problem.lengths) == serves
        # What does not serve is no miss.
        misses = [miss.problem.lengths for miss in dispatch.current_snapshot().misses]
        assert misses == ([] if serves[0] == "exact" else [serves[1]])

    def test_lengths_that_are_known_choose_their_winner(self, built) -> None:
        inputs = inputs_of(device=self.device)
        config = self.default_config().replace(num_splits=2)
        self.write_winner(replace(PROBLEM, lengths="skewed"), config)
        assert resolve(inputs).tier == "default"
        assert resolve(inputs, lengths="skewed").config == config
        assert_right(inputs, call(inputs, lengths="skewed"), None)
        assert built == [config]

    def test_what_no_template_serves_is_refused_with_its_reason(self) -> None:
        inputs = inputs_of(problem_of(head_dim=80), device=self.device)
        with pytest.raises(UnsupportedError, match=r"head_dim=80"):
            call(inputs)


@pytest.mark.interpreter
@pytest.mark.skipif(not IS_INTERPRETED, reason="set TRITON_INTERPRET=1 (make test does)")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
class TestTensorsThatATemplateRefuses:
    """Two templates serve the problem on an H200, and one of them is told to refuse tensors."""

    @pytest.fixture(autouse=True)
    def _h200(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = import_module("tilescout.ops.decode_launch")
        monkeypatch.setattr(module, "device_spec", lambda *_: catalog.gpu("h200"))

    def winner_of_another_template(self) -> tuple[Config, type]:
        spec = catalog.gpu("h200")
        problem = replace(PROBLEM, lengths="equal")
        space = joint_space(problem, spec).of("tilelang_gather")
        winner = MadeUpWinner(problem, spec, space.default)
        write_winners(Path(os.environ["TILESCOUT_DB"]), [winner])
        dispatch.refresh()
        return space.default, type(template("paged_decode", "tilelang_gather"))

    def test_another_template_serves_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config, other = self.winner_of_another_template()
        inputs = inputs_of()
        asked = []

        def refuse(self, problem, inputs, outputs=None):
            asked.append((problem, inputs, outputs))
            return "dense page tables" if inputs.seq_lens is not None else None

        monkeypatch.setattr(other, "supports_tensors", refuse)
        assert resolve(inputs).config == config
        dense = inputs_of(is_dense=True)
        found = resolve(dense)
        assert (found.template, found.tier) == ("triton", "default")
        assert found.config == joint_space(PROBLEM, catalog.gpu("h200")).default
        out, lse = call(dense, return_lse=True)
        assert_right(dense, out, lse)
        assert asked[-1][2].out is out

    def test_no_template_left_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("triton", "tilelang_gather", "tilelang_page"):
            kind = type(template("paged_decode", name))
            monkeypatch.setattr(kind, "supports_tensors", lambda *_: "no such rows")
        with pytest.raises(
            UnsupportedError,
            match=r"no template of paged_decode serves the tensors: paged_decode/triton: no such "
            r"rows; paged_decode/tilelang_gather: no such rows",
        ):
            resolve(inputs_of())


class NoReads(TorchDispatchMode):
    """Refuses what would read a value of a tensor or move one between devices."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "equal",
        "_to_copy",
        "copy_",
        "is_nonzero",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{name} reads values"
        return func(*args, **(kwargs or {}))


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

    @pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
    def test_up_to_the_launch_no_value_is_read(self, is_dense: bool, monkeypatch) -> None:
        launched = []

        class Recorder:
            def launch(self, inputs, outputs) -> None:
                launched.append((inputs, outputs))

        monkeypatch.setattr(PagedDecodeTriton, "build", lambda *_: Recorder())
        inputs = inputs_of(problem_of(has_sinks=True), is_dense=is_dense)
        with NoReads():
            out, lse = call(inputs, return_lse=True, k_scale=torch.ones(1), v_scale=2.0)
        ((given, outputs),) = launched
        assert outputs.out is out
        assert outputs.lse is lse
        assert torch.equal(given.v_scale, torch.tensor([2.0]))
        with pytest.raises(AssertionError, match="reads values"), NoReads():
            bool(inputs.q.any())


@pytest.mark.gpu
class TestOnGpu(OnADevice):
    device = "cuda"

    def sku(self):
        return environment.current_device()

    def test_two_streams_do_not_share_scratch(self, built) -> None:
        inputs = inputs_of(device="cuda")
        self.write_winner(PROBLEM, self.default_config().replace(num_splits=2))
        outputs = [call(inputs)]
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            outputs.append(call(inputs))
        torch.cuda.synchronize()
        assert len(built) == 2
        for out in outputs:
            assert_right(inputs, out, None)

    def test_a_captured_graph_owns_its_launcher(self, built) -> None:
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
