"""Plain-torch paged decode in fp32, seeded inputs, and the comparison with a tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..base import Comparison
from .problem import PagedDecodeProblem

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

MAX_VALIDATION_TOKENS = 1 << 19
"""Tokens over all requests in validation inputs: at 8 heads of 128, 2 GiB of cache."""
MAX_COMPARED_REQUESTS = 6

# Largest error allowed, relative to the root mean square of the exact output. The output and P are
# rounded to the dtype (unit roundoff u: bf16 2^-8, fp16 2^-11); P's errors are independent, so they
# average out over the tokens and the sum stays near u for any length.
RELATIVE_RMS_BOUND = {torch.bfloat16: 1.0e-2, torch.float16: 1.5e-3}
"""Bound of ||out - ref|| / ||ref|| over one request: 2.5 u and 3 u."""
MAX_ERROR_BOUND = {torch.bfloat16: 8.0e-2, torch.float16: 1.0e-2}
"""Bound of one element's error over the RMS of its head's output: about 20 u."""
LSE_BOUND = 5.0e-3
"""Absolute, in powers of two; fp32 accumulation of exact products of 16-bit operands."""


@dataclass(frozen=True)
class PagedDecodeInputs:
    """What the operation reads; CSR page tables are in units of pages."""

    q: torch.Tensor
    """``[batch, num_qo_heads, head_dim]``, contiguous in the last dimension."""
    kv_cache: torch.Tensor
    """``[num_pages, 2, page_size, num_kv_heads, head_dim]``: K at 0, V at 1 (NHD)."""
    kv_indptr: torch.Tensor
    """int32 ``[batch + 1]``: request b owns ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``."""
    kv_indices: torch.Tensor
    """int32 ``[number of pages in use]``: physical page ids, in token order."""
    kv_last_page_len: torch.Tensor
    """int32 ``[batch]``: tokens in the last page of each request, 1 to page_size."""
    sm_scale: float
    """Factor of the logits, usually head_dim^-0.5."""


@dataclass(frozen=True)
class PagedDecodeOutputs:
    """What the operation writes."""

    out: torch.Tensor
    """``[batch, num_qo_heads, head_dim]`` in q's dtype."""
    lse: torch.Tensor | None
    """fp32 ``[batch, num_qo_heads]``: log2 of the sum of exponentials; None if not wanted."""


def reference(inputs: PagedDecodeInputs, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[num_qo_heads, head_dim]`` and base-2 LSE ``[num_qo_heads]`` of one request, fp32.

    A request without tokens gives 0 and -inf.
    """
    k, v = _gather(inputs, request)
    num_qo_heads, head_dim = inputs.q.shape[1:]
    num_tokens, num_kv_heads = k.shape[:2]
    if num_tokens == 0:
        zeros = torch.zeros(num_qo_heads, head_dim, device=inputs.q.device)
        return zeros, torch.full_like(zeros[:, 0], -math.inf)
    q = inputs.q[request].float().view(num_kv_heads, -1, head_dim)
    logits = torch.einsum("hgd,nhd->hgn", q, k) * inputs.sm_scale
    lse = torch.logsumexp(logits, dim=-1)
    out = torch.einsum("hgn,nhd->hgd", torch.exp(logits - lse[..., None]), v)
    return out.reshape(num_qo_heads, head_dim), lse.reshape(num_qo_heads) * math.log2(math.e)


def _gather(inputs: PagedDecodeInputs, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one request, ``[tokens, num_kv_heads, head_dim]`` in fp32."""
    first, end = (int(i) for i in inputs.kv_indptr[request : request + 2])
    page_size = inputs.kv_cache.shape[2]
    last = int(inputs.kv_last_page_len[request])
    num_tokens = (end - first - 1) * page_size + last if end > first else 0
    pages = inputs.kv_cache[inputs.kv_indices[first:end].long()]
    k, v = (pages[:, i].flatten(0, 1)[:num_tokens].float() for i in (0, 1))
    return k, v


def paged_inputs(
    problem: PagedDecodeProblem,
    lengths: list[int],
    *,
    device: str | torch.device,
    seed: int,
    num_unused_pages: int = 0,
    poison: bool = False,
) -> PagedDecodeInputs:
    """Inputs of requests of these lengths: normal values, pages in random order.

    Args:
        problem: heads, head_dim, page size and dtype; ``batch`` and ``kv_len`` are not read.
        lengths: tokens of each request, 0 allowed.
        device: where the tensors live.
        seed: of all randomness; equal seeds give equal inputs on one device.
        num_unused_pages: pages that no table names.
        poison: NaN in unused pages and past the end of each last page.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    page_size = problem.page_size
    num_pages = [-(-length // page_size) for length in lengths]
    total = sum(num_pages)
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = torch.cumsum(torch.tensor(num_pages, dtype=torch.int32), 0)
    order = torch.randperm(total + num_unused_pages, generator=torch.Generator().manual_seed(seed))
    indices = order[:total].to(torch.int32)
    last = [n - (p - 1) * page_size if p else 0 for n, p in zip(lengths, num_pages, strict=True)]
    dtype = getattr(torch, problem.dtype)
    cache = torch.empty(
        (total + num_unused_pages, 2, page_size, problem.num_kv_heads, problem.head_dim),
        dtype=dtype,
        device=device,
    ).normal_(generator=generator)
    q = torch.randn(
        (len(lengths), problem.num_qo_heads, problem.head_dim), generator=generator, device=device
    ).to(dtype)
    if poison:
        cache[order[total:].to(device)] = math.nan
        for request, (pages, tail) in enumerate(zip(num_pages, last, strict=True)):
            if pages:
                cache[int(indices[int(indptr[request + 1]) - 1]), :, tail:] = math.nan
    return PagedDecodeInputs(
        q=q,
        kv_cache=cache,
        kv_indptr=indptr.to(device),
        kv_indices=indices.to(device),
        kv_last_page_len=torch.tensor(last, dtype=torch.int32, device=device),
        sm_scale=problem.head_dim**-0.5,
    )


def make_inputs(
    problem: PagedDecodeProblem, *, device: str | torch.device, seed: int
) -> PagedDecodeInputs:
    """Inputs to time: every request has ``kv_len`` tokens."""
    return paged_inputs(problem, [problem.kv_len] * problem.batch, device=device, seed=seed)


def make_validation_inputs(
    problem: PagedDecodeProblem, *, device: str | torch.device, seed: int
) -> PagedDecodeInputs:
    """Inputs to verify: ``batch`` requests of ragged lengths up to ``kv_len``, one of them empty.

    NaN lies where a kernel must not look. Lengths shrink where the cache would pass
    ``MAX_VALIDATION_TOKENS``.
    """
    longest = max(1, min(problem.kv_len, 2 * MAX_VALIDATION_TOKENS // problem.batch))
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (problem.batch,), generator=generator).tolist()
    lengths[-1] = 0
    lengths[0] = longest
    return paged_inputs(problem, lengths, device=device, seed=seed, num_unused_pages=3, poison=True)


def make_outputs(problem: PagedDecodeProblem, inputs: PagedDecodeInputs) -> PagedDecodeOutputs:
    """Outputs filled with NaN, so that what a kernel does not write shows; no LSE is asked for."""
    return PagedDecodeOutputs(out=torch.full_like(inputs.q, math.nan), lse=None)


def compare(
    problem: PagedDecodeProblem, inputs: PagedDecodeInputs, outputs: PagedDecodeOutputs
) -> Comparison:
    """Compares the first, last, longest and some further requests with the fp32 reference."""
    del problem
    worst_rms, worst_error = 0.0, 0.0
    for request in _requests_to_compare(inputs):
        expected, expected_lse = reference(inputs, request)
        got = outputs.out[request].float()
        if not bool(torch.isfinite(got).all()):
            return Comparison(f"request {request} has NaN or infinity", math.inf, math.inf)
        if outputs.lse is not None:
            reason = _compare_lse(outputs.lse[request], expected_lse)
            if reason:
                return Comparison(f"request {request}: {reason}", math.inf, math.inf)
        error = (got - expected).abs()
        rms = expected.square().mean(dim=-1, keepdim=True).sqrt()
        if not bool(rms.any()):
            if bool(error.any()):
                return Comparison(f"request {request} must be 0", error.max().item(), math.inf)
            continue
        relative_rms = (error.square().mean() / expected.square().mean()).sqrt().item()
        relative_error = (error / rms.clamp_min(1e-30)).max().item()
        worst_rms = max(worst_rms, relative_rms)
        worst_error = max(worst_error, error.max().item())
        dtype = outputs.out.dtype
        if relative_rms > RELATIVE_RMS_BOUND[dtype]:
            bound = RELATIVE_RMS_BOUND[dtype]
            reason = f"request {request}: relative RMS error {relative_rms:.3g} exceeds {bound:g}"
            return Comparison(reason, worst_error, worst_rms)
        if relative_error > MAX_ERROR_BOUND[dtype]:
            bound = MAX_ERROR_BOUND[dtype]
            reason = f"request {request}: largest error {relative_error:.3g} RMS exceeds {bound:g}"
            return Comparison(reason, worst_error, worst_rms)
    return Comparison(None, worst_error, worst_rms)


def _requests_to_compare(inputs: PagedDecodeInputs) -> list[int]:
    batch = inputs.q.shape[0]
    num_pages = inputs.kv_indptr.diff()
    picks = {0, batch - 1, int(num_pages.argmax()), int(num_pages.argmin())}
    step = max(1, batch // MAX_COMPARED_REQUESTS)
    picks.update(range(step // 2, batch, step))
    return sorted(picks)[: MAX_COMPARED_REQUESTS + 4]


def _compare_lse(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    is_empty = torch.isneginf(expected)
    if not torch.equal(torch.isneginf(got), is_empty):
        return "LSE must be -inf exactly where there is no token"
    error = torch.where(is_empty, 0.0, got - expected).abs().max().item()
    return None if error <= LSE_BOUND else f"LSE is off by {error:.3g}, allowed {LSE_BOUND:g}"


def outputs_equal(first: PagedDecodeOutputs, second: PagedDecodeOutputs) -> bool:
    """Whether two outputs are equal bit for bit."""
    if not torch.equal(first.out, second.out):
        return False
    if first.lse is None or second.lse is None:
        return first.lse is second.lse
    return torch.equal(first.lse, second.lse)
