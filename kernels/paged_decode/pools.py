"""Pools of pages with seeded values, and NaN where kernels must not look."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quantization.reference import quantize
from .problem import NVFP4, NVFP4_BLOCK, PagedDecodeProblem

__all__ = ["Pools", "make_pools", "poison_pools"]


@dataclass(frozen=True)
class Pools:
    """What ``PagedDecodeInputs`` says of these fields."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_block_scales: torch.Tensor | None = None
    v_block_scales: torch.Tensor | None = None


def make_pools(
    problem: PagedDecodeProblem,
    num_pages: int,
    device: str | torch.device,
    generator: torch.Generator,
) -> Pools:
    """K and V as views of one pool: K and V interleaved page by page, or MLA's latent rows."""
    if problem.kv_dtype == NVFP4:
        return _nvfp4_pools(problem, num_pages, device, generator)
    pool = _empty_pool(
        problem, num_pages, problem.head_dim, getattr(torch, problem.kv_dtype), device
    )
    if pool.element_size() > 1:
        pool.normal_(generator=generator)
    else:
        for page in range(0, num_pages, 4096):  # in pieces: fp32 takes four times the memory
            piece = pool[page : page + 4096]
            piece.copy_(torch.randn(piece.shape, generator=generator, device=device))
    if problem.is_latent:
        rows = _as_tokens_and_heads(pool, problem)
        return Pools(rows, rows[..., : problem.head_dim_v])
    return Pools(*_halves(pool, problem))


def _nvfp4_pools(
    problem: PagedDecodeProblem,
    num_pages: int,
    device: str | torch.device,
    generator: torch.Generator,
) -> Pools:
    """Quantised normal values: a pool of codes and a pool of block scales."""
    codes = _empty_pool(problem, num_pages, problem.head_dim // 2, torch.uint8, device)
    width = problem.head_dim // NVFP4_BLOCK
    scales = _empty_pool(problem, num_pages, width, torch.float8_e4m3fn, device)
    for page in range(0, num_pages, 512):  # in pieces: fp32 takes eight times the memory
        shape = (*codes[page : page + 512].shape[:-1], problem.head_dim)
        values = torch.randn(shape, generator=generator, device=device)
        quantized = quantize(values)
        codes[page : page + 512] = quantized.codes
        scales[page : page + 512].view(torch.uint8).copy_(quantized.scales.view(torch.uint8))
    return Pools(*_halves(codes, problem), *_halves(scales, problem))


def _empty_pool(
    problem: PagedDecodeProblem,
    num_pages: int,
    width: int,
    dtype: torch.dtype,
    device: str | torch.device,
) -> torch.Tensor:
    """``[num_pages, 2, page_size, num_kv_heads, width]``, without the 2 for MLA, HND as asked."""
    tokens_and_heads = (problem.page_size, problem.num_kv_heads)
    if problem.kv_layout == "HND":
        tokens_and_heads = tokens_and_heads[::-1]
    halves = () if problem.is_latent else (2,)
    return torch.empty((num_pages, *halves, *tokens_and_heads, width), dtype=dtype, device=device)


def _as_tokens_and_heads(pool: torch.Tensor, problem: PagedDecodeProblem) -> torch.Tensor:
    """The pool with tokens before heads, whatever its layout."""
    return pool.transpose(-2, -3) if problem.kv_layout == "HND" else pool


def _halves(pool: torch.Tensor, problem: PagedDecodeProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a pool that holds both."""
    pool = _as_tokens_and_heads(pool, problem)
    return pool[:, 0], pool[:, 1]


def poison_pools(
    pools: Pools,
    problem: PagedDecodeProblem,
    order: torch.Tensor,
    num_pages: list[int],
    lengths: list[int],
) -> None:
    """NaN wherever a kernel must not look: unused pages, past each end, before each window.

    Codes have no NaN: there it is their block scales.

    Args:
        pools: Of ``make_pools``.
        problem: Their problem.
        order: Ids of all pages: those of the requests one after the other, then unused ones.
        num_pages: Pages of each request.
        lengths: Tokens of each request.
    """
    rows = [pools.k_cache, pools.k_block_scales]
    if not problem.is_latent:
        rows += [pools.v_cache, pools.v_block_scales]
    for pool in rows:
        if pool is not None:
            _poison(pool, problem, order, num_pages, lengths)


def _poison(
    pool: torch.Tensor,
    problem: PagedDecodeProblem,
    order: torch.Tensor,
    num_pages: list[int],
    lengths: list[int],
) -> None:
    """NaN wherever a kernel must not look: unused pages, past each end, before each window."""
    page_size = problem.page_size
    # All bits but the sign are a NaN in every dtype here, and not every dtype can be assigned to.
    wide = pool.element_size() == 2
    bits, nan = (pool.view(torch.int16), 0x7FFF) if wide else (pool.view(torch.uint8), 0x7F)
    hidden = order[sum(num_pages) :].tolist()
    first = 0
    for pages, length in zip(num_pages, lengths, strict=True):
        ids = order[first : first + pages].tolist()
        first += pages
        if ids:
            bits[ids[-1], length - (pages - 1) * page_size :] = nan
        if problem.window_left < 0:
            continue
        window = max(0, length - problem.query_len - problem.window_left)
        hidden += ids[: window // page_size]
        if window % page_size:
            bits[ids[window // page_size], : window % page_size] = nan
    bits[torch.tensor(hidden, dtype=torch.int64, device=pool.device)] = nan
