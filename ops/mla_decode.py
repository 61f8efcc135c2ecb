"""MLA decode: paged decode attention where V is the first part of K's row, which is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UsageError
from .checks import refuse_grad, wrong
from .decode_inputs import checked_outputs, checked_query, inputs_of
from .decode_launch import launch, mixes_to_try
from .decode_options import DecodeOptions, LseBase, Scale
from .kv_cache import joined, with_dtype
from .launched_call import Role
from .library import TracedFunction, is_traced
from .page_table import page_table_of
from .prepared import PreparedCalls

__all__ = ["mla_decode"]

_FUNCTION = "mla_decode"
_ROWS = ("inputs.k_cache", "inputs.v_cache")
_calls = PreparedCalls(
    {
        "q": Role(("inputs.q",)),
        "q[0]": Role(("inputs.q",)),
        "q[1]": Role(behind="q[0]"),
        "kv_cache": Role(_ROWS),
        "kv_cache[0]": Role(_ROWS),
        "kv_cache[1]": Role(behind="kv_cache[0]"),
        "kv_indptr": Role(("inputs.kv_indptr",)),
        "kv_indices": Role(("inputs.kv_indices",)),
        "kv_last_page_len": Role(("inputs.kv_last_page_len",)),
        "block_table": Role(("inputs.kv_indices",)),
        "seq_lens": Role(("inputs.seq_lens",)),
        **dict.fromkeys(
            ("kv_scale", "kv_scale_tensor"), Role(("inputs.k_scale", "inputs.v_scale"))
        ),
        "sinks": Role(("inputs.sinks",)),
        "out": Role(("outputs.out",), is_output=True, apart_from=("q", "q[0]", "q[1]")),
        "lse": Role(("outputs.lse",), is_output=True),
    }
)


@_calls.serve
def mla_decode(
    q: torch.Tensor | Sequence[torch.Tensor],
    kv_cache: torch.Tensor | Sequence[torch.Tensor],
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    kv_last_page_len: torch.Tensor | None = None,
    *,
    sm_scale: float,
    head_dim_v: int = 512,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    kv_dtype: str | None = None,
    q_scale: float = 1.0,
    kv_scale: Scale = 1.0,
    is_causal: bool = True,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    lengths: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: LseBase = "2",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of absorbed queries over a paged cache of latent rows.

    Arguments that are not named here are those of ``paged_decode``. Nothing is copied: what
    FlashInfer takes apart (q_nope and q_pe, ckv and kpe) must be neighbouring views of one tensor.

    Args:
        q: ``[batch * query_len, num_heads, 576]`` (or another size), the absorbed query before its
            rotated part; or the pair of both, views ``x[..., :512]`` and ``x[..., 512:]``.
        kv_cache: ``[num_pages, page_size, 576]``, the latent before the rotated key, one row a
            token for all heads; or the pair of both, likewise. Any strides with a contiguous last
            dimension.
        kv_indptr: As for ``paged_decode``.
        kv_indices: Likewise.
        kv_last_page_len: Likewise.
        sm_scale: Factor of the logits. There is no default: it depends on the head size before
            absorption (128 + 64 in DeepSeek-V3, hence 192 ** -0.5), which no tensor here has.
        head_dim_v: Values of a row that are V: 512.
        block_table: As for ``paged_decode``.
        seq_lens: Likewise.
        kv_dtype: Likewise.
        q_scale: Likewise.
        kv_scale: Factor of the stored rows: a number, or fp32 of one element on the device.
        is_causal: As for ``paged_decode``.
        window_left: Likewise.
        soft_cap: Likewise.
        sinks: Likewise.
        lengths: Likewise.
        out: Where to write, ``[batch * query_len, num_heads, head_dim_v]``; None: allocated.
        lse: As for ``paged_decode``.
        return_lse: Likewise.
        lse_base: Likewise.

    Returns:
        ``out``, or ``(out, lse)``, to be multiplied by the value's up-projection.

    Raises:
        UsageError: as for ``paged_decode``, or a pair whose parts are not neighbours.
        UnsupportedError: no template serves the problem on this GPU.
        StoreError: a database cannot be read.
    """
    if sm_scale is None:
        raise UsageError(
            f"sm_scale of {_FUNCTION} is None: must be a number, the head size before absorption "
            "to the power of -0.5 (192 ** -0.5 for DeepSeek-V3); no tensor here has that size"
        )
    parts = q if isinstance(q, Sequence) else (q,)
    if is_traced(*parts):
        refuse_grad(_FUNCTION, *parts)
        return _traced(
            q=q,
            kv_cache=kv_cache,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_len=kv_last_page_len,
            sm_scale=sm_scale,
            head_dim_v=head_dim_v,
            block_table=block_table,
            seq_lens=seq_lens,
            kv_dtype=kv_dtype,
            q_scale=q_scale,
            kv_scale=kv_scale,
            is_causal=is_causal,
            window_left=window_left,
            soft_cap=soft_cap,
            sinks=sinks,
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
        k_scale=kv_scale,
        v_scale=kv_scale,
        is_causal=is_causal,
        window_left=window_left,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    q = joined(_FUNCTION, "q", q)
    checked_query(_FUNCTION, q, table)
    pools = _latent_views(q, joined(_FUNCTION, "kv_cache", kv_cache), head_dim_v, kv_dtype)
    inputs = inputs_of(_FUNCTION, q, pools, table, options)
    outputs = checked_outputs(_FUNCTION, inputs, out, lse, return_lse=return_lse, lse_base=lse_base)
    mixes = mixes_to_try(_FUNCTION, lengths)
    if inputs.batch > 0:
        _calls.hand_over(launch(_FUNCTION, inputs, outputs, mixes))
    return outputs.out if outputs.lse is None else (outputs.out, outputs.lse)


def _latent_views(
    q: torch.Tensor, rows: torch.Tensor, head_dim_v: int, kv_dtype: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K ``[num_pages, page_size, 1, head_dim]`` and V, its first ``head_dim_v`` values."""
    head_dim = q.shape[2]
    if rows.dim() != 3 or rows.shape[2] != head_dim:
        allowed = f"[num_pages, page_size, {head_dim}], {head_dim} as in q"
        raise wrong(_FUNCTION, "shape of kv_cache", tuple(rows.shape), allowed)
    if not isinstance(head_dim_v, int) or not 1 <= head_dim_v < head_dim:
        raise UsageError(
            f"head_dim_v={head_dim_v!r} of {_FUNCTION} must be from 1 to {head_dim - 1}: the rest "
            f"of the {head_dim} values of a row is the rotated key"
        )
    if rows.stride(-1) != 1:
        allowed = "1: call .contiguous()"
        raise wrong(_FUNCTION, "last stride of kv_cache", rows.stride(-1), allowed)
    if rows.device != q.device:
        allowed = f"that of q, {str(q.device)!r}"
        raise wrong(_FUNCTION, "device of kv_cache", str(rows.device), allowed)
    k = with_dtype(_FUNCTION, "kv_cache", rows, kv_dtype, q.dtype).unsqueeze(2)
    return k, k[..., :head_dim_v]


def _allocated(spelt: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs as ``checked_outputs`` makes them, for arguments of the operator."""
    q = spelt["q"][0]
    shape = (*q.shape[:2], spelt.get("head_dim_v", 512))
    return q.new_empty(shape), q.new_empty(shape[:2], dtype=torch.float32)


_traced = TracedFunction(
    mla_decode,
    "Tensor[] q, Tensor[] kv_cache, Tensor? kv_indptr=None, Tensor? kv_indices=None, "
    "Tensor? kv_last_page_len=None, *, float sm_scale, SymInt head_dim_v=512, "
    "Tensor? block_table=None, Tensor? seq_lens=None, str? kv_dtype=None, float q_scale=1.0, "
    "float kv_scale=1.0, Tensor? kv_scale_tensor=None, bool is_causal=True, "
    "SymInt window_left=-1, float? soft_cap=None, Tensor? sinks=None, str? lengths=None, "
    "str lse_base='2'",
    _allocated,
    lists=("q", "kv_cache"),
    scales=("kv_scale",),
    calls=_calls,
)
