"""Launches the kernel that quantises new tokens into pages of an NVFP4 cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..triton_spec import BoundTritonKernel, TritonKernelSpec
from .formats import NVFP4
from .triton_quantizer import _arch_of, has_hardware_conversion

__all__ = ["NvFp4Pages", "append_spec", "append_to_pages"]

_TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
_BLOCK_M, _NUM_WARPS = 32, 4


@dataclass(frozen=True)
class NvFp4Pages:
    """Pools that are written, the last axis contiguous, other strides free."""

    k_codes: torch.Tensor
    """uint8 ``[num_pages, page_size, num_heads, head_dim / 2]``."""
    v_codes: torch.Tensor
    k_scales: torch.Tensor
    """e4m3 ``[num_pages, page_size, num_heads, head_dim / 16]``."""
    v_scales: torch.Tensor
    k_scale: float | torch.Tensor = 1.0
    """Tensor scale of K: codes and block scales stand for k over it. A number, or fp32 of one
    element on the device."""
    v_scale: float | torch.Tensor = 1.0
    """Likewise of V; a tensor where ``k_scale`` is one."""


def append_to_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    pages: NvFp4Pages,
    convention: str = NVFP4.default_convention,
) -> None:
    """Quantises ``[tokens, heads, head_dim]`` rows of k and v and writes them where slots say.

    Args:
        k: bf16, fp16 or fp32, the last axis contiguous; not modified.
        v: Likewise, of the same dtype.
        slots: int32 or int64 ``[tokens]``: page * page_size + token in the page; negative: skipped.
        pages: Where to write; of the same heads and head_dim.
        convention: How block scales are chosen, one of NVFP4's.
    """
    num_tokens, num_heads, head_dim = k.shape
    num_rows = num_tokens * num_heads
    if not num_rows:
        return
    arch = _arch_of(k.device)
    on_device = isinstance(pages.k_scale, torch.Tensor)
    is_aligned = all(
        x.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in x.stride()[:-1])
        for x in (k, v, pages.k_codes, pages.v_codes)
    )
    key = (k.dtype, slots.dtype, head_dim, convention, on_device, is_aligned, arch, k.device.index)
    if key not in _kernels:
        spec = append_spec(
            k.dtype,
            slots.dtype,
            head_dim,
            convention=convention,
            scales_on_device=on_device,
            is_aligned=is_aligned,
            arch=arch,
        )
        _kernels[key] = spec.bind(arch)
    scales = [pool.view(torch.uint8) for pool in (pages.k_scales, pages.v_scales)]
    pools = (pages.k_codes, pages.v_codes, *scales)
    _kernels[key](
        (-(-num_rows // _BLOCK_M), 2, 1),
        *(k, v, slots, *pools, pages.k_scale, pages.v_scale),
        *(*k.stride()[:2], *v.stride()[:2]),
        *(stride for pool in pools for stride in pool.stride()[:3]),
        *(num_tokens, num_heads, pages.k_codes.shape[1]),
    )


def append_spec(
    dtype: torch.dtype,
    slots_dtype: torch.dtype,
    head_dim: int,
    *,
    convention: str,
    scales_on_device: bool,
    is_aligned: bool,
    arch: int,
) -> TritonKernelSpec:
    """What is compiled: of the sizes, the head dimension only."""
    pools = ("k_codes", "v_codes", "k_scales", "v_scales")
    strides = (
        *("k_stride_t", "k_stride_h", "v_stride_t", "v_stride_h"),
        *(f"{pool}_stride_{axis}" for pool in pools for axis in ("page", "token", "head")),
    )
    codes = tuple(name for name in strides if "scales" not in name)
    kind = "*fp32" if scales_on_device else "fp32"
    return TritonKernelSpec(
        module=f"{__package__}.triton_kernel_append",
        name="append_kernel",
        signature={
            **dict.fromkeys(("k", "v"), f"*{_TRITON_TYPES[dtype]}"),
            "slots": f"*{_TRITON_TYPES[slots_dtype]}",
            **dict.fromkeys(pools, "*u8"),
            **dict.fromkeys(("k_scale", "v_scale"), kind),
            **dict.fromkeys(strides, "i64"),
            **dict.fromkeys(("num_tokens", "num_heads", "page_size"), "i32"),
        },
        constexprs={
            "HEAD_DIM": head_dim,
            "PADDED_DIM": 1 << (head_dim - 1).bit_length(),
            "SCALES_ON_DEVICE": scales_on_device,
            "CONVENTION": convention,
            "HARDWARE": has_hardware_conversion(arch),
            "BLOCK_M": _BLOCK_M,
        },
        aligned=frozenset(("k", "v", "k_codes", "v_codes", *codes) if is_aligned else ()),
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


_kernels: dict[tuple[object, ...], BoundTritonKernel] = {}
