"""Paged decode of requests that share a prefix: its pages are given once and read once.

Two levels: all queries of a group over their prefix, as one request with many query tokens; each
request over its own suffix; then the two states are merged by their LSEs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..kernels.attention_states.launcher import AttentionStates
from ..kernels.paged_decode import PagedDecodeInputs, PagedDecodeOutputs
from .attention_states import merged
from .checks import refuse_grad, wrong
from .decode_inputs import checked_outputs, checked_query, inputs_of
from .decode_launch import launch, mixes_to_try
from .decode_options import DecodeOptions, LseBase, Scale
from .kv_cache import KvCache, kv_views
from .launched_call import Role
from .library import TracedFunction, is_traced
from .nvfp4_cache import block_scale_views, dtype_with_scales
from .page_table import PageTable, check_table
from .prepared import PreparedCalls

__all__ = ["shared_prefix_decode"]

_FUNCTION = "shared_prefix_decode"
_PREFIX_MIXES = ("equal", "mixed")
"""A prefix is as long as its table says, so a winner for equal lengths fits best."""


_TABLE = {
    "indices": "kv_indices",
    "indptr": "kv_indptr",
    "last_page_len": "kv_last_page_len",
    "seq_lens": "seq_lens",
}
"""Parts of a page table, as the kernels' inputs call them."""


def _table_roles(step: str) -> dict[str, Role]:
    """Of the page table of a step, as the function or its operator has it."""
    roles = {part: Role((f"{step}:inputs.{field}",)) for part, field in _TABLE.items()}
    return {f"{step}{mark}{part}": role for part, role in roles.items() for mark in "._"}


_calls = PreparedCalls(
    {
        "q": Role(("inputs.q",)),
        "kv_cache": Role(("inputs.k_cache", "inputs.v_cache")),
        "kv_cache[0]": Role(("inputs.k_cache",)),
        "kv_cache[1]": Role(("inputs.v_cache",)),
        **_table_roles("prefix"),
        **_table_roles("suffix"),
        **dict.fromkeys(("k_scale", "k_scale_tensor"), Role(("inputs.k_scale",))),
        **dict.fromkeys(("v_scale", "v_scale_tensor"), Role(("inputs.v_scale",))),
        "sinks": Role(("suffix:inputs.sinks",)),
        "kv_block_scales": Role(("inputs.k_block_scales", "inputs.v_block_scales")),
        "kv_block_scales[0]": Role(("inputs.k_block_scales",)),
        "kv_block_scales[1]": Role(("inputs.v_block_scales",)),
        "out": Role(
            ("suffix:outputs.out", "merge:inputs.outs[1]", "merge:outputs[0]"),
            is_output=True,
            apart_from=("q",),
        ),
        "lse": Role(
            ("suffix:outputs.lse", "merge:inputs.lses[1]", "merge:outputs[1]"), is_output=True
        ),
        "out of the prefix": Role(("prefix:outputs.out", "merge:inputs.outs[0]"), is_output=True),
        "lse of the prefix": Role(("prefix:outputs.lse", "merge:inputs.lses[0]"), is_output=True),
    }
)


@_calls.serve
def shared_prefix_decode(
    q: torch.Tensor,
    kv_cache: KvCache,
    prefix: PageTable,
    suffix: PageTable,
    *,
    kv_layout: str = "NHD",
    kv_dtype: str | None = None,
    kv_block_scales: KvCache | None = None,
    sm_scale: float | None = None,
    q_scale: float = 1.0,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    is_causal: bool = True,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    lengths: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: LseBase = "2",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request over a prefix that it shares with others, then its own suffix.

    The same as ``paged_decode`` over the two one after the other, with one rounding of the two
    partial outputs to q's dtype more. Arguments that are not named here are those of
    ``paged_decode``. A window, ALiBi slopes and fused RoPE depend on positions that the shared part
    does not know, and are not taken; K is to be rotated before it is stored.

    Args:
        q: ``[batch * query_len, num_qo_heads, head_dim]``, as for ``paged_decode``.
        kv_cache: Holds the pages of prefixes and suffixes.
        prefix: One row for each group: the pages that its requests share. A group is the same
            number of requests that follow each other; for groups of different sizes, call once
            for each.
        suffix: One row for each request: its own pages, which begin where the prefix ends. With
            more than one query token it holds these tokens at least; otherwise it may be empty.
        kv_layout: As for ``paged_decode``.
        kv_dtype: Likewise.
        kv_block_scales: Likewise.
        sm_scale: Likewise.
        q_scale: Likewise.
        k_scale: Likewise.
        v_scale: Likewise.
        is_causal: Likewise, among the query tokens of a request.
        soft_cap: Likewise.
        sinks: Likewise; they count once.
        lengths: How the suffixes are spread, where known; it only chooses the winner.
        out: As for ``paged_decode``.
        lse: Likewise.
        return_lse: Likewise.
        lse_base: Likewise.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        UsageError: as for ``paged_decode``, or the groups do not divide the requests.
        UnsupportedError: no template serves one of the two problems on this GPU.
        StoreError: a database cannot be read.
    """
    if is_traced(q):
        refuse_grad(_FUNCTION, q, sinks, out, lse)
        for name, table in (("prefix", prefix), ("suffix", suffix)):
            check_table(_FUNCTION, name, table)
        return _traced(
            q=q,
            kv_cache=kv_cache,
            **_spread("prefix", prefix),
            **_spread("suffix", suffix),
            kv_layout=kv_layout,
            kv_dtype=kv_dtype,
            kv_block_scales=kv_block_scales,
            sm_scale=sm_scale,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            is_causal=is_causal,
            soft_cap=soft_cap,
            sinks=sinks,
            lengths=lengths,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
        )
    options = DecodeOptions(
        sm_scale=sm_scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        is_causal=is_causal,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    _check_tables(q, prefix, suffix)
    kv_dtype = dtype_with_scales(_FUNCTION, kv_dtype, kv_block_scales)
    pools = kv_views(_FUNCTION, kv_cache, kv_layout=kv_layout, kv_dtype=kv_dtype, q=q)
    scales = block_scale_views(_FUNCTION, kv_block_scales, pools, kv_layout=kv_layout)
    inputs = inputs_of(_FUNCTION, q, pools, suffix, options, scales)
    # An LSE is needed to merge, whether or not it is asked for.
    outputs = checked_outputs(_FUNCTION, inputs, out, lse, return_lse=True, lse_base=lse_base)
    mixes = mixes_to_try(_FUNCTION, lengths)
    assert outputs.lse is not None
    if suffix.batch > 0:
        shared = PagedDecodeOutputs(
            torch.empty_like(outputs.out), torch.empty_like(outputs.lse), lse_base
        )
        over_prefix = launch(_FUNCTION, _over_prefix(inputs, prefix), shared, _PREFIX_MIXES)
        over_suffix = launch(_FUNCTION, inputs, outputs, mixes)
        assert shared.lse is not None
        states = AttentionStates((shared.out, outputs.out), (shared.lse, outputs.lse), lse_base)
        _, (merge,) = merged(_FUNCTION, states, outputs.out, outputs.lse)
        _calls.hand_over(
            replace(over_prefix, step="prefix"),
            replace(over_suffix, step="suffix"),
            replace(merge, step="merge"),
        )
    return (outputs.out, outputs.lse) if return_lse or lse is not None else outputs.out


def _over_prefix(inputs: PagedDecodeInputs, prefix: PageTable) -> PagedDecodeInputs:
    """A group's queries as the query tokens of one request; the sinks count in the suffix."""
    return replace(
        inputs,
        kv_indices=prefix.indices,
        kv_indptr=prefix.indptr,
        kv_last_page_len=prefix.last_page_len,
        seq_lens=prefix.seq_lens,
        is_causal=inputs.q.shape[0] == prefix.batch,
        sinks=None,
    )


def _check_tables(q: torch.Tensor, prefix: PageTable, suffix: PageTable) -> None:
    for name, table in (("prefix", prefix), ("suffix", suffix)):
        check_table(_FUNCTION, name, table)
    checked_query(_FUNCTION, q, suffix)
    prefix.check(_FUNCTION, q.device, "prefix ")
    groups, batch = prefix.batch, suffix.batch
    if (groups == 0) != (batch == 0) or batch % max(1, groups):
        allowed = f"a divisor of the {batch} requests of suffix, at least 1"
        raise wrong(_FUNCTION, "number of groups in prefix", groups, allowed)


def _spread(name: str, table: PageTable) -> dict[str, torch.Tensor | None]:
    """A page table as arguments of the operator."""
    return {f"{name}_{part}": getattr(table, part) for part in _TABLE}


def _gathered(name: str, arguments: dict[str, Any]) -> PageTable:
    """The page table of such arguments, which are taken out."""
    return PageTable(**{part: arguments.pop(f"{name}_{part}", None) for part in _TABLE})


def _with_tables_spread(q: torch.Tensor, kv_cache: KvCache, **arguments: Any) -> Any:
    """``shared_prefix_decode`` for arguments as the operator has them."""
    prefix, suffix = (_gathered(name, arguments) for name in ("prefix", "suffix"))
    return inspect.unwrap(shared_prefix_decode)(q, kv_cache, prefix, suffix, **arguments)


def _allocated(spelt: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs as ``checked_outputs`` makes them, for arguments of the operator."""
    q = spelt["q"][0]
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


_traced = TracedFunction(
    _with_tables_spread,
    "Tensor[] q, Tensor[] kv_cache, *, "
    "Tensor prefix_indices, Tensor? prefix_indptr=None, Tensor? prefix_last_page_len=None, "
    "Tensor? prefix_seq_lens=None, Tensor suffix_indices, Tensor? suffix_indptr=None, "
    "Tensor? suffix_last_page_len=None, Tensor? suffix_seq_lens=None, "
    "str kv_layout='NHD', str? kv_dtype=None, Tensor[]? kv_block_scales=None, "
    "float? sm_scale=None, float q_scale=1.0, float k_scale=1.0, Tensor? k_scale_tensor=None, "
    "float v_scale=1.0, Tensor? v_scale_tensor=None, bool is_causal=True, float? soft_cap=None, "
    "Tensor? sinks=None, str? lengths=None, str lse_base='2'",
    _allocated,
    lists=("q", "kv_cache", "kv_block_scales"),
    scales=("k_scale", "v_scale"),
    name=_FUNCTION,
    calls=_calls,
)
