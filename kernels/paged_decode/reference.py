"""Plain-torch paged decode in fp32, and the comparison with a tolerance."""

from __future__ import annotations

import math

import torch

from ..base import Comparison
from ..quantization.codec import decode, unpack
from .inputs import (
    PagedDecodeInputs,
    PagedDecodeOutputs,
    Rope,
    make_inputs,
    make_outputs,
    make_validation_inputs,
    paged_inputs,
)
from .problem import NVFP4_BLOCK, PagedDecodeProblem

__all__ = [
    "PagedDecodeInputs",
    "PagedDecodeOutputs",
    "compare",
    "make_inputs",
    "make_outputs",
    "make_validation_inputs",
    "outputs_equal",
    "paged_inputs",
    "reference",
]

MAX_COMPARED_REQUESTS = 6

# Largest error allowed, relative to the root mean square of the exact output. The output and P are
# rounded to the dtype (unit roundoff u: bf16 2^-8, fp16 2^-11); P's errors are independent, so they
# average out over the tokens and the sum stays near u for any length.
RELATIVE_RMS_BOUND = {torch.bfloat16: 1.0e-2, torch.float16: 1.5e-3}
"""Bound of ||out - ref|| / ||ref|| over one request: 2.5 u and 3 u."""
MAX_ERROR_BOUND = {torch.bfloat16: 8.0e-2, torch.float16: 1.0e-2}
"""Bound of one element's error over the RMS of its head's output: about 20 u."""
ROPE_FACTOR = 2.0
"""Of both bounds where the kernel rotates: the rotated K is rounded to the dtype once more."""
LSE_BOUND = 5.0e-3
"""Absolute, in powers of two; fp32 accumulation of exact products of 16-bit operands."""
ROPE_LSE_BOUND = {torch.bfloat16: 4.0e-2, torch.float16: 5.0e-3}
"""As before, with q and K rounded after the rotation."""


def reference(inputs: PagedDecodeInputs, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-2 LSE of one request, in fp32 on the stored (quantised) values.

    A query token that sees no token gives 0 and, without sinks, -inf.

    Returns:
        Output ``[query_len, num_qo_heads, head_dim_v]`` and LSE ``[query_len, num_qo_heads]``.
    """
    length = _num_tokens(inputs, request)
    query_len, num_qo_heads = inputs.query_len, inputs.q.shape[1]
    device = inputs.q.device
    query_position = torch.arange(length - query_len, length, device=device)
    first = 0
    if inputs.window_left >= 0:
        first = max(0, length - query_len - inputs.window_left)
    k, v, key_position = _gather(inputs, request, first, length)
    num_kv_heads = k.shape[1]
    q = inputs.q[request * query_len : (request + 1) * query_len].float()
    if inputs.rope is not None:
        q = _rotate(q, query_position, inputs.rope)
        k = _rotate(k, key_position, inputs.rope)
    group = num_qo_heads // num_kv_heads
    q = q.view(query_len, num_kv_heads, group, q.shape[2])
    logits = torch.einsum("qhgd,nhd->qhgn", q, k).flatten(1, 2) * inputs.sm_scale
    if inputs.soft_cap > 0.0:
        logits = inputs.soft_cap * torch.tanh(logits / inputs.soft_cap)
    distance = key_position[None, :] - query_position[:, None]
    if inputs.alibi_slopes is not None:
        logits = logits + inputs.alibi_slopes[None, :, None] * distance[:, None, :]
    is_seen = torch.ones_like(distance, dtype=torch.bool)
    if inputs.is_causal:
        is_seen &= distance <= 0
    if inputs.window_left >= 0:
        is_seen &= distance >= -inputs.window_left
    logits = logits.masked_fill(~is_seen[:, None, :], -math.inf)
    if inputs.sinks is not None:
        sinks = inputs.sinks[None, :, None].expand(query_len, -1, 1)
        lse = torch.logsumexp(torch.cat([logits, sinks], dim=-1), dim=-1)
    else:
        lse = torch.logsumexp(logits, dim=-1)
    # A row that sees nothing has -inf - (-inf) here.
    p = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    p = p.view(query_len, num_kv_heads, group, p.shape[2])
    out = torch.einsum("qhgn,nhd->qhgd", p, v).flatten(1, 2)
    return out, lse * math.log2(math.e)


def _num_tokens(inputs: PagedDecodeInputs, request: int) -> int:
    if inputs.seq_lens is not None:
        return int(inputs.seq_lens[request])
    assert inputs.kv_indptr is not None
    assert inputs.kv_last_page_len is not None
    first, end = (int(i) for i in inputs.kv_indptr[request : request + 2])
    last = int(inputs.kv_last_page_len[request])
    return (end - first - 1) * inputs.page_size + last if end > first else 0


def _gather(
    inputs: PagedDecodeInputs, request: int, first: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V ``[tokens, num_kv_heads, dim]`` in fp32, scaled, and the tokens' positions."""
    if inputs.seq_lens is not None:
        table = inputs.kv_indices[request]
    else:
        assert inputs.kv_indptr is not None
        table = inputs.kv_indices[int(inputs.kv_indptr[request]) :]
    page_size = inputs.page_size
    first_page, end_page = first // page_size, -(-length // page_size)
    pages = table[first_page:end_page].long()
    skipped = first - first_page * page_size

    def rows_of(pool: torch.Tensor) -> torch.Tensor:
        rows = _pages(pool, pages).flatten(0, 1)
        return rows[skipped : skipped + length - first]

    def tokens_of(pool: torch.Tensor, block_scales: torch.Tensor | None) -> torch.Tensor:
        rows = rows_of(pool)
        if block_scales is None:
            return rows.float()
        scales = rows_of(block_scales).float().repeat_interleave(NVFP4_BLOCK, -1)
        return decode(unpack(rows)) * scales

    k = tokens_of(inputs.k_cache, inputs.k_block_scales) * inputs.k_scale
    v = tokens_of(inputs.v_cache, inputs.v_block_scales) * inputs.v_scale
    return k, v, torch.arange(first, length, device=k.device)


def _pages(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """``pool[pages]``, also for dtypes that cannot be indexed."""
    if pool.element_size() > 1:
        return pool[pages]
    return pool.view(torch.uint8)[pages].view(pool.dtype)


def _rotate(x: torch.Tensor, position: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates x ``[tokens, heads, dim]``; in float64, since positions are large."""
    half = x.shape[2] // 2
    pair = torch.arange(half, device=x.device, dtype=torch.float64)
    frequency = rope.theta ** (-2.0 * pair / x.shape[2]) / rope.scale
    angle = (position.double()[:, None] * frequency[None, :])[:, None, :]
    low, high = x[..., :half].double(), x[..., half:].double()
    rotated = (low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin())
    return torch.cat(rotated, dim=-1).float()


def compare(
    problem: PagedDecodeProblem, inputs: PagedDecodeInputs, outputs: PagedDecodeOutputs
) -> Comparison:
    """Compares the first, last, longest and some further requests with the fp32 reference."""
    del problem
    worst_rms, worst_error = 0.0, 0.0
    dtype, query_len = outputs.out.dtype, inputs.query_len
    factor = ROPE_FACTOR if inputs.rope is not None else 1.0
    rms_bound, error_bound = factor * RELATIVE_RMS_BOUND[dtype], factor * MAX_ERROR_BOUND[dtype]
    for request in _requests_to_compare(inputs):
        expected, expected_lse = reference(inputs, request)
        rows = slice(request * query_len, (request + 1) * query_len)
        got = outputs.out[rows].float()
        if not bool(torch.isfinite(got).all()):
            return Comparison(f"request {request} has NaN or infinity", math.inf, math.inf)
        reason = _compare_lse(inputs, outputs, rows, expected_lse)
        if reason:
            return Comparison(f"request {request}: {reason}", math.inf, math.inf)
        error = (got - expected).abs()
        rms = expected.square().mean(dim=-1, keepdim=True).sqrt()
        if bool((error.amax(-1, keepdim=True) > 0).logical_and(rms == 0).any()):
            return Comparison(f"request {request} must be 0", error.max().item(), math.inf)
        if not bool(rms.any()):
            continue
        relative_rms = (error.square().mean() / expected.square().mean()).sqrt().item()
        relative_error = (error / rms.clamp_min(1e-30)).max().item()
        worst_rms = max(worst_rms, relative_rms)
        worst_error = max(worst_error, error.max().item())
        if relative_rms > rms_bound:
            reason = f"relative RMS error {relative_rms:.3g} exceeds {rms_bound:g}"
        elif relative_error > error_bound:
            reason = f"largest error {relative_error:.3g} RMS exceeds {error_bound:g}"
        if reason:
            return Comparison(f"request {request}: {reason}", worst_error, worst_rms)
    return Comparison(None, worst_error, worst_rms)


def _requests_to_compare(inputs: PagedDecodeInputs) -> list[int]:
    batch = inputs.batch
    if inputs.seq_lens is not None:
        sizes = inputs.seq_lens
    else:
        assert inputs.kv_indptr is not None
        sizes = inputs.kv_indptr.diff()
    picks = {0, batch - 1, int(sizes.argmax()), int(sizes.argmin())}
    step = max(1, batch // MAX_COMPARED_REQUESTS)
    picks.update(range(step // 2, batch, step))
    return sorted(picks)[: MAX_COMPARED_REQUESTS + 4]


def _compare_lse(
    inputs: PagedDecodeInputs,
    outputs: PagedDecodeOutputs,
    rows: slice,
    expected: torch.Tensor,
) -> str | None:
    if outputs.lse is None:
        return None
    got = outputs.lse[rows]
    if outputs.lse_base == "e":
        got = got * math.log2(math.e)
    is_empty = torch.isneginf(expected)
    if not torch.equal(torch.isneginf(got), is_empty):
        return "LSE must be -inf exactly where there is no token"
    bound = LSE_BOUND if inputs.rope is None else ROPE_LSE_BOUND[outputs.out.dtype]
    error = torch.where(is_empty, 0.0, got - expected).abs().max().item()
    return None if error <= bound else f"LSE is off by {error:.3g}, allowed {bound:g}"


def outputs_equal(first: PagedDecodeOutputs, second: PagedDecodeOutputs) -> bool:
    """Whether two outputs are equal bit for bit."""
    if not torch.equal(first.out, second.out):
        return False
    if first.lse is None or second.lse is None:
        return first.lse is second.lse
    return torch.equal(first.lse, second.lse)
