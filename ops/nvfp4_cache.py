"""The block scales of an NVFP4 cache as views of one shape; nothing is copied."""

from __future__ import annotations

import torch

from ..errors import UsageError
from ..kernels.paged_decode.problem import NVFP4, NVFP4_BLOCK
from .checks import wrong
from .kv_cache import KvCache, as_tokens_and_heads, pools_of

__all__ = ["block_scale_views", "dtype_with_scales"]


def dtype_with_scales(
    function: str, kv_dtype: str | None, block_scales: KvCache | None
) -> str | None:
    """The dtype of the cache: with block scales NVFP4, said or not; else as it is said.

    Raises:
        UsageError: there are block scales and another dtype, or NVFP4 and no block scales.
    """
    has_scales = isinstance(block_scales, torch.Tensor) or bool(block_scales)
    if has_scales and kv_dtype not in (None, NVFP4):
        raise UsageError(
            f"kv_block_scales of {function} belong to a cache of {NVFP4}, and kv_dtype is "
            f"{kv_dtype!r}: pass kv_dtype={NVFP4!r}, or k_scale and v_scale for the whole cache"
        )
    if kv_dtype == NVFP4 and not has_scales:
        raise UsageError(
            f"kv_dtype={NVFP4!r} of {function} needs kv_block_scales=: e4m3, one for each "
            f"{NVFP4_BLOCK} values of a row, in the cache's layout"
        )
    return NVFP4 if has_scales else kv_dtype


def block_scale_views(
    function: str,
    block_scales: KvCache | None,
    pools: tuple[torch.Tensor, torch.Tensor],
    *,
    kv_layout: str,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(K's, V's), e4m3 ``[num_pages, page_size, num_kv_heads, head_dim / 16]``; None for none.

    Raises:
        UsageError: a shape, dtype, stride or device does not fit the views of the codes.
    """
    if not isinstance(block_scales, torch.Tensor) and not block_scales:
        return None
    codes = pools[0]
    width = 2 * codes.shape[3] // NVFP4_BLOCK
    names, found = pools_of(
        function,
        "kv_block_scales",
        block_scales,
        kv_layout=kv_layout,
        width=width,
        meaning=f"one for {NVFP4_BLOCK} values",
    )
    views = []
    for name, pool in zip(names, found, strict=True):
        if pool.dtype not in (torch.float8_e4m3fn, torch.uint8):
            allowed = "torch.float8_e4m3fn, or torch.uint8 for its bytes"
            raise wrong(function, f"dtype of {name}", pool.dtype, allowed)
        if pool.stride(-1) != 1:
            raise wrong(function, f"last stride of {name}", pool.stride(-1), "1")
        if pool.device != codes.device:
            allowed = f"that of kv_cache, {codes.device!s}"
            raise wrong(function, f"device of {name}", str(pool.device), allowed)
        view = as_tokens_and_heads(pool.view(torch.float8_e4m3fn), kv_layout)
        if view.shape[:3] != codes.shape[:3]:
            allowed = f"of the pages, tokens and heads of kv_cache, {tuple(codes.shape[:3])}"
            raise wrong(function, f"shape of {name}", tuple(view.shape), allowed)
        views.append(view)
    return views[0], views[1]
