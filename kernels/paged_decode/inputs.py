"""What paged decode reads and writes, and seeded inputs of any problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .lengths import request_lengths
from .pools import make_pools, poison_pools
from .problem import PagedDecodeProblem

__all__ = [
    "PagedDecodeInputs",
    "PagedDecodeOutputs",
    "Rope",
    "make_inputs",
    "make_outputs",
    "make_validation_inputs",
    "paged_inputs",
]

MAX_VALIDATION_TOKENS = 1 << 19
"""Tokens over all requests in validation inputs: at 8 heads of 128, 2 GiB of cache."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of q and K by position, as Llama has it: dimension i pairs with i + D/2.

    The angle of pair i at position p is ``p / scale * theta ** (-2 i / head_dim)``.
    """

    theta: float = 10000.0
    scale: float = 1.0


@dataclass(frozen=True)
class PagedDecodeInputs:
    """What the operation reads.

    Page tables are CSR (``kv_indptr``, ``kv_indices``, ``kv_last_page_len``) or dense
    (``kv_indices`` as ``[batch, max_pages]``, ``seq_lens``).
    """

    q: torch.Tensor
    """``[batch * query_len, num_qo_heads, head_dim]``, contiguous in the last dimension; the tokens
    of a request lie one after the other."""
    k_cache: torch.Tensor
    """``[num_pages, page_size, num_kv_heads, head_dim]``, contiguous in the last dimension; other
    strides are free, so HND pools and interleaved K and V are views of this shape. With block
    scales: uint8, half as wide, value 2i of a row in the low half of byte i."""
    v_cache: torch.Tensor
    """``[num_pages, page_size, num_kv_heads, head_dim_v]``, likewise; for MLA a view of k_cache."""
    kv_indices: torch.Tensor
    """int32, physical page ids in token order: CSR ``[pages in use]``, dense
    ``[batch, max_pages]``. What the lengths do not reach is never read."""
    kv_indptr: torch.Tensor | None
    """int32 ``[batch + 1]``: request b owns ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``."""
    kv_last_page_len: torch.Tensor | None
    """int32 ``[batch]``: tokens in the last page of each request, 1 to page_size."""
    sm_scale: float
    """Factor of the logits, usually head_dim^-0.5, times the scale of q if it has one."""
    seq_lens: torch.Tensor | None = None
    """int32 ``[batch]``: tokens of each request, for a dense page table."""
    k_scale: float | torch.Tensor = 1.0
    """Factor of K's stored values: a number, or fp32 of one element on the device."""
    v_scale: float | torch.Tensor = 1.0
    """Likewise of V's; a tensor where ``k_scale`` is one."""
    window_left: int = -1
    """Tokens before a query that it attends to besides itself; -1: all."""
    is_causal: bool = True
    soft_cap: float = 0.0
    """Logits x become soft_cap * tanh(x / soft_cap); 0: they do not."""
    sinks: torch.Tensor | None = None
    """fp32 ``[num_qo_heads]``: logits (natural units) that count in the softmax without a value."""
    alibi_slopes: torch.Tensor | None = None
    """fp32 ``[num_qo_heads]``: slope * (position of key - position of query) is added to logits."""
    rope: Rope | None = None
    """Rotation of q and K in the kernel."""
    k_block_scales: torch.Tensor | None = None
    """e4m3 ``[num_pages, page_size, num_kv_heads, head_dim / 16]``, contiguous in the last
    dimension, other strides multiples of its size: what the 16 values that belong to it, e2m1 codes
    in ``k_cache``, are multiplied by. None where values are stored one by one."""
    v_block_scales: torch.Tensor | None = None
    """Likewise of V; there where ``k_block_scales`` is."""

    @property
    def batch(self) -> int:
        """Requests."""
        table = self.kv_last_page_len if self.seq_lens is None else self.seq_lens
        assert table is not None, "neither kv_last_page_len nor seq_lens"
        return table.shape[0]

    @property
    def query_len(self) -> int:
        """Query tokens of each request."""
        return self.q.shape[0] // self.batch

    @property
    def page_size(self) -> int:
        """Tokens of one page."""
        return self.k_cache.shape[1]

    @property
    def is_latent(self) -> bool:
        """Whether V is a part of K's row (MLA)."""
        return self.v_cache.shape[3] != self.k_cache.shape[3]

    @property
    def has_block_scales(self) -> bool:
        """Whether the cache is NVFP4: two codes a byte."""
        return self.k_block_scales is not None

    @property
    def head_dim_v(self) -> int:
        """Values of a row of V and of the output."""
        return self.v_cache.shape[3] * (2 if self.has_block_scales else 1)


@dataclass(frozen=True)
class PagedDecodeOutputs:
    """What the operation writes."""

    out: torch.Tensor
    """``[batch * query_len, num_qo_heads, head_dim_v]`` in q's dtype."""
    lse: torch.Tensor | None
    """fp32 ``[batch * query_len, num_qo_heads]``: logarithm of the sum of exponentials, sinks
    included; None if not wanted."""
    lse_base: Literal["2", "e"] = "2"


def paged_inputs(
    problem: PagedDecodeProblem,
    lengths: list[int],
    *,
    device: str | torch.device,
    seed: int,
    num_unused_pages: int = 0,
    num_table_pages: int | None = None,
    poison: bool = False,
    is_dense: bool = False,
) -> PagedDecodeInputs:
    """Inputs of requests of these lengths: normal values, pages in random order.

    Args:
        problem: everything but ``batch``, ``kv_len`` and ``lengths``, which are not read.
        lengths: tokens of each request, 0 allowed.
        device: where the tensors live.
        seed: of all randomness; equal seeds give equal inputs on one device.
        num_unused_pages: pages that no table names.
        num_table_pages: entries of a CSR table; None: as many as are in use. The rest are garbage.
        poison: NaN in unused pages, past the end of each request and before each window.
        is_dense: a dense page table instead of CSR.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    page_size = problem.page_size
    num_pages = [-(-length // page_size) for length in lengths]
    total = sum(num_pages)
    order = torch.randperm(total + num_unused_pages, generator=torch.Generator().manual_seed(seed))
    indices = order[:total].to(torch.int32)
    tables = _dense_table(indices, num_pages) if is_dense else _csr_table(indices, num_pages)
    if num_table_pages is not None and not is_dense:
        unused = max(0, num_table_pages - total)
        tables["kv_indices"] = torch.cat([indices, indices.new_full((unused,), -(2**30))])
    if is_dense:
        tables["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
    else:
        last = [
            n - (p - 1) * page_size if p else 0 for n, p in zip(lengths, num_pages, strict=True)
        ]
        tables["kv_last_page_len"] = torch.tensor(last, dtype=torch.int32)
    pools = make_pools(problem, total + num_unused_pages, device, generator)
    if poison:
        poison_pools(pools, problem, order, num_pages, lengths)
    rows = (len(lengths) * problem.query_len, problem.num_qo_heads, problem.head_dim)
    q = torch.randn(rows, generator=generator, device=device).to(getattr(torch, problem.dtype))
    return PagedDecodeInputs(
        q=q,
        k_cache=pools.k_cache,
        v_cache=pools.v_cache,
        k_block_scales=pools.k_block_scales,
        v_block_scales=pools.v_block_scales,
        kv_indices=tables["kv_indices"].to(device),
        kv_indptr=None if is_dense else tables["kv_indptr"].to(device),
        kv_last_page_len=None if is_dense else tables["kv_last_page_len"].to(device),
        sm_scale=problem.head_dim**-0.5,
        seq_lens=tables["seq_lens"].to(device) if is_dense else None,
        **_options(problem, device, generator),
    )


def _csr_table(indices: torch.Tensor, num_pages: list[int]) -> dict[str, torch.Tensor]:
    indptr = torch.zeros(len(num_pages) + 1, dtype=torch.int32)
    indptr[1:] = torch.cumsum(torch.tensor(num_pages, dtype=torch.int32), 0)
    return {"kv_indptr": indptr, "kv_indices": indices}


def _dense_table(indices: torch.Tensor, num_pages: list[int]) -> dict[str, torch.Tensor]:
    table = torch.full((len(num_pages), max([1, *num_pages])), -(2**30), dtype=torch.int32)
    first = 0
    for row, pages in zip(table, num_pages, strict=True):
        row[:pages] = indices[first : first + pages]
        first += pages
    return {"kv_indices": table}


def _options(
    problem: PagedDecodeProblem, device: str | torch.device, generator: torch.Generator
) -> dict[str, Any]:
    """The semantics that the problem's flags ask for, with values that matter."""
    options: dict[str, Any] = {
        "window_left": problem.window_left,
        "is_causal": problem.is_causal,
    }
    heads = problem.num_qo_heads
    if problem.kv_dtype != problem.dtype:
        options |= {"k_scale": 0.75, "v_scale": 1.25}
    if problem.has_soft_cap:
        options["soft_cap"] = 3.0
    if problem.has_sinks:
        options["sinks"] = torch.randn(heads, generator=generator, device=device) + 2.0
    if problem.has_alibi:
        # The slopes of the ALiBi paper (Press et al., 2022): 2^(-8 (h + 1) / heads).
        exponent = -8.0 * torch.arange(1, heads + 1, device=device) / heads
        options["alibi_slopes"] = torch.exp2(exponent)
    if problem.has_rope:
        options["rope"] = Rope()
    return options


def make_inputs(
    problem: PagedDecodeProblem, *, device: str | torch.device, seed: int
) -> PagedDecodeInputs:
    """Inputs to time, of the lengths that the problem says; the seed picks the variant of a mix."""
    lengths = request_lengths(problem.lengths, problem.batch, problem.kv_len, seed)
    room = -(-problem.kv_len // problem.page_size) * problem.batch
    num_table_pages = room if problem.lengths == "mixed" else None
    return paged_inputs(problem, lengths, device=device, seed=seed, num_table_pages=num_table_pages)


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
    del problem
    shape = (*inputs.q.shape[:2], inputs.head_dim_v)
    return PagedDecodeOutputs(out=inputs.q.new_full(shape, math.nan), lse=None)
