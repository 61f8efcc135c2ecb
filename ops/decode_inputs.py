"""The arguments of a paged-decode call, checked, as what the kernels read and write."""

from __future__ import annotations

import torch

from ..errors import UsageError
from ..kernels.paged_decode import PagedDecodeInputs, PagedDecodeOutputs
from ..kernels.paged_decode.problem import DTYPE_BYTES
from .checks import check_flags, check_shape, check_tensor, refuse_grad, wrong
from .decode_options import DecodeOptions, LseBase, semantics_of
from .on_device import dtype_name
from .overlap import check_written_once, shares_memory
from .page_table import PageTable

__all__ = ["checked_outputs", "checked_query", "inputs_of"]


def checked_query(function: str, q: torch.Tensor, table: PageTable) -> None:
    """Checks q and the page table, and that q has equally many rows a request.

    Raises:
        UsageError: a type, shape, dtype, stride or device is wrong.
    """
    check_tensor(function, "q", q)
    if q.dim() != 3:
        raise wrong(
            function, "shape of q", tuple(q.shape), "[batch * query_len, num_qo_heads, head_dim]"
        )
    if dtype_name(q.dtype) not in DTYPE_BYTES:
        allowed = " or ".join(f"torch.{name}" for name in DTYPE_BYTES)
        raise wrong(function, "dtype of q", q.dtype, allowed)
    if q.stride(-1) != 1:
        raise wrong(function, "last stride of q", q.stride(-1), "1: call .contiguous()")
    table.check(function, q.device)
    batch, rows = table.batch, q.shape[0]
    if (rows == 0) != (batch == 0) or rows % max(1, batch):
        allowed = f"a multiple of the {batch} requests of the page table"
        raise wrong(function, "rows of q", rows, allowed)


def inputs_of(  # noqa: PLR0917  (the arguments of a call, group by group)
    function: str,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    table: PageTable,
    options: DecodeOptions,
    block_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> PagedDecodeInputs:
    """What the kernels read, from a query and a table that fit and the views of K and V.

    ``block_scales`` are those of an NVFP4 cache.

    Raises:
        UsageError: the heads do not divide, an option is wrong, or grad is required.
    """
    k, v = pools
    num_kv_heads = k.shape[2]
    if num_kv_heads == 0 or q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        allowed = f"a multiple of the {num_kv_heads} KV heads of kv_cache"
        raise wrong(function, "num_qo_heads of q", q.shape[1], allowed)
    refuse_grad(function, q, k, v)
    query_len = q.shape[0] // max(1, table.batch)
    return PagedDecodeInputs(
        q=q,
        k_cache=k,
        v_cache=v,
        k_block_scales=None if block_scales is None else block_scales[0],
        v_block_scales=None if block_scales is None else block_scales[1],
        kv_indices=table.indices,
        kv_indptr=table.indptr,
        kv_last_page_len=table.last_page_len,
        seq_lens=table.seq_lens,
        **semantics_of(function, q, query_len, options),
    )


def checked_outputs(
    function: str,
    inputs: PagedDecodeInputs,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    *,
    return_lse: bool,
    lse_base: LseBase,
) -> PagedDecodeOutputs:
    """Where to write: the given tensors where they fit, or new ones.

    Raises:
        UsageError: a shape, dtype, stride, device or the base is wrong, or elements would be
            written that are still read or twice.
    """
    check_flags(function, return_lse=return_lse)
    if lse_base not in ("2", "e"):
        raise UsageError(f"lse_base={lse_base!r} of {function} must be '2' or 'e'")
    q = inputs.q
    shape = (*q.shape[:2], inputs.head_dim_v)
    is_given = out is not None
    out = q.new_empty(shape) if out is None else out
    if lse is None and return_lse:
        lse = q.new_empty(shape[:2], dtype=torch.float32)
    given = {"out": (out, shape, q.dtype), "lse": (lse, shape[:2], torch.float32)}
    for name, (tensor, wanted, dtype) in given.items():
        if tensor is None:
            continue
        check_shape(function, name, tensor, wanted)
        refuse_grad(function, tensor)
        if tensor.dtype != dtype:
            raise wrong(function, f"dtype of {name}", tensor.dtype, str(dtype))
        if tensor.device != q.device:
            allowed = f"that of q, {str(q.device)!r}"
            raise wrong(function, f"device of {name}", str(tensor.device), allowed)
    if out.stride(-1) != 1:
        raise wrong(function, "last stride of out", out.stride(-1), "1")
    if lse is not None and not lse.is_contiguous():
        raise wrong(function, "stride of lse", lse.stride(), "that of a contiguous tensor")
    if is_given:
        check_written_once(function, "out", out)
        if shares_memory(out, q):
            raise UsageError(
                f"out of {function} shares memory with q: other blocks still read q; pass another"
            )
    return PagedDecodeOutputs(out, lse, lse_base)
