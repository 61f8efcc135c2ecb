"""The public paged-decode function: what it refuses, which config it runs, what it may not do."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from decode_calls import assert_right, call, pool_of, problem_of, table_of
from tilescout import ops
from tilescout.errors import UnsupportedError, UsageError
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeInputs, PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.paged_decode.triton_template import PagedDecodeTriton
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


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values, the last dimension two elements apart."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


WRONG = {
    "q of two dimensions": (
        lambda i: {"q": i.q[0]},
        r"shape of q in paged_decode is \(4, 64\): must be \[batch \* query_len, num_qo_heads",
    ),
    "q in fp32": (
        lambda i: {"q": i.q.float()},
        r"dtype of q .*float32: must be torch\.bfloat16 or torch\.float16",
    ),
    "q with strided rows": (lambda i: {"q": strided(i.q)}, r"last stride of q .* is 2: must be 1"),
    "rows that are no multiple of the batch": (
        lambda i: {"q": i.q[:2]},
        r"rows of q in paged_decode is 2: must be a multiple of the 3 requests",
    ),
    "no rows": (lambda i: {"q": i.q[:0]}, r"rows of q .* is 0: must be a multiple of the 3"),
    "heads that do not divide": (
        lambda i: {"q": i.q[:, :3]},
        r"num_qo_heads of q .* is 3: must be a multiple of the 2 KV heads",
    ),
    "cache without the K and V axis": (
        lambda i: {"kv_cache": i.k_cache},
        r"shape of kv_cache .*must be \[num_pages, 2, page_size, num_kv_heads, 64\] \(NHD",
    ),
    "cache of another head_dim": (
        lambda i: {"kv_cache": pool_of(i)[..., :32]},
        r"shape of kv_cache .*32\): must be",
    ),
    "K before V in one tensor": (
        lambda i: {"kv_cache": pool_of(i).transpose(0, 1)},
        r"shape of kv_cache .*pass kv_cache\.unbind\(0\) where K and V come before the pages",
    ),
    "three caches": (
        lambda i: {"kv_cache": (i.k_cache,) * 3},
        r"length of kv_cache in paged_decode is 3: must be 2",
    ),
    "V of another size": (
        lambda i: {"kv_cache": (i.k_cache, i.v_cache[:-1])},
        r"shape of kv_cache\[1\] .*must be that of K, .*for MLA call mla_decode",
    ),
    "V of another head_dim": (
        lambda i: {"kv_cache": (i.k_cache, i.v_cache[..., :32])},
        r"shape of kv_cache\[1\] .*must be \[num_pages, page_size, num_kv_heads, 64\]",
    ),
    "cache of another dtype": (
        lambda i: {"kv_cache": pool_of(i).bfloat16()},
        r"dtype of kv_cache .*bfloat16: must be that of q, torch\.float16, or "
        r"torch\.float8_e4m3fn or torch\.float8_e5m2",
    ),
    "bytes without a name": (
        lambda i: {"kv_cache": pool_of(i).to(torch.uint8)},
        r"dtype of kv_cache .*uint8: must be named by kv_dtype= where it is torch\.uint8: "
        r"float8_e4m3fn or float8_e5m2",
    ),
    "bytes with a wide name": (
        lambda i: {"kv_cache": pool_of(i).to(torch.uint8), "kv_dtype": "bfloat16"},
        r"must be named by kv_dtype=",
    ),
    "kv_dtype that is not the cache's": (
        lambda i: {"kv_dtype": "float8_e5m2"},
        r"dtype of kv_cache\[0\] .*float16: must be torch\.float8_e5m2, as kv_dtype says",
    ),
    "unknown kv_dtype": (
        lambda i: {"kv_dtype": "int4"},
        r"kv_dtype='int4' of paged_decode: one of bfloat16, float16, float8_e4m3fn, float8_e5m2",
    ),
    "unknown layout": (
        lambda i: {"kv_layout": "HDN"},
        r"kv_layout='HDN' of paged_decode: one of NHD, HND",
    ),
    "strided V": (
        lambda i: {"kv_cache": (i.k_cache, strided(i.v_cache))},
        r"last stride of kv_cache\[1\] .* is 2: must be 1",
    ),
    "cache elsewhere": (
        lambda i: {"kv_cache": pool_of(i).to("meta")},
        r"device of kv_cache .*'meta': must be that of q, cpu",
    ),
    "two tables": (
        lambda i: {"block_table": i.kv_indices[None], "seq_lens": i.kv_last_page_len},
        r"paged_decode got kv_indptr, .*, block_table, seq_lens: it takes kv_indptr, kv_indices "
        r"and kv_last_page_len \(CSR\), or block_table and seq_lens \(dense\)",
    ),
    "no table": (
        lambda i: dict.fromkeys(("kv_indptr", "kv_indices", "kv_last_page_len")),
        r"paged_decode got no page table: it takes",
    ),
    "half a table": (
        lambda i: {"kv_indptr": None},
        r"paged_decode got kv_indices, kv_last_page_len: it takes",
    ),
    "indptr too short": (
        lambda i: {"kv_indptr": i.kv_indptr[:-1]},
        r"shape of kv_indptr in paged_decode is \(3,\): must be \[4\], by the number of requests",
    ),
    "int64 indices": (
        lambda i: {"kv_indices": i.kv_indices.long()},
        r"dtype of kv_indices .*int64: must be torch\.int32: call \.to\(torch\.int32\)",
    ),
    "strided indices": (
        lambda i: {"kv_indices": strided(i.kv_indices)},
        r"stride of kv_indices .*\(2,\): must be \(1,\): call \.contiguous\(\)",
    ),
    "indices of two dimensions": (
        lambda i: {"kv_indices": i.kv_indices[None]},
        r"shape of kv_indices .*: must be one dimension",
    ),
    "table elsewhere": (
        lambda i: {"kv_indptr": i.kv_indptr.to("meta")},
        r"device of kv_indptr .*'meta': must be that of q, 'cpu'",
    ),
    "scale that is not a number": (
        lambda i: {"sm_scale": math.nan},
        r"sm_scale=nan of paged_decode must be finite",
    ),
    "scale of q on the device": (
        lambda i: {"q_scale": torch.ones(1)},
        r"q_scale of paged_decode is a tensor: must be a number",
    ),
    "scale of K for each head": (
        lambda i: {"k_scale": torch.ones(2)},
        r"k_scale .*float32, \(2,\)\): must be a number, or torch\.float32 of one element",
    ),
    "scale of V in half": (
        lambda i: {"v_scale": torch.ones(1).half()},
        r"v_scale .*float16, \(1,\)\): must be a number",
    ),
    "scale elsewhere": (
        lambda i: {"k_scale": torch.ones(1, device="meta")},
        r"device of k_scale .*'meta': must be that of q, 'cpu'",
    ),
    "window of less than nothing": (
        lambda i: {"window_left": -2},
        r"window_left=-2 of paged_decode must be -1 \(no window\) or the number of tokens",
    ),
    "window of a fraction": (lambda i: {"window_left": 1.5}, r"window_left=1\.5"),
    "negative cap": (
        lambda i: {"soft_cap": -1.0},
        r"soft_cap=-1\.0 of paged_decode must be above 0, or None",
    ),
    "cap and ALiBi": (
        lambda i: {"soft_cap": 1.0, "alibi_slopes": torch.ones(4)},
        r"soft_cap and alibi_slopes of paged_decode exclude each other: kernels disagree",
    ),
    "sinks of another number": (
        lambda i: {"sinks": torch.ones(2)},
        r"shape of sinks in paged_decode is \(2,\): must be \[4\]",
    ),
    "sinks in bf16": (
        lambda i: {"sinks": torch.ones(4).bfloat16()},
        r"dtype of sinks .*bfloat16: must be torch\.float32: call \.float\(\) once",
    ),
    "strided slopes": (
        lambda i: {"alibi_slopes": strided(torch.ones(4))},
        r"stride of alibi_slopes .*\(2,\): must be \(1,\)",
    ),
    "rope that is a number": (
        lambda i: {"rope": 10000.0},
        r"rope=10000\.0 of paged_decode must be a Rope\(theta=\.\.\., scale=\.\.\.\)",
    ),
    "rope without a base": (
        lambda i: {"rope": ops.Rope(theta=0.0)},
        r"rope theta=0\.0 of paged_decode must be above 0 and finite",
    ),
    "unknown mix": (
        lambda i: {"lengths": "long"},
        r"lengths='long' of paged_decode: one of equal, skewed, uniform, mixed, or None",
    ),
    "unknown base": (
        lambda i: {"lse_base": 2},
        r"lse_base=2 of paged_decode must be '2' or 'e'",
    ),
    "out of another shape": (
        lambda i: {"out": i.q[:2].clone()},
        r"shape of out in paged_decode is \(2, 4, 64\): must be \[3, 4, 64\]",
    ),
    "out in fp32": (lambda i: {"out": i.q.float()}, r"dtype of out .*float32: must be"),
    "out elsewhere": (lambda i: {"out": i.q.to("meta")}, r"device of out .*'meta'"),
    "strided out": (lambda i: {"out": strided(i.q)}, r"last stride of out .* is 2: must be 1"),
    "out over q": (
        lambda i: {"out": i.q},
        r"out of paged_decode is q itself: other blocks still read q; pass another",
    ),
    "lse of one dimension": (
        lambda i: {"lse": torch.empty(12)},
        r"shape of lse in paged_decode is \(12,\): must be \[3, 4\]",
    ),
    "lse in half": (lambda i: {"lse": torch.empty(3, 4).half()}, r"dtype of lse .*float16"),
    "strided lse": (
        lambda i: {"lse": torch.empty(4, 3).t()},
        r"stride of lse .*: must be that of a contiguous tensor",
    ),
    "q that requires grad": (
        lambda i: {"q": i.q.clone().requires_grad_()},
        r"an input of paged_decode requires grad, and there is no backward",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    change, message = WRONG[case]
    inputs = inputs_of()
    changes = change(inputs)
    inputs = replace(inputs, q=changes.pop("q", inputs.q))
    with pytest.raises(UsageError, match=message):
        call(inputs, **changes)


WRONG_DENSE = {
    "one row too few": (
        lambda i: {"block_table": i.kv_indices[:2]},
        r"shape of block_table .*must be \[3, max_pages\], by the number of requests",
    ),
    "table of one dimension": (
        lambda i: {"block_table": i.kv_indices[0]},
        r"shape of block_table .*must be \[3, max_pages\]",
    ),
    "int64 table": (
        lambda i: {"block_table": i.kv_indices.long()},
        r"dtype of block_table .*int64: must be torch\.int32",
    ),
    "table with strided rows": (
        lambda i: {"block_table": strided(i.kv_indices)},
        r"last stride of block_table .* is 2: must be 1",
    ),
    "lengths of two dimensions": (
        lambda i: {"seq_lens": i.seq_lens[None]},
        r"shape of seq_lens .*must be one dimension",
    ),
    "lengths on another device": (
        lambda i: {"seq_lens": i.seq_lens.to("meta")},
        r"device of seq_lens .*'meta': must be that of q, 'cpu'",
    ),
}


@pytest.mark.parametrize("case", WRONG_DENSE)
def test_wrong_dense_tables_are_named(case: str) -> None:
    change, message = WRONG_DENSE[case]
    inputs = inputs_of(is_dense=True)
    with pytest.raises(UsageError, match=message):
        call(inputs, **change(inputs))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter runs CPU tensors")
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    with pytest.raises(UsageError, match=r"paged_decode got tensors on 'cpu'.*TRITON_INTERPRET=1"):
        call(inputs_of())
    with pytest.raises(UsageError, match=r"resolve_paged_decode got tensors on 'cpu'"):
        resolve(inputs_of())


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
