"""K and V of a call as views of one shape, whatever layout they came in; nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UsageError
from ..kernels.paged_decode.problem import KV_DTYPE_BYTES, NVFP4
from .checks import check_tensor, wrong
from .on_device import dtype_name

__all__ = [
    "KV_LAYOUTS",
    "KvCache",
    "as_tokens_and_heads",
    "joined",
    "kv_views",
    "pools_of",
    "with_dtype",
]

KV_LAYOUTS = ("NHD", "HND")
KvCache = torch.Tensor | Sequence[torch.Tensor]
"""One tensor with K and V at 0 and 1 of its second axis, or (K, V)."""

_EIGHT_BIT = tuple(word for word, size in KV_DTYPE_BYTES.items() if size == 1)
_ORDER = {"NHD": "page_size, num_kv_heads", "HND": "num_kv_heads, page_size"}


def kv_views(
    function: str, kv_cache: KvCache, *, kv_layout: str, kv_dtype: str | None, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, V), each a view ``[num_pages, page_size, num_kv_heads, head_dim]``; NVFP4: of its bytes.

    Raises:
        UsageError: a shape, dtype, stride or device does not fit q or the layout.
    """
    allowed = (*KV_DTYPE_BYTES, NVFP4)
    if kv_dtype is not None and kv_dtype not in allowed:
        raise UsageError(f"kv_dtype={kv_dtype!r} of {function}: one of {', '.join(allowed)}")
    is_packed = kv_dtype == NVFP4
    width = q.shape[-1] // 2 if is_packed else q.shape[-1]
    meaning = "two codes a byte of q's head_dim" if is_packed else "head_dim as in q"
    names, (k, v) = pools_of(
        function, "kv_cache", kv_cache, kv_layout=kv_layout, width=width, meaning=meaning
    )
    if is_packed:
        for name, pool in zip(names, (k, v), strict=True):
            if pool.dtype != torch.uint8:
                raise wrong(function, f"dtype of {name}", pool.dtype, f"torch.uint8 for {NVFP4}")
            _checked(function, name, pool, q)
        return as_tokens_and_heads(k, kv_layout), as_tokens_and_heads(v, kv_layout)
    pools = [
        _checked(function, name, with_dtype(function, name, pool, kv_dtype, q.dtype), q)
        for name, pool in zip(names, (k, v), strict=True)
    ]
    if pools[0].dtype != pools[1].dtype:
        raise wrong(function, "dtype of kv_cache[1]", v.dtype, f"that of K, {k.dtype}")
    return as_tokens_and_heads(pools[0], kv_layout), as_tokens_and_heads(pools[1], kv_layout)


def pools_of(
    function: str, argument: str, cache: KvCache, *, kv_layout: str, width: int, meaning: str
) -> tuple[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """What of an argument K and V are, and K and V of rows of ``width``, as they lie.

    Raises:
        UsageError: the layout is unknown, or a shape does not fit it.
    """
    if kv_layout not in KV_LAYOUTS:
        raise UsageError(f"kv_layout={kv_layout!r} of {function}: one of {', '.join(KV_LAYOUTS)}")
    order = _ORDER[kv_layout]
    if isinstance(cache, torch.Tensor):
        shape = tuple(cache.shape)
        if len(shape) != 5 or shape[1] != 2 or shape[4] != width:
            allowed = f"[num_pages, 2, {order}, {width}] ({kv_layout}, {meaning})"
            if len(shape) == 5 and shape[0] == 2:
                allowed += f"; pass {argument}.unbind(0) where K and V come before the pages"
            raise wrong(function, f"shape of {argument}", shape, allowed)
        k, v = cache.unbind(1)
        return (argument, argument), (k, v)
    k, v = _pair(function, argument, cache)
    names = (f"{argument}[0]", f"{argument}[1]")
    for name, pool in zip(names, (k, v), strict=True):
        shape = tuple(pool.shape)
        if len(shape) != 4 or shape[3] != width:
            allowed = f"[num_pages, {order}, {width}] ({kv_layout}, {meaning})"
            raise wrong(function, f"shape of {name}", shape, allowed)
    if k.shape != v.shape:
        allowed = f"that of K, {tuple(k.shape)}; for MLA call mla_decode"
        raise wrong(function, f"shape of {argument}[1]", tuple(v.shape), allowed)
    return names, (k, v)


def as_tokens_and_heads(pool: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """A view ``[num_pages, page_size, num_kv_heads, width]``."""
    return pool.transpose(1, 2) if kv_layout == "HND" else pool


def with_dtype(
    function: str, name: str, pool: torch.Tensor, kv_dtype: str | None, q_dtype: torch.dtype
) -> torch.Tensor:
    """The pool in the dtype that its bytes mean.

    Raises:
        UsageError: the cache has no dtype that is served, or another one than ``kv_dtype`` says.
    """
    if kv_dtype is None and pool.dtype == q_dtype:
        return pool
    if kv_dtype is not None and kv_dtype not in tuple(KV_DTYPE_BYTES):
        raise UsageError(f"kv_dtype={kv_dtype!r} of {function}: one of {', '.join(KV_DTYPE_BYTES)}")
    if pool.dtype == torch.uint8:
        if kv_dtype not in _EIGHT_BIT:
            raise wrong(
                function,
                f"dtype of {name}",
                pool.dtype,
                f"named by kv_dtype= where it is torch.uint8: {' or '.join(_EIGHT_BIT)}",
            )
        pool = pool.view(getattr(torch, kv_dtype))
    if kv_dtype is not None and dtype_name(pool.dtype) != kv_dtype:
        raise wrong(function, f"dtype of {name}", pool.dtype, f"torch.{kv_dtype}, as kv_dtype says")
    if pool.dtype != q_dtype and dtype_name(pool.dtype) not in _EIGHT_BIT:
        allowed = f"that of q, {q_dtype}, or " + " or ".join(f"torch.{word}" for word in _EIGHT_BIT)
        raise wrong(function, f"dtype of {name}", pool.dtype, allowed)
    return pool


def joined(function: str, name: str, parts: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of a pair whose last dimensions lie side by side in memory; a tensor as it is.

    Raises:
        UsageError: the parts are not neighbouring views of one tensor, so that joining would copy.
    """
    if isinstance(parts, torch.Tensor):
        return parts
    first, second = _pair(function, name, parts)
    is_neighbour = (
        first.dtype == second.dtype
        and first.device == second.device
        and first.dim() > 0
        and first.shape[:-1] == second.shape[:-1]
        and first.stride() == second.stride()
        and second.data_ptr() == first.data_ptr() + first.shape[-1] * first.element_size()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )
    if not is_neighbour:
        raise UsageError(
            f"the two parts of {name} in {function} must be neighbouring views of one tensor, "
            f"{name}[..., :n] and {name}[..., n:]: joining {tuple(first.shape)} and "
            f"{tuple(second.shape)} would copy; keep them in one tensor, or pass torch.cat(...)"
        )
    shape = (*first.shape[:-1], first.shape[-1] + second.shape[-1])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _pair(
    function: str, name: str, parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(parts, Sequence):
        raise wrong(function, f"type of {name}", type(parts).__name__, "torch.Tensor, or a pair")
    if len(parts) != 2:
        raise wrong(function, f"length of {name}", len(parts), "2")
    for i, part in enumerate(parts):
        check_tensor(function, f"{name}[{i}]", part)
    return parts[0], parts[1]


def _checked(function: str, name: str, pool: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if pool.stride(-1) != 1:
        raise wrong(function, f"last stride of {name}", pool.stride(-1), "1: call .contiguous()")
    if pool.device != q.device:
        raise wrong(function, f"device of {name}", str(pool.device), f"that of q, {q.device!s}")
    return pool
