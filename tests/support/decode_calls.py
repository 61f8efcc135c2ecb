"""Inputs of paged decode handed to the public functions, and what comes out compared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from tilescout import ops
from tilescout.kernels.paged_decode import PagedDecodeInputs, PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref

BASE: dict[str, Any] = {
    "batch": 3,
    "kv_len": 64,
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
    "dtype": "float16",
}


def problem_of(**changes: Any) -> PagedDecodeProblem:
    """A small problem with some fields changed."""
    return PagedDecodeProblem.from_dict({**BASE, **changes})


def pool_of(inputs: PagedDecodeInputs, layout: str = "NHD") -> torch.Tensor:
    """K and V in one new tensor of five dimensions, contiguous in this layout."""
    # Bytes are copied, not values: not every dtype here can be stacked.
    k, v = (x.view(torch.uint8) for x in (inputs.k_cache, inputs.v_cache))
    pool = torch.stack([k, v], dim=1)
    pool = pool.transpose(2, 3).contiguous() if layout == "HND" else pool.contiguous()
    return pool.view(inputs.k_cache.dtype)


def table_of(inputs: PagedDecodeInputs) -> ops.PageTable:
    """The page table of the inputs."""
    if inputs.seq_lens is not None:
        return ops.PageTable.dense(inputs.kv_indices, inputs.seq_lens)
    return ops.PageTable.csr(inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)


def table_arguments(inputs: PagedDecodeInputs) -> dict[str, torch.Tensor]:
    """The page table by the names that ``paged_decode`` takes."""
    if inputs.seq_lens is not None:
        return {"block_table": inputs.kv_indices, "seq_lens": inputs.seq_lens}
    names = ("kv_indptr", "kv_indices", "kv_last_page_len")
    return {name: getattr(inputs, name) for name in names}


def semantics_arguments(inputs: PagedDecodeInputs) -> dict[str, Any]:
    """Everything else that ``paged_decode`` takes by keyword, as the inputs have it."""
    names = ("sm_scale", "k_scale", "v_scale", "window_left", "is_causal", "soft_cap", "sinks")
    return {name: getattr(inputs, name) for name in (*names, "alibi_slopes", "rope")}


def call(inputs: PagedDecodeInputs, **changes: Any) -> Any:
    """``paged_decode`` of the inputs, K and V as a pair of views unless ``kv_cache`` is given."""
    arguments = {
        "kv_cache": (inputs.k_cache, inputs.v_cache),
        **table_arguments(inputs),
        **semantics_arguments(inputs),
        **changes,
    }
    return ops.paged_decode(inputs.q, **arguments)


def assert_right(
    inputs: PagedDecodeInputs, out: torch.Tensor, lse: torch.Tensor | None, lse_base: str = "2"
) -> None:
    """Compares output and LSE of every request with the fp32 reference."""
    assert inputs.batch <= 6, "only some requests of a larger batch are compared"
    comparison = ref.compare(None, inputs, PagedDecodeOutputs(out, lse, lse_base))
    assert comparison.reason is None


def assert_serves(inputs: PagedDecodeInputs, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls into outputs full of NaN, with an LSE, and checks the result against the reference."""
    shape = (*inputs.q.shape[:2], inputs.v_cache.shape[3])
    out = inputs.q.new_full(shape, math.nan)
    lse = out.new_full(shape[:2], math.nan, dtype=torch.float32)
    base = changes.get("lse_base", "2")
    call(inputs, out=out, lse=lse, **changes)
    expected = replace(inputs, sm_scale=changes.get("sm_scale", inputs.sm_scale))
    assert_right(expected, out, lse, base)
    return out, lse
