"""FlashInfer's paged-decode kernels as baselines: every backend that can serve a problem.

Planning runs before capture and is not timed, as in a serving loop. A wrapper keeps one page table,
so all copies of a cell must have equal tables: ``with_equal_tables``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from flashinfer_modules import XQA_PAGE_SIZES
from side_by_side import Baseline, Cell, LeftOutError
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.tuner.timers import Call

__all__ = ["BASELINES", "rms_bounds", "with_equal_tables"]

_WORKSPACE_BYTES = 512 << 20
XQA_FP8_RMS_BOUND = 0.05
"""XQA rounds q to 8 bits where the cache has 8; FlashInfer's own test of it allows 0.05."""


def with_equal_tables(inputs: list[Any]) -> list[Any]:
    """The copies with the first one's page table, each in memory of its own.

    Scales of an 8-bit cache become 1: FlashInfer multiplies the output by that of V in a launch of
    its own, which would be timed with it.
    """
    first = inputs[0]
    tables = ("kv_indices", "kv_indptr", "kv_last_page_len")
    return [
        replace(
            copy,
            **{name: getattr(first, name).clone() for name in tables},
            k_scale=1.0,
            v_scale=1.0,
        )
        for copy in inputs
    ]


def rms_bounds(problem: PagedDecodeProblem) -> dict[str, float]:
    """Errors that baselines may have where they compute in fewer bits than the reference."""
    return {"flashinfer:xqa": XQA_FP8_RMS_BOUND} if problem.kv_dtype == "float8_e4m3fn" else {}


def _pools(cell: Cell, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a copy in the layout that the problem names."""
    i = cell.inputs[index]
    if cell.problem.kv_layout == "HND":
        return i.k_cache.transpose(1, 2), i.v_cache.transpose(1, 2)
    return i.k_cache, i.v_cache


def _refuse_unserved(problem: PagedDecodeProblem) -> None:
    """Semantics that none of the backends here is set up for."""
    for name in ("has_sinks", "has_alibi", "has_rope", "is_latent"):
        if getattr(problem, name):
            raise LeftOutError(f"not set up for {name}")
    if problem.query_len > 1:
        raise LeftOutError(f"not set up for query_len={problem.query_len}")


def wrapper_calls(cell: Cell, *, backend: str, is_graph_wrapper: bool = True) -> list[Call]:
    """Launches of the decode wrapper.

    The graph wrapper has fixed buffers and a padded grid, as serving frameworks use it; the plain
    one, captured all the same, plans for exactly these lengths.

    Args:
        cell: problem, inputs and outputs.
        backend: ``cuda_cores``, or ``fa2`` or ``fa3`` for tensor cores.
        is_graph_wrapper: which of the two.
    """
    import flashinfer

    problem, first = cell.problem, cell.inputs[0]
    _refuse_unserved(problem)
    options: dict[str, Any] = {} if backend == "cuda_cores" else {"backend": backend}
    if is_graph_wrapper:
        options |= {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": torch.zeros_like(first.kv_indptr),
            "paged_kv_indices_buffer": torch.zeros_like(first.kv_indices),
            "paged_kv_last_page_len_buffer": torch.ones_like(first.kv_last_page_len),
        }
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        kv_layout=problem.kv_layout,
        use_tensor_cores=backend != "cuda_cores",
        **options,
    )
    wrapper.plan(
        first.kv_indptr,
        first.kv_indices,
        first.kv_last_page_len,
        problem.num_qo_heads,
        problem.num_kv_heads,
        problem.head_dim,
        problem.page_size,
        pos_encoding_mode="NONE",
        window_left=problem.window_left,
        logits_soft_cap=first.soft_cap or None,
        q_data_type=getattr(torch, problem.dtype),
        kv_data_type=getattr(torch, problem.kv_dtype),
        sm_scale=first.sm_scale,
    )
    return [
        partial(wrapper.run, i.q, _pools(cell, index), out=o.out)
        for index, (i, o) in enumerate(zip(cell.inputs, cell.outputs, strict=True))
    ]


def persistent_calls(cell: Cell) -> list[Call]:
    """Launches of ``BatchAttention``: a persistent kernel whose plan balances unequal lengths."""
    import flashinfer

    problem, first = cell.problem, cell.inputs[0]
    _refuse_unserved(problem)
    if problem.window_left >= 0:
        raise LeftOutError("BatchAttention has no sliding window")
    dtype, kv_dtype = getattr(torch, problem.dtype), getattr(torch, problem.kv_dtype)
    wrapper = flashinfer.BatchAttention(kv_layout=problem.kv_layout, device="cuda")
    wrapper.plan(
        torch.arange(problem.batch + 1, dtype=torch.int32, device="cuda"),
        first.kv_indptr,
        first.kv_indices,
        _lengths(cell),
        problem.num_qo_heads,
        problem.num_kv_heads,
        problem.head_dim,
        problem.head_dim,
        problem.page_size,
        causal=False,
        sm_scale=first.sm_scale,
        logits_soft_cap=first.soft_cap or None,
        q_data_type=dtype,
        kv_data_type=kv_dtype,
    )
    lse = torch.empty(first.q.shape[:2], dtype=torch.float32, device="cuda")
    return [
        partial(
            wrapper.run,
            i.q,
            _pools(cell, index),
            out=o.out,
            lse=lse,
            logits_soft_cap=first.soft_cap,
        )
        for index, (i, o) in enumerate(zip(cell.inputs, cell.outputs, strict=True))
    ]


def xqa_calls(cell: Cell) -> list[Call]:
    """Launches of the XQA kernel, which serves ``trtllm_batch_decode`` on Hopper."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    problem = cell.problem
    _refuse_unserved(problem)
    if problem.page_size not in XQA_PAGE_SIZES:
        allowed = ", ".join(map(str, XQA_PAGE_SIZES))
        raise LeftOutError(f"page_size={problem.page_size} is not one of {allowed}")
    if problem.has_soft_cap:
        raise LeftOutError("XQA has no soft cap")
    block_tables, seq_lens = _block_tables(cell), _lengths(cell)
    # Zero at first use: it holds counters.
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def call(index: int) -> None:
        i = cell.inputs[index]
        trtllm_batch_decode_with_kv_cache(
            i.q,
            _pools(cell, index),
            workspace,
            block_tables,
            seq_lens,
            problem.kv_len,
            bmm1_scale=i.sm_scale,
            bmm2_scale=1.0,
            window_left=problem.window_left,
            out=cell.outputs[index].out,
            kv_layout=problem.kv_layout,
            backend="xqa",
        )

    return [partial(call, index) for index in range(len(cell.inputs))]


def _lengths(cell: Cell) -> torch.Tensor:
    """Tokens of every request, int32 on the device."""
    first = cell.inputs[0]
    num_pages = first.kv_indptr.diff()
    whole = (num_pages - 1) * cell.problem.page_size + first.kv_last_page_len
    return torch.where(num_pages > 0, whole, 0).to(torch.int32)


def _block_tables(cell: Cell) -> torch.Tensor:
    """The dense page table of the first copy: ``[batch, most pages]``, page 0 past the end."""
    first = cell.inputs[0]
    ends = first.kv_indptr.tolist()
    rows = [first.kv_indices[a:b] for a, b in pairwise(ends)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


BASELINES: Mapping[str, Baseline] = {
    "flashinfer:fa2": partial(wrapper_calls, backend="cuda_cores"),
    "flashinfer:fa2_tc": partial(wrapper_calls, backend="fa2"),
    "flashinfer:fa2_tc_plain": partial(wrapper_calls, backend="fa2", is_graph_wrapper=False),
    "flashinfer:persistent": persistent_calls,
    "flashinfer:xqa": xqa_calls,
}
"""By name, in the order they are timed; FA3 has no split over tokens and is not among them."""
