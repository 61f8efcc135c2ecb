"""Paged decode attention: checks the tensors, looks the config up, launches.

Owns nothing of the kernel or the choice: ``kernels.paged_decode`` has the former, dispatch the
latter. The checks read shapes, never values, so that no call waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from ..errors import UsageError
from ..kernels.base import Launcher
from ..kernels.paged_decode import PagedDecodeInputs, PagedDecodeOutputs, PagedDecodeProblem
from ..kernels.paged_decode.problem import DTYPE_BYTES
from ..kernels.registry import template
from ..tuner.dispatch import LookupResult, current_snapshot
from .checks import wrong
from .launchers import LauncherCache
from .on_device import device_spec, dtype_name, on_device

__all__ = ["paged_decode", "resolve_paged_decode"]

_launchers = LauncherCache()
_FUNCTION = "paged_decode"
_wrong = partial(wrong, _FUNCTION)


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    *,
    sm_scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token a request over its paged KV cache.

    The config comes from a snapshot of the databases (``tilescout.lookup``). The first call of a
    bucket (batch, cache size rounded up to a power of two, strides, stream) compiles and allocates
    scratch memory; later ones only launch. Before a CUDA graph is captured the function must have
    run once with the same shapes. Nothing here is differentiable.

    Args:
        q: ``[batch, num_qo_heads, head_dim]``, bf16 or fp16, last dimension contiguous.
        kv_cache: ``[num_pages, 2, page_size, num_kv_heads, head_dim]`` (NHD; K at 0, V at 1) in q's
            dtype, last dimension contiguous.
        kv_indptr: int32 ``[batch + 1]``: request b owns the pages
            ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        kv_indices: int32, page ids in token order. May be longer than what is in use; its length
            decides which winner serves.
        kv_last_page_len: int32 ``[batch]``: tokens in the last page of each request.
        sm_scale: Factor of the logits; None: ``head_dim ** -0.5``.
        out: Where to write, like q; None: allocated.
        return_lse: Also return the base-2 logarithm of the sum of exponentials.

    Returns:
        ``out``, or ``(out, lse)`` with lse fp32 ``[batch, num_qo_heads]``. A request without pages
        gives 0 and -inf.

    Raises:
        UsageError: a tensor has a wrong shape, dtype, device or stride, or lies on the CPU.
        UnsupportedError: no template serves the problem on this GPU.
        StoreError: a database cannot be read.
    """
    _check_tensors(q, kv_cache, kv_indptr, kv_indices, kv_last_page_len)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _check_out(out, q)
    scale = _check_scale(sm_scale, q.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    if q.shape[0] > 0:
        inputs = PagedDecodeInputs(
            q=q,
            k_cache=kv_cache[:, 0],
            v_cache=kv_cache[:, 1],
            kv_indices=kv_indices,
            kv_indptr=kv_indptr,
            kv_last_page_len=kv_last_page_len,
            sm_scale=scale,
        )
        with on_device(q.device):
            _launch(inputs, PagedDecodeOutputs(out, lse))
    return out if lse is None else (out, lse)


def resolve_paged_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, kv_indices: torch.Tensor
) -> LookupResult:
    """The look-up that ``paged_decode`` makes for these tensors: its config is the one that runs.

    Raises:
        UsageError: the tensors are on the CPU and Triton's interpreter is off.
        UnsupportedError: no template serves the problem on this GPU.
        StoreError: a database cannot be read.
    """
    return _resolve_sizes(q, kv_cache[:, 0], kv_indices)


def _resolve(inputs: PagedDecodeInputs) -> LookupResult:
    return _resolve_sizes(inputs.q, inputs.k_cache, inputs.kv_indices)


def _resolve_sizes(
    q: torch.Tensor, k_cache: torch.Tensor, kv_indices: torch.Tensor
) -> LookupResult:
    page_size, num_kv_heads = k_cache.shape[1:3]
    problem = _problem(
        batch=q.shape[0],
        kv_len=_kv_bucket(kv_indices.numel() * page_size, q.shape[0]),
        num_qo_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=q.shape[2],
        page_size=page_size,
        dtype=dtype_name(q.dtype),
    )
    return current_snapshot().lookup(problem, device_spec(q.device, _FUNCTION))


@lru_cache(maxsize=4096)
def _problem(**values: int | str) -> PagedDecodeProblem:
    return PagedDecodeProblem.from_dict(values)


def _kv_bucket(num_tokens: int, batch: int) -> int:
    """Mean tokens a request, rounded up to a power of two: a growing cache rarely changes it."""
    mean = max(1, -(-num_tokens // batch))
    return 1 << (mean - 1).bit_length()


def _launch(inputs: PagedDecodeInputs, outputs: PagedDecodeOutputs) -> None:
    q, cache = inputs.q, inputs.k_cache
    result = _resolve(inputs)
    problem = result.problem
    assert isinstance(problem, PagedDecodeProblem)
    key = (
        result.config,
        problem,
        q.device.index,
        *(q.stride(), cache.stride(), outputs.out.stride()),
        # What the kernels are specialised on; a launcher that has run has them loaded.
        all(t.data_ptr() % 16 == 0 for t in (q, cache, outputs.out)),
        outputs.lse is not None,
    )
    owned = _launchers.get(key, q.device, lambda: _build(result, problem, inputs))
    with owned.lock:
        owned.launcher.launch(inputs, outputs)


def _build(
    result: LookupResult, problem: PagedDecodeProblem, inputs: PagedDecodeInputs
) -> Launcher:
    # Scratch is sized for the fullest page table of the bucket, so the launcher serves all of it.
    num_pages = -(-problem.batch * problem.kv_len // problem.page_size)
    fullest = inputs.kv_indices.new_empty(num_pages)
    chosen = template(problem.op, result.template)
    return chosen.build(problem, result.config, replace(inputs, kv_indices=fullest))


def _check_tensors(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    if q.dim() != 3:
        raise _wrong("shape of q", tuple(q.shape), "[batch, num_qo_heads, head_dim]")
    batch, num_qo_heads, head_dim = q.shape
    if dtype_name(q.dtype) not in DTYPE_BYTES:
        raise _wrong("dtype of q", q.dtype, " or ".join(f"torch.{name}" for name in DTYPE_BYTES))
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2 or kv_cache.shape[4] != head_dim:
        layout = f"[num_pages, 2, page_size, num_kv_heads, {head_dim}] (NHD, head_dim as in q)"
        raise _wrong("shape of kv_cache", tuple(kv_cache.shape), layout)
    num_kv_heads = kv_cache.shape[3]
    if num_kv_heads == 0 or num_qo_heads == 0 or num_qo_heads % num_kv_heads:
        allowed = f"a multiple of the {num_kv_heads} KV heads of kv_cache"
        raise _wrong("num_qo_heads of q", num_qo_heads, allowed)
    if kv_cache.dtype != q.dtype:
        raise _wrong("dtype of kv_cache", kv_cache.dtype, f"that of q, {q.dtype}")
    for name, tensor in (("q", q), ("kv_cache", kv_cache)):
        if tensor.stride(-1) != 1:
            raise _wrong(f"last stride of {name}", tensor.stride(-1), "1: call .contiguous()")
    _check_table("kv_indptr", kv_indptr, (batch + 1,), q.device)
    _check_table("kv_indices", kv_indices, None, q.device)
    _check_table("kv_last_page_len", kv_last_page_len, (batch,), q.device)
    if kv_cache.device != q.device:
        raise _wrong("device of kv_cache", str(kv_cache.device), f"that of q, {str(q.device)!r}")


def _check_table(
    name: str, table: torch.Tensor, shape: Sequence[int] | None, device: torch.device
) -> None:
    if table.dim() != 1 or (shape is not None and tuple(table.shape) != shape):
        allowed = "one dimension" if shape is None else f"{list(shape)}, for the batch of q"
        raise _wrong(f"shape of {name}", tuple(table.shape), allowed)
    if table.dtype != torch.int32:
        raise _wrong(f"dtype of {name}", table.dtype, "torch.int32: call .to(torch.int32)")
    if table.device != device:
        raise _wrong(f"device of {name}", str(table.device), f"that of q, {str(device)!r}")
    if not table.is_contiguous():
        raise _wrong(f"stride of {name}", table.stride(), "(1,): call .contiguous()")


def _check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    if out.shape != q.shape:
        raise _wrong("shape of out", tuple(out.shape), f"that of q, {tuple(q.shape)}")
    if out.dtype != q.dtype:
        raise _wrong("dtype of out", out.dtype, f"that of q, {q.dtype}")
    if out.device != q.device:
        raise _wrong("device of out", str(out.device), f"that of q, {str(q.device)!r}")
    if out.stride(-1) != 1:
        raise _wrong("last stride of out", out.stride(-1), "1")


def _check_scale(sm_scale: float | None, head_dim: int) -> float:
    scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    if not math.isfinite(scale):
        raise UsageError(f"sm_scale={sm_scale!r} of paged_decode must be finite: None is usual")
    return scale
