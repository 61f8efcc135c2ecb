"""Quantises new tokens of K and V into the pages of an NVFP4 cache, in one launch.

Owns the checks: ``kernels.quantization`` has the kernel. They read shapes, never values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UsageError
from ..kernels.paged_decode.problem import NVFP4, NVFP4_BLOCK
from ..kernels.quantization.formats import format_named
from ..kernels.quantization.triton_append import NvFp4Pages, append_to_pages
from .checks import check_index, check_shape, check_tensor, refuse_grad, wrong
from .decode_options import Scale
from .kv_cache import KvCache, kv_views
from .library import define_operator, is_traced
from .nvfp4_cache import block_scale_views
from .on_device import device_spec, on_device
from .overlap import check_written_once

__all__ = ["append_nvfp4_kv_cache"]

_FUNCTION = "append_nvfp4_kv_cache"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def append_nvfp4_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: KvCache,
    kv_block_scales: KvCache,
    *,
    kv_layout: str = "NHD",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    convention: str = "nearest",
) -> None:
    """Writes codes and block scales of new tokens where ``paged_decode`` reads them.

    A value is code * block scale * tensor scale. The block scale is e4m3(amax / 6 / tensor scale)
    or what another convention makes of it; codes are rounded to nearest, ties to even, and
    saturate. A block with NaN or infinity gets the scale NaN. Nothing waits for the device, and a
    CUDA graph may hold the call.

    Args:
        k: ``[tokens, num_kv_heads, head_dim]``, bf16, fp16 or fp32, last dimension contiguous.
        v: Likewise, of the same dtype.
        slot_mapping: int32 or int64 ``[tokens]``: page * page_size + token in the page. A negative
            one is padding: nothing is written. No slot may stand twice.
        kv_cache: As for ``paged_decode`` with ``kv_dtype="nvfp4"``.
        kv_block_scales: Likewise.
        kv_layout: ``NHD`` or ``HND``.
        k_scale: Tensor scale of K, by which ``paged_decode`` multiplies: a number above 0, or fp32
            of one element on the device.
        v_scale: Likewise of V.
        convention: How block scales are chosen: ``nearest``, ``normal`` (none below 2^-6),
            ``four_over_six_mae`` or ``four_over_six_mse`` (1.5 times the scale where the block's
            absolute or squared errors are lower with it; tensor scales are then best of
            (largest magnitude) / 1536).

    Raises:
        UsageError: an argument has a wrong shape, dtype, device, stride or value, requires grad
            under grad mode, or lies on the CPU.
    """
    if is_traced(k, v, slot_mapping):
        _traced(
            *(k, v, slot_mapping, kv_cache, kv_block_scales),
            *(kv_layout, k_scale, v_scale, convention),
        )
        return
    known = tuple(format_named(NVFP4).conventions)
    if convention not in known:
        raise wrong(_FUNCTION, "convention", convention, f"one of {', '.join(known)}")
    _check_rows(k, v, slot_mapping)
    pools = kv_views(_FUNCTION, kv_cache, kv_layout=kv_layout, kv_dtype=NVFP4, q=k)
    scales = block_scale_views(_FUNCTION, kv_block_scales, pools, kv_layout=kv_layout)
    if scales is None:
        raise wrong(_FUNCTION, "kv_block_scales", kv_block_scales, "one tensor or a pair")
    if pools[0].shape[2] != k.shape[1]:
        allowed = f"{k.shape[1]}, as many as k has"
        raise wrong(_FUNCTION, "number of heads of kv_cache", pools[0].shape[2], allowed)
    for name, pool in zip(("kv_cache", "kv_block_scales"), (pools[0], scales[0]), strict=True):
        check_written_once(_FUNCTION, name, pool)
    factors = _tensor_scales(k, k_scale, v_scale)
    device_spec(k.device, _FUNCTION)  # refuses what no kernel runs on
    with on_device(k.device):
        append_to_pages(k, v, slot_mapping, NvFp4Pages(*pools, *scales, *factors), convention)


def _check_rows(k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    check_tensor(_FUNCTION, "k", k)
    if k.dim() != 3 or not k.shape[2] or k.shape[2] % NVFP4_BLOCK:
        allowed = f"[tokens, num_kv_heads, a multiple of {NVFP4_BLOCK}]"
        raise wrong(_FUNCTION, "shape of k", tuple(k.shape), allowed)
    check_shape(_FUNCTION, "v", v, tuple(k.shape))
    check_shape(_FUNCTION, "slot_mapping", slot_mapping, (k.shape[0],))
    refuse_grad(_FUNCTION, k, v)
    if k.dtype not in _DTYPES:
        raise wrong(_FUNCTION, "dtype of k", k.dtype, "bf16, fp16 or fp32")
    if v.dtype != k.dtype or v.device != k.device:
        allowed = f"those of k, {(k.dtype, str(k.device))}"
        raise wrong(_FUNCTION, "dtype and device of v", (v.dtype, str(v.device)), allowed)
    for name, rows in (("k", k), ("v", v)):
        if rows.stride(-1) != 1:
            raise wrong(_FUNCTION, f"last stride of {name}", rows.stride(-1), "1")
    check_index(_FUNCTION, "slot_mapping", slot_mapping, k.device)


def _tensor_scales(k: torch.Tensor, k_scale: Scale, v_scale: Scale) -> tuple[Scale, Scale]:
    """Both as numbers, or both as tensors."""
    scales: list[Scale] = []
    on_a_device = isinstance(k_scale, torch.Tensor) or isinstance(v_scale, torch.Tensor)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, torch.Tensor):
            if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != k.device:
                what = (scale.dtype, tuple(scale.shape), str(scale.device))
                allowed = f"a number, or torch.float32 of one element on {k.device!s}"
                raise wrong(_FUNCTION, name, what, allowed)
            scales.append(scale)
            continue
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise UsageError(f"{name}={scale!r} of {_FUNCTION} must be a number or a tensor")
        # What is below the least normal fp32 would be flushed to 0, and divided by.
        if not 2.0**-126 <= scale < 2.0**128:
            raise UsageError(f"{name}={scale!r} of {_FUNCTION} must be above 0 and finite in fp32")
        number = float(scale)
        scales.append(k.new_full((1,), number, dtype=torch.float32) if on_a_device else number)
    return scales[0], scales[1]


def _traced(  # noqa: PLR0917  (the function's own arguments)
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: KvCache,
    kv_block_scales: KvCache,
    kv_layout: str,
    k_scale: Scale,
    v_scale: Scale,
    convention: str,
) -> None:
    """Calls the operator: a tensor or a pair is a list, a number or a tensor two arguments."""
    numbers = [1.0 if isinstance(x, torch.Tensor) else x for x in (k_scale, v_scale)]
    tensors = [x if isinstance(x, torch.Tensor) else None for x in (k_scale, v_scale)]
    pools = [
        [pool] if isinstance(pool, torch.Tensor) else list(pool)
        for pool in (kv_cache, kv_block_scales)
    ]
    _operator(k, v, slot_mapping, *pools, kv_layout, *numbers, *tensors, convention)


def _run(  # noqa: PLR0917  (as its schema)
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: Sequence[torch.Tensor],
    kv_block_scales: Sequence[torch.Tensor],
    kv_layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    k_scale_tensor: torch.Tensor | None = None,
    v_scale_tensor: torch.Tensor | None = None,
    convention: str = "nearest",
) -> None:
    append_nvfp4_kv_cache(
        k,
        v,
        slot_mapping,
        kv_cache[0] if len(kv_cache) == 1 else kv_cache,
        kv_block_scales[0] if len(kv_block_scales) == 1 else kv_block_scales,
        kv_layout=kv_layout,
        k_scale=k_scale if k_scale_tensor is None else k_scale_tensor,
        v_scale=v_scale if v_scale_tensor is None else v_scale_tensor,
        convention=convention,
    )


def _fake(*args: Any, **kwargs: Any) -> None:
    """It returns nothing."""


_operator = define_operator(
    f"{_FUNCTION}(Tensor k, Tensor v, Tensor slot_mapping, Tensor(a!)[] kv_cache, "
    "Tensor(b!)[] kv_block_scales, str kv_layout='NHD', float k_scale=1.0, float v_scale=1.0, "
    "Tensor? k_scale_tensor=None, Tensor? v_scale_tensor=None, "
    "str convention='nearest') -> ()",
    _run,
    _fake,
)
