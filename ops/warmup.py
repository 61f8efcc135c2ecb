"""Makes a process ready for a workload: everything compiled, loaded and allocated before it serves.

Compiling is ``tuner.precompile``, in parallel, for any SKU. On the GPU at hand the functions are
then called once for each problem, on a page's worth of cache, so that no later call with the same
shapes loads or allocates anything, in a CUDA graph either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import torch

from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from ..kernels.gdn_decode import GdnDecodeProblem
from ..kernels.paged_decode import PagedDecodeProblem
from ..kernels.paged_decode.inputs import Rope
from ..kernels.paged_decode.problem import NVFP4, NVFP4_BLOCK
from ..tuner.explain import LookupResult
from ..tuner.precompile import PrecompiledKernel, precompile_workload
from .gdn import gdn_decode
from .launchers import keeping_launchers
from .mla_decode import mla_decode
from .page_table import PageTable
from .paged_decode import paged_decode

__all__ = ["Warmup", "launch_once", "warmup"]


@dataclass(frozen=True)
class Warmup:
    """What was made ready."""

    results: tuple[LookupResult, ...]
    """The configs that calls with the workload's problems get."""
    kernels: tuple[PrecompiledKernel, ...]
    num_calls: int
    """Calls that were made on the GPU."""


def warmup(
    workload: str, *, gpu: str | DeviceSpec | None = None, num_workers: int | None = None
) -> Warmup:
    """Compiles what calls with the problems of a workload reach; calls them on the GPU at hand.

    Args:
        workload: Name of a workload, or path of a workload file.
        gpu: SKU name or spec to compile for only; None: the GPU at hand, which is called too.
        num_workers: Processes that compile; None: the cores at hand.

    Raises:
        DeviceError: no GPU was named and none is at hand.
        UnsupportedError: no template serves any of the problems, or a kernel does not compile.
        StoreError: a database cannot be read.
    """
    results, kernels = precompile_workload(workload, gpu=gpu, num_workers=num_workers)
    num_calls = 0
    if gpu is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        problems = dict.fromkeys(result.problem for result in results)
        num_calls = sum(launch_once(problem, device) for problem in problems)
        torch.cuda.synchronize(device)
    return Warmup(results, kernels, num_calls)


def launch_once(problem: Problem, device: torch.device) -> int:
    """Calls the function of the problem in the forms that callers use; returns how many.

    What is built stays for good: a workload is what the process is for.
    """
    calls = _CALLS.get(problem.op)
    if calls is None:
        return 0
    made = 0
    with keeping_launchers(), torch.no_grad():
        for call in calls(problem, device):
            call()
            made += 1
    return made


def _paged_decode_calls(
    problem: PagedDecodeProblem, device: torch.device
) -> Iterator[Callable[[], object]]:
    """CSR and dense tables, with LSE and without, one pool or two; every table names one page."""
    q = torch.zeros(
        (problem.batch * problem.query_len, problem.num_qo_heads, problem.head_dim),
        dtype=getattr(torch, problem.dtype),
        device=device,
    )
    options = _decode_options(problem, device)
    for table, (cache, scales), return_lse in product(
        _tables(problem, device), _caches(problem, device), (False, True)
    ):
        arguments = {**table, **options, **scales, "return_lse": return_lse}
        if problem.is_latent:
            arguments = {name: v for name, v in arguments.items() if name != "kv_layout"}
            sizes: dict[str, Any] = {"head_dim_v": problem.head_dim_v, "sm_scale": 1.0}
            yield partial(mla_decode, q, cache, **arguments, **sizes)
        else:
            yield partial(paged_decode, q, cache, **arguments)


def _tables(
    problem: PagedDecodeProblem, device: torch.device
) -> tuple[Mapping[str, torch.Tensor], ...]:
    pages = -(-problem.kv_len // problem.page_size)
    last = problem.kv_len - (pages - 1) * problem.page_size
    zeros = torch.zeros(problem.batch, pages, dtype=torch.int32, device=device)
    indptr = torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * pages
    lengths = torch.full((problem.batch,), last, dtype=torch.int32, device=device)
    csr = PageTable.csr(indptr, zeros.view(-1), lengths)
    assert csr.indptr is not None
    assert csr.last_page_len is not None
    return (
        {
            "kv_indptr": csr.indptr,
            "kv_indices": csr.indices,
            "kv_last_page_len": csr.last_page_len,
        },
        {"block_table": zeros, "seq_lens": torch.full_like(lengths, problem.kv_len)},
    )


def _caches(
    problem: PagedDecodeProblem, device: torch.device
) -> tuple[tuple[Any, dict[str, Any]], ...]:
    """A pool of one page with K and V side by side, and K and V apart; MLA has one kind.

    Each with what else describes it: the block scales of an NVFP4 cache.
    """
    if problem.kv_dtype == NVFP4:
        codes = _pools(problem, problem.head_dim // 2, torch.uint8, device)
        scales = _pools(problem, problem.head_dim // NVFP4_BLOCK, torch.float8_e4m3fn, device)
        return tuple(
            (cache, {"kv_block_scales": of_cache})
            for cache, of_cache in zip(codes, scales, strict=True)
        )
    dtype = getattr(torch, problem.kv_dtype)
    if problem.is_latent:
        shape = (1, problem.page_size, problem.head_dim)
        return ((torch.zeros(shape, dtype=dtype, device=device), {}),)
    return tuple((cache, {}) for cache in _pools(problem, problem.head_dim, dtype, device))


def _pools(
    problem: PagedDecodeProblem, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, Any]:
    """One page with K and V side by side, and one of each, rows ``width`` wide."""
    inner = (problem.page_size, problem.num_kv_heads)
    if problem.kv_layout == "HND":
        inner = inner[::-1]
    joined = torch.zeros((1, 2, *inner, width), dtype=dtype, device=device)
    apart = tuple(torch.zeros((1, *inner, width), dtype=dtype, device=device) for _ in range(2))
    return joined, apart


def _decode_options(problem: PagedDecodeProblem, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {
        "kv_layout": problem.kv_layout,
        "window_left": problem.window_left,
        "is_causal": problem.is_causal,
    }
    heads = torch.zeros(problem.num_qo_heads, dtype=torch.float32, device=device)
    if problem.has_soft_cap:
        options["soft_cap"] = 30.0
    if problem.has_sinks:
        options["sinks"] = heads
    if problem.has_alibi:
        options["alibi_slopes"] = heads
    if problem.has_rope:
        options["rope"] = Rope()
    return options


def _gdn_decode_calls(
    problem: GdnDecodeProblem, device: torch.device
) -> Iterator[Callable[[], object]]:
    """A pool of states with slots; gates as the problem says."""
    dtype = getattr(torch, problem.dtype)
    tokens = (problem.batch, problem.num_steps)

    def zeros(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros((*tokens, *shape), dtype=of, device=device)

    dims = (problem.head_dim_k, problem.head_dim_v)
    is_fused = problem.gate == "fused"
    gate = dtype if is_fused else torch.float32
    state = torch.zeros(
        (
            problem.batch,
            problem.num_v_heads,
            *(dims if problem.state_layout == "KV" else dims[::-1]),
        ),
        dtype=getattr(torch, problem.state_dtype),
        device=device,
    )
    per_head = torch.zeros(problem.num_v_heads, device=device)
    q, k = (zeros(problem.num_heads, problem.head_dim_k) for _ in range(2))
    v = zeros(problem.num_v_heads, problem.head_dim_v)
    g, beta = (zeros(problem.num_v_heads, of=gate) for _ in range(2))
    for slots in (None, torch.arange(problem.batch, dtype=torch.int32, device=device)):
        yield partial(
            gdn_decode,
            *(q, k, v, g, beta, state),
            slots=slots,
            A_log=per_head if is_fused else None,
            dt_bias=per_head if is_fused else None,
            use_qk_l2norm=problem.use_qk_l2norm,
            state_layout=problem.state_layout,
        )


_CALLS: Mapping[str, Callable[[Any, torch.device], Iterator[Callable[[], object]]]] = (
    MappingProxyType({"paged_decode": _paged_decode_calls, "gdn_decode": _gdn_decode_calls})
)
"""Calls of each operation; one that is not here is compiled only."""
