"""MLA decode through the public function: its forms, its semantics, what it refuses."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from decode_calls import assert_right, problem_of, table_arguments
from tilescout import ops
from tilescout.errors import UsageError
from tilescout.kernels.paged_decode import PagedDecodeInputs
from tilescout.kernels.paged_decode import reference as ref
from tilescout.ops.launchers import LauncherCache
from tilescout.tuner import dispatch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

LATENT = {
    "num_kv_heads": 1,
    "head_dim": 192,
    "head_dim_v": 128,
    "dtype": "bfloat16",
}
"""Small sizes; 576 and 512 have a case of their own."""

CASES = {
    "plain": {},
    "DeepSeek's sizes": {"head_dim": 576, "head_dim_v": 512, "num_qo_heads": 16},
    "five heads": {"num_qo_heads": 5},
    "float16": {"dtype": "float16"},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "page size 1": {"page_size": 1},
    "page size 48": {"page_size": 48},
    "query tokens": {"query_len": 3},
    "query tokens that see each other": {"query_len": 2, "is_causal": False},
    "window": {"window_left": 20},
    "soft cap": {"has_soft_cap": True},
    "sinks": {"has_sinks": True},
    "window, sinks, query tokens": {"window_left": 9, "has_sinks": True, "query_len": 2},
}


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    monkeypatch.setenv("TILESCOUT_DB", str(tmp_path / "user.db"))
    module = import_module("tilescout.ops.decode_launch")
    monkeypatch.setattr(module, "_launchers", LauncherCache())
    dispatch.refresh()
    yield
    dispatch.refresh()


def make(device: str = "cpu", *, is_dense: bool = False, **changes) -> PagedDecodeInputs:
    inputs = ref.paged_inputs(
        problem_of(**{**LATENT, **changes}),
        [50, 0, 64],
        device=device,
        seed=1,
        num_unused_pages=2,
        poison=True,
        is_dense=is_dense,
    )
    return replace(inputs, v_scale=inputs.k_scale)  # a row has one scale


def call(inputs: PagedDecodeInputs, **changes):
    arguments = {
        "q": inputs.q,
        "kv_cache": inputs.k_cache[:, :, 0],
        "head_dim_v": inputs.v_cache.shape[3],
        **table_arguments(inputs),
        **{name: getattr(inputs, name) for name in ("sm_scale", "window_left", "is_causal")},
        **{name: getattr(inputs, name) for name in ("soft_cap", "sinks")},
        "kv_scale": inputs.k_scale,
        **changes,
    }
    return ops.mla_decode(**arguments)


class OnADevice:
    """What holds wherever the kernel runs; ``device`` says where."""

    device: str

    @pytest.mark.parametrize("case", CASES)
    def test_matches_the_reference(self, case: str) -> None:
        is_dense = "window" in case
        inputs = make(self.device, is_dense=is_dense, **CASES[case])
        out = inputs.q.new_full((*inputs.q.shape[:2], inputs.v_cache.shape[3]), math.nan)
        results = call(inputs, out=out, return_lse=True, lse_base="e")
        assert results[0] is out
        assert_right(inputs, *results, "e")
        without = call(inputs)
        assert torch.equal(without, out)

    def test_two_views_of_one_tensor_are_no_copy(self) -> None:
        inputs = make(self.device)
        expected = call(inputs)
        rows = inputs.k_cache[:, :, 0]
        pairs = {
            "q": (inputs.q[..., :128], inputs.q[..., 128:]),
            "kv_cache": (rows[..., :128], rows[..., 128:]),
        }
        assert torch.equal(call(inputs, **pairs), expected)
        spaced = torch.full((*rows.shape[:2], 256), math.nan, dtype=rows.dtype, device=rows.device)
        spaced[..., :192] = rows
        pairs["kv_cache"] = (spaced[..., :128], spaced[..., 128:192])
        assert torch.equal(call(inputs, **pairs), expected)

    def test_bytes_are_what_kv_dtype_says(self) -> None:
        inputs = make(self.device, kv_dtype="float8_e4m3fn")
        rows = inputs.k_cache[:, :, 0]
        out = call(inputs, kv_cache=rows.view(torch.uint8), kv_dtype="float8_e4m3fn")
        assert torch.equal(out, call(inputs))

    def test_a_scale_of_the_rows_counts_for_keys_and_values(self) -> None:
        inputs = make(self.device)
        plain = replace(inputs, k_scale=0.5, v_scale=0.5, sm_scale=2 * inputs.sm_scale)
        out, lse = call(inputs, kv_scale=0.5, q_scale=2.0, return_lse=True)
        assert_right(plain, out, lse)
        on_device = torch.full((1,), 0.5, device=self.device)
        out, lse = call(inputs, kv_scale=on_device, q_scale=2.0, return_lse=True)
        assert_right(plain, out, lse)

    def test_inputs_are_not_modified(self) -> None:
        inputs = make(self.device)
        tensors = (inputs.q, inputs.k_cache, *table_arguments(inputs).values())
        before = [t.clone().view(torch.uint8) for t in tensors]
        call(inputs)
        for tensor, copy in zip(tensors, before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), copy)


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
        inputs = make("cuda", is_dense=True)
        out, lse = call(inputs, return_lse=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(inputs, out=out, lse=lse)
        for lengths in ([17, 0, 3], [50, 0, 64]):
            inputs.seq_lens.copy_(torch.tensor(lengths))
            out.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert_right(inputs, out, lse)


WRONG = {
    "parts of two tensors": (
        lambda i: {"q": (i.q[..., :128].clone(), i.q[..., 128:].clone())},
        r"the two parts of q in mla_decode must be neighbouring views of one tensor, q\[\.\.\., "
        r":n\] and q\[\.\.\., n:\]: joining \(3, 4, 128\) and \(3, 4, 64\) would copy",
    ),
    "parts in the wrong order": (
        lambda i: {"kv_cache": (i.k_cache[:, :, 0, 128:], i.k_cache[:, :, 0, :128])},
        r"the two parts of kv_cache in mla_decode must be neighbouring views",
    ),
    "parts that overlap": (
        lambda i: {"q": (i.q[..., :128], i.q[..., 64:])},
        r"the two parts of q in mla_decode must be neighbouring views",
    ),
    "three parts": (lambda i: {"q": (i.q,) * 3}, r"length of q in mla_decode is 3: must be 2"),
    "cache of four dimensions": (
        lambda i: {"kv_cache": i.k_cache},
        r"shape of kv_cache in mla_decode .*must be \[num_pages, page_size, 192\], 192 as in q",
    ),
    "cache of another width": (
        lambda i: {"kv_cache": i.k_cache[:, :, 0, :128]},
        r"shape of kv_cache in mla_decode .*128\): must be \[num_pages, page_size, 192\]",
    ),
    "value as wide as the row": (
        lambda i: {"head_dim_v": 192},
        r"head_dim_v=192 of mla_decode must be from 1 to 191",
    ),
    "cache of another dtype": (
        lambda i: {"kv_cache": i.k_cache[:, :, 0].half()},
        r"dtype of kv_cache in mla_decode .*float16: must be that of q, torch\.bfloat16",
    ),
    "cache elsewhere": (
        lambda i: {"kv_cache": i.k_cache[:, :, 0].to("meta")},
        r"device of kv_cache in mla_decode is 'meta'",
    ),
    "no table": (
        lambda i: dict.fromkeys(("kv_indptr", "kv_indices", "kv_last_page_len")),
        r"mla_decode got no page table",
    ),
    "value size of a fraction": (
        lambda i: {"head_dim_v": 128.0},
        r"head_dim_v=128\.0 of mla_decode must be from 1 to 191",
    ),
    "no scale": (
        lambda i: {"sm_scale": None},
        r"sm_scale of mla_decode is None: must be a number, the head size before absorption",
    ),
    "part that is no tensor": (
        lambda i: {"q": (i.q[..., :128], None)},
        r"type of q\[1\] in mla_decode is 'NoneType': must be torch\.Tensor",
    ),
    "no query": (lambda i: {"q": None}, r"type of q in mla_decode is 'NoneType': must be"),
    "out over q": (
        lambda i: {"out": i.q[..., :128]},
        r"out of mla_decode shares memory with q",
    ),
    "out as wide as q": (
        lambda i: {"out": i.q.clone()},
        r"shape of out in mla_decode is \(3, 4, 192\): must be \[3, 4, 128\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    change, message = WRONG[case]
    inputs = make()
    with pytest.raises(UsageError, match=message):
        call(inputs, **change(inputs))


def test_the_scale_has_no_default() -> None:
    inputs = make()
    with pytest.raises(TypeError, match="sm_scale"):
        ops.mla_decode(inputs.q, inputs.k_cache[:, :, 0], **table_arguments(inputs))
