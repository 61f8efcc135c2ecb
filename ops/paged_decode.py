"""Paged decode attention: checks the tensors, looks the config up, launches.

Owns nothing of the kernel or the choice: ``kernels.paged_decode`` has the former, dispatch the
latter. The checks read shapes, never values, so that no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch

from ..errors import UsageError
from ..kernels.paged_decode.inputs import Rope
from ..tuner.dispatch import LookupResult
from .checks import refuse_grad
from .decode_inputs import checked_outputs, checked_query, inputs_of
from .decode_launch import launch, mixes_to_try, resolve
from .decode_options import DecodeOptions, LseBase, Scale
from .kv_cache import KvCache, kv_views
from .launched_call import Role
from .library import TracedFunction, is_traced
from .nvfp4_cache import block_scale_views, dtype_with_scales
from .page_table import PageTable, check_table, page_table_of
from .prepared import PreparedCalls

__all__ = ["paged_decode", "resolve_paged_decode"]

_FUNCTION = "paged_decode"
_calls = PreparedCalls(
    {
        "q": Role(("inputs.q",)),
        "kv_cache": Role(("inputs.k_cache", "inputs.v_cache")),
        "kv_cache[0]": Role(("inputs.k_cache",)),
        "kv_cache[1]": Role(("inputs.v_cache",)),
        "kv_indptr": Role(("inputs.kv_indptr",)),
        "kv_indices": Role(("inputs.kv_indices",)),
        "kv_last_page_len": Role(("inputs.kv_last_page_len",)),
        "block_table": Role(("inputs.kv_indices",)),
        "seq_lens": Role(("inputs.seq_lens",)),
        **dict.fromkeys(("k_scale", "k_scale_tensor"), Role(("inputs.k_scale",))),
        **dict.fromkeys(("v_scale", "v_scale_tensor"), Role(("inputs.v_scale",))),
        "sinks": Role(("inputs.sinks",)),
        "alibi_slopes": Role(("inputs.alibi_slopes",)),
        "out": Role(("outputs.out",), is_output=True, apart_from=("q",)),
        "lse": Role(("outputs.lse",), is_output=True),
        "kv_block_scales": Role(("inputs.k_block_scales", "inputs.v_block_scales")),
        "kv_block_scales[0]": Role(("inputs.k_block_scales",)),
        "kv_block_scales[1]": Role(("inputs.v_block_scales",)),
    }
)


@_calls.serve
def paged_decode(
    q: torch.Tensor,
    kv_cache: KvCache,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    kv_last_page_len: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    kv_dtype: str | None = None,
    kv_block_scales: KvCache | None = None,
    sm_scale: float | None = None,
    q_scale: float = 1.0,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    is_causal: bool = True,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    rope: Rope | None = None,
    lengths: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: LseBase = "2",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last query tokens of each request over its paged KV cache.

    The config comes from a snapshot of the databases (``tilescout.lookup``). The first call of a
    bucket (batch, cache size rounded up to a power of two, strides, stream) compiles and allocates
    scratch memory; later ones only launch. Before a CUDA graph is captured the function must have
    run once with the same shapes. Nothing here is differentiable. The page table is CSR, or dense
    by ``block_table`` and ``seq_lens``.

    Args:
        q: ``[batch * query_len, num_qo_heads, head_dim]``, bf16 or fp16, last dimension contiguous:
            as many rows a request as it has new tokens, one request after the other. K and V of
            the new tokens are in the cache already.
        kv_cache: K and V in one tensor, ``[num_pages, 2, page_size, num_kv_heads, head_dim]`` (K at
            0, V at 1), or a pair of tensors without the second axis; under HND page_size and
            num_kv_heads change places. In q's dtype, fp8 (e4m3fn, e5m2) or uint8. Any strides with
            a contiguous last dimension. NVFP4: uint8, head_dim / 2 wide, value 2i of a row in the
            low half of byte i.
        kv_indptr: int32 ``[batch + 1]``: request b owns the pages
            ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``; without any it has no token.
        kv_indices: int32, page ids in token order. May be longer than what is in use; its length
            decides which winner serves.
        kv_last_page_len: int32 ``[batch]``: tokens in the last page of each request.
        block_table: int32 ``[batch, max_pages]``: page ids of each request, any row stride.
        seq_lens: int32 ``[batch]``: tokens of each request.
        kv_layout: ``NHD`` or ``HND``.
        kv_dtype: What the bytes of a uint8 cache are: ``float8_e4m3fn``, ``float8_e5m2`` or
            ``nvfp4``.
        kv_block_scales: Of an NVFP4 cache, one for 16 values of a row: like ``kv_cache``,
            head_dim / 16 wide, e4m3 or its bytes. Linear: a scale lies where its values' codes do.
            ``k_scale`` and ``v_scale`` are the tensor scales.
        sm_scale: Factor of the logits; None: ``head_dim ** -0.5``.
        q_scale: Another factor of the logits, for a q that was quantised or scaled.
        k_scale: Factor of K's stored values: a number, or fp32 of one element on the device.
        v_scale: Likewise of V's.
        is_causal: Whether a new token attends to none after it.
        window_left: Tokens before a new token that it attends to, besides itself; -1: all.
        soft_cap: Logits x become soft_cap * tanh(x / soft_cap); None: they do not.
        sinks: fp32 ``[num_qo_heads]``: logits that count in the softmax and have no value.
        alibi_slopes: fp32 ``[num_qo_heads]``: slope * (position of key - position of query) is
            added to the logits.
        rope: Rotates q and K by their positions; None: they are rotated already, or never.
        lengths: How tokens are spread over the requests, one of ``LENGTH_MIXES``, where known; it
            only chooses the winner. None: a winner for mixed lengths if there is one.
        out: Where to write, like q but in memory of its own; None: allocated.
        lse: Where to write the LSE, fp32 ``[batch * query_len, num_qo_heads]``, contiguous; None:
            allocated if wanted.
        return_lse: Also return the logarithm of the sum of exponentials, sinks included; so does
            ``lse``.
        lse_base: Base of that logarithm, ``2`` or ``e``.

    Returns:
        ``out``, or ``(out, lse)``. A request without tokens gives 0 and, without sinks, minus
        infinity.

    Raises:
        UsageError: an argument has a wrong shape, dtype, device, stride or value, excludes another
            one, shares memory that is written, requires grad under grad mode, or lies on the CPU.
        UnsupportedError: no template serves the problem on this GPU.
        StoreError: a database cannot be read.
    """
    if is_traced(q):
        refuse_grad(_FUNCTION, q, sinks, alibi_slopes, out, lse)
        return _traced(
            q=q,
            kv_cache=kv_cache,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_len=kv_last_page_len,
            block_table=block_table,
            seq_lens=seq_lens,
            kv_layout=kv_layout,
            kv_dtype=kv_dtype,
            kv_block_scales=kv_block_scales,
            sm_scale=sm_scale,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            is_causal=is_causal,
            window_left=window_left,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            rope=rope,
            lengths=lengths,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
        )
    table = page_table_of(
        _FUNCTION,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=kv_last_page_len,
        block_table=block_table,
        seq_lens=seq_lens,
    )
    options = DecodeOptions(
        sm_scale=sm_scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        is_causal=is_causal,
        window_left=window_left,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        rope=rope,
    )
    checked_query(_FUNCTION, q, table)
    kv_dtype = dtype_with_scales(_FUNCTION, kv_dtype, kv_block_scales)
    pools = kv_views(_FUNCTION, kv_cache, kv_layout=kv_layout, kv_dtype=kv_dtype, q=q)
    scales = block_scale_views(_FUNCTION, kv_block_scales, pools, kv_layout=kv_layout)
    inputs = inputs_of(_FUNCTION, q, pools, table, options, scales)
    outputs = checked_outputs(_FUNCTION, inputs, out, lse, return_lse=return_lse, lse_base=lse_base)
    mixes = mixes_to_try(_FUNCTION, lengths)
    if inputs.batch > 0:
        _calls.hand_over(launch(_FUNCTION, inputs, outputs, mixes))
    return outputs.out if outputs.lse is None else (outputs.out, outputs.lse)


def resolve_paged_decode(
    q: torch.Tensor,
    kv_cache: KvCache,
    page_table: PageTable,
    *,
    kv_layout: str = "NHD",
    kv_dtype: str | None = None,
    kv_block_scales: KvCache | None = None,
    lengths: str | None = None,
    **options: Unpack[DecodeOptions],
) -> LookupResult:
    """The look-up that ``paged_decode`` makes for these arguments: its config is the one that runs.

    Raises:
        UsageError: as for ``paged_decode``, or there is no request.
        UnsupportedError: no template serves the problem on this GPU.
        StoreError: a database cannot be read.
    """
    function = "resolve_paged_decode"
    check_table(function, "page_table", page_table)
    checked_query(function, q, page_table)
    kv_dtype = dtype_with_scales(function, kv_dtype, kv_block_scales)
    pools = kv_views(function, kv_cache, kv_layout=kv_layout, kv_dtype=kv_dtype, q=q)
    scales = block_scale_views(function, kv_block_scales, pools, kv_layout=kv_layout)
    inputs = inputs_of(function, q, pools, page_table, options, scales)
    if inputs.batch == 0:
        raise UsageError(f"{function} got a page table of 0 requests: nothing would run")
    return resolve(function, inputs, mixes_to_try(function, lengths))


def _allocated(spelt: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs as ``checked_outputs`` makes them, for arguments of the operator."""
    q = spelt["q"][0]
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[:2], dtype=torch.float32
    )


_traced = TracedFunction(
    paged_decode,
    "Tensor[] q, Tensor[] kv_cache, Tensor? kv_indptr=None, Tensor? kv_indices=None, "
    "Tensor? kv_last_page_len=None, *, Tensor? block_table=None, Tensor? seq_lens=None, "
    "str kv_layout='NHD', str? kv_dtype=None, Tensor[]? kv_block_scales=None, "
    "float? sm_scale=None, float q_scale=1.0, "
    "float k_scale=1.0, Tensor? k_scale_tensor=None, float v_scale=1.0, "
    "Tensor? v_scale_tensor=None, bool is_causal=True, SymInt window_left=-1, "
    "float? soft_cap=None, Tensor? sinks=None, Tensor? alibi_slopes=None, float[]? rope=None, "
    "str? lengths=None, str lse_base='2'",
    _allocated,
    lists=("q", "kv_cache", "kv_block_scales"),
    scales=("k_scale", "v_scale"),
    calls=_calls,
)
