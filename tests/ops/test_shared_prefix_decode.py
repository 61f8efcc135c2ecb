"""Two-level decode over shared prefixes: equal to decode over prefix and suffix in one table."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from decode_calls import assert_right, pool_of, problem_of
from gpu_modes import waiting_forbidden
from tilescout import ops
from tilescout.errors import UsageError
from tilescout.kernels.paged_decode import PagedDecodeInputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.paged_decode.triton_template import PagedDecodeTriton
from tilescout.ops.launchers import LauncherCache
from tilescout.tuner import dispatch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Shared(NamedTuple):
    """Requests that share prefixes, and the same requests with everything in one table."""

    inputs: PagedDecodeInputs
    prefix: ops.PageTable
    suffix: ops.PageTable
    whole: PagedDecodeInputs


def make(
    prefixes: list[int],
    suffixes: list[int],
    *,
    device: str = "cpu",
    is_dense: bool = False,
    **changes,
) -> Shared:
    """One pool with the pages of all; ``whole`` names every token of it in pages of one."""
    problem = problem_of(**changes)
    groups, batch = len(prefixes), len(suffixes)
    inputs = ref.paged_inputs(
        problem,
        [*prefixes, *suffixes],
        device=device,
        seed=1,
        num_unused_pages=2,
        poison=True,
        is_dense=is_dense,
    )
    inputs = replace(inputs, q=inputs.q[groups * problem.query_len :])
    rows = []
    for i, length in enumerate([*prefixes, *suffixes]):
        pages = pages_of(inputs, i).long()
        tokens = pages[:, None] * problem.page_size + torch.arange(problem.page_size, device=device)
        rows.append(tokens.flatten()[:length])
    joined = [torch.cat([rows[i * groups // batch], rows[groups + i]]) for i in range(batch)]
    table = torch.full((batch, max(map(len, joined))), -1, dtype=torch.int32, device=device)
    for row, tokens in zip(table, joined, strict=True):
        row[: len(tokens)] = tokens
    whole = replace(
        inputs,
        k_cache=inputs.k_cache.flatten(0, 1)[:, None],
        v_cache=inputs.v_cache.flatten(0, 1)[:, None],
        kv_indices=table,
        kv_indptr=None,
        kv_last_page_len=None,
        seq_lens=torch.tensor([len(tokens) for tokens in joined], device=device),
    )
    if is_dense:
        prefix = ops.PageTable.dense(inputs.kv_indices[:groups], inputs.seq_lens[:groups])
        suffix = ops.PageTable.dense(inputs.kv_indices[groups:], inputs.seq_lens[groups:])
    else:
        first = (inputs.kv_indptr[: groups + 1], inputs.kv_indptr[groups:])
        last = inputs.kv_last_page_len
        prefix = ops.PageTable.csr(first[0], inputs.kv_indices, last[:groups])
        suffix = ops.PageTable.csr(first[1], inputs.kv_indices, last[groups:])
    return Shared(inputs, prefix, suffix, whole)


def pages_of(inputs: PagedDecodeInputs, request: int) -> torch.Tensor:
    if inputs.seq_lens is not None:
        return inputs.kv_indices[request][: -(-int(inputs.seq_lens[request]) // inputs.page_size)]
    first, end = inputs.kv_indptr[request : request + 2].tolist()
    return inputs.kv_indices[first:end]


def call(shared: Shared, **changes):
    inputs = shared.inputs
    arguments = {
        "kv_cache": (inputs.k_cache, inputs.v_cache),
        "prefix": shared.prefix,
        "suffix": shared.suffix,
        **{name: getattr(inputs, name) for name in ("sm_scale", "k_scale", "v_scale")},
        **{name: getattr(inputs, name) for name in ("is_causal", "soft_cap", "sinks")},
        **changes,
    }
    return ops.shared_prefix_decode(inputs.q, **arguments)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    monkeypatch.setenv("TILESCOUT_DB", str(tmp_path / "user.db"))
    for name in ("decode_launch", "attention_states"):
        module = import_module(f"tilescout.ops.{name}")
        monkeypatch.setattr(module, "_launchers", LauncherCache())
    dispatch.refresh()
    yield
    dispatch.refresh()


CASES = {
    "plain": ([48], [5, 20, 33], {}),
    "prefix that ends within a page": ([41], [5, 20, 33], {}),
    "prefix of one token": ([1], [5, 1, 33], {}),
    "no prefix": ([0], [5, 0, 33], {}),
    "empty suffixes": ([20], [0, 7, 0], {}),
    "two groups": ([40, 17], [5, 20, 33, 2], {}),
    "two groups, one without a prefix": ([0, 17], [0, 20, 33, 0], {}),
    "a group for each request": ([40, 17], [5, 20], {}),
    "query tokens": ([40], [5, 2, 33], {"query_len": 2}),
    "query tokens that see each other": ([40], [5, 3], {"query_len": 3, "is_causal": False}),
    "sinks": ([40], [5, 0, 33], {"has_sinks": True}),
    "sinks, two groups, query tokens": (
        [40, 0],
        [5, 2, 33, 9],
        {"has_sinks": True, "query_len": 2},
    ),
    "soft cap": ([40], [5, 33], {"has_soft_cap": True}),
    "fp8, group of five": ([40], [5, 33], {"kv_dtype": "float8_e4m3fn", "num_qo_heads": 10}),
    "bfloat16, small pages": ([40], [5, 33], {"dtype": "bfloat16", "page_size": 7}),
}


class OnADevice:
    """What holds wherever the kernels run; ``device`` says where."""

    device: str

    @pytest.mark.parametrize("case", CASES)
    def test_equals_decode_over_prefix_and_suffix_together(self, case: str) -> None:
        prefixes, suffixes, changes = CASES[case]
        is_dense = "group" in case
        shared = make(prefixes, suffixes, device=self.device, is_dense=is_dense, **changes)
        out = torch.full_like(shared.inputs.q, math.nan)
        lse = out.new_full(out.shape[:2], math.nan, dtype=torch.float32)
        results = call(shared, out=out, lse=lse, lse_base="e")
        assert results[0] is out
        assert results[1] is lse
        assert_right(shared.whole, out, lse, "e")

    def test_the_other_base_and_what_comes_back(self) -> None:
        shared = make([40], [5, 20], device=self.device)
        out, lse = call(shared, return_lse=True)
        assert_right(shared.whole, out, lse)
        with pytest.raises(AssertionError):
            assert_right(shared.whole, out, lse, "e")
        assert torch.equal(call(shared), out)

    def test_layouts_are_equal_bit_for_bit(self) -> None:
        shared = make([40], [5, 20], device=self.device)
        expected = call(shared)
        for layout in ("NHD", "HND"):
            pool = pool_of(shared.inputs, layout)
            assert torch.equal(call(shared, kv_cache=pool, kv_layout=layout), expected)

    def test_the_prefix_is_one_request_whose_pages_stand_there_once(self, monkeypatch) -> None:
        built: list[tuple[PagedDecodeProblem, PagedDecodeInputs]] = []
        build = PagedDecodeTriton.build

        def spy(template, problem, config, inputs):
            built.append((problem, inputs))
            return build(template, problem, config, inputs)

        monkeypatch.setattr(PagedDecodeTriton, "build", spy)
        shared = make([64, 32], [5, 20, 33, 2], device=self.device, is_dense=True, query_len=2)
        assert_right(shared.whole, call(shared), None)
        (first, prefix), (second, suffix) = built
        assert (first.batch, first.query_len, first.is_causal) == (2, 4, False)
        assert (second.batch, second.query_len, second.is_causal) == (4, 2, True)
        # A prefix of four pages and one of two stand in a row each, not in those of the requests.
        assert prefix.seq_lens.tolist() == [64, 32]
        assert suffix.seq_lens.tolist() == [5, 20, 33, 2]

    def test_inputs_are_not_modified(self) -> None:
        shared = make([40], [5, 20], device=self.device, has_sinks=True)
        inputs = shared.inputs
        tensors = [inputs.q, inputs.k_cache, inputs.v_cache, inputs.sinks, inputs.kv_indices]
        tensors += [inputs.kv_indptr, inputs.kv_last_page_len]
        before = [t.clone().contiguous().view(torch.uint8) for t in tensors]
        call(shared)
        for tensor, copy in zip(tensors, before, strict=True):
            assert torch.equal(tensor.contiguous().view(torch.uint8), copy)


@pytest.mark.interpreter
@pytest.mark.skipif(not IS_INTERPRETED, reason="set TRITON_INTERPRET=1 (make test does)")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
class TestInterpreted(OnADevice):
    device = "cpu"

    @pytest.fixture(autouse=True)
    def _shim(self) -> None:
        import interpreter_shim

        interpreter_shim.install()


@pytest.mark.gpu
class TestOnGpu(OnADevice):
    device = "cuda"

    def test_a_captured_graph_serves_other_lengths(self) -> None:
        shared = make([64], [30, 30], device="cuda", is_dense=True)
        out, lse = call(shared, return_lse=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(shared, out=out, lse=lse)
        for prefix, suffixes in ((64, [30, 30]), (17, [1, 30]), (0, [9, 0])):
            shared.prefix.seq_lens.copy_(torch.tensor([prefix]))
            shared.suffix.seq_lens.copy_(torch.tensor(suffixes))
            rows = [[*range(prefix), *range(64, 64 + n)] for n in suffixes]
            table = torch.zeros(2, 94, dtype=torch.int32, device="cuda")
            for i, row in enumerate(rows):
                table[i, : len(row)] = shared.whole.kv_indices[i][row]
            lengths = torch.tensor([len(row) for row in rows], device="cuda")
            out.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert_right(replace(shared.whole, kv_indices=table, seq_lens=lengths), out, lse)

    def test_no_call_waits_for_the_device(self) -> None:
        shared = make([64], [30, 30], device="cuda")
        call(shared)
        with waiting_forbidden():
            out, lse = call(shared, return_lse=True)
        assert_right(shared.whole, out, lse)


WRONG = {
    "groups that do not divide": (
        lambda s: {"prefix": make([8, 8], [1, 1, 1]).prefix},
        r"number of groups in prefix in shared_prefix_decode is 2: must be a divisor of the 3 "
        r"requests of suffix",
    ),
    "a tuple for a table": (
        lambda s: {"suffix": (1, 2, 3)},
        r"suffix of shared_prefix_decode is a tuple: must be PageTable\.csr\(kv_indptr",
    ),
    "a wrong prefix table": (
        lambda s: {"prefix": replace(s.prefix, indices=s.prefix.indices.long())},
        r"dtype of prefix kv_indices in shared_prefix_decode is torch\.int64",
    ),
    "a wrong suffix table": (
        lambda s: {"suffix": replace(s.suffix, indptr=s.suffix.indptr[1:])},
        r"shape of kv_indptr in shared_prefix_decode is \(3,\): must be \[4\]",
    ),
    "a suffix for other requests": (
        lambda s: {"suffix": make([8], [1, 1]).suffix},
        r"rows of q in shared_prefix_decode is 3: must be a multiple of the 2 requests",
    ),
    "an unknown mix": (lambda s: {"lengths": "long"}, r"lengths='long' of shared_prefix_decode"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    change, message = WRONG[case]
    shared = make([8], [1, 1, 1])
    with pytest.raises(UsageError, match=message):
        call(shared, **change(shared))


@pytest.mark.parametrize("name", ["window_left", "alibi_slopes", "rope"])
def test_what_depends_on_positions_is_not_taken(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        call(make([8], [1, 1, 1]), **{name: 1})
