"""Launches the Triton quantiser on attention operands ``[batch, heads, tokens, head_dim]``."""

from __future__ import annotations

from functools import cache

import torch

from ..triton_spec import BoundTritonKernel, TritonKernelSpec
from .block_tensor import BlockTensor, check_blocks, unit_tensor_scale
from .formats import FOUR_OVER_SIX, NVFP4, BlockFormat
from .scale_layout import swizzled_elements

__all__ = ["has_hardware_conversion", "quantize_along_dim", "quantize_along_keys", "quantize_spec"]

_MODULE = f"{__package__}.triton_kernel"
_TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_BLOCK_M, _BLOCK_N, _NUM_WARPS = 64, 64, 4
_NUM_WARPS_OF_TWO = 8
"""Where two codings of a block are compared: with 4 warps their squares spill on sm_100."""


def has_hardware_conversion(arch: int) -> bool:
    """Whether the architecture has ``cvt.rn.satfinite.e2m1x2.f32``."""
    return arch >= 100


def quantize_along_dim(
    x: torch.Tensor,
    block_format: BlockFormat = NVFP4,
    *,
    tensor_scale: torch.Tensor | None = None,
    convention: str = "",
    scale_layout: str = "plain",
    mean: torch.Tensor | None = None,
    rows_per_mean: int = 1,
) -> BlockTensor:
    """The operand of a product over head dimensions (Q, K): blocks along the last axis.

    Args:
        x: ``[batch, heads, tokens, head_dim]``, the last axis contiguous; not modified.
        block_format: NVFP4 or MXFP4.
        tensor_scale: fp32 of one element on x's device; None: 1.
        convention: How scales are chosen; empty: the format's default.
        scale_layout: ``plain`` or ``swizzled``.
        mean: fp32 ``[batch, heads, means, head_dim]`` to subtract; None: nothing.
        rows_per_mean: Tokens that share a mean.
    """
    check_blocks(x.shape[-1], block_format)
    return _quantize(
        x,
        block_format,
        tensor_scale=tensor_scale,
        convention=convention,
        scale_layout=scale_layout,
        mean=mean,
        rows_per_mean=rows_per_mean,
        padded_keys=None,
    )


def quantize_along_keys(
    x: torch.Tensor,
    block_format: BlockFormat = NVFP4,
    *,
    padded_keys: int,
    tensor_scale: torch.Tensor | None = None,
    convention: str = "",
    scale_layout: str = "plain",
) -> BlockTensor:
    """The operand of a product over keys (V), transposed: ``[batch, heads, head_dim, keys]``.

    Args:
        x: ``[batch, heads, keys, head_dim]``, the last axis contiguous; not modified.
        block_format: NVFP4 or MXFP4.
        padded_keys: Keys stored, a multiple of the block; those past the last are zeros.
        tensor_scale: As for ``quantize_along_dim``.
        convention: Likewise.
        scale_layout: Likewise.
    """
    check_blocks(padded_keys, block_format)
    return _quantize(
        x,
        block_format,
        tensor_scale=tensor_scale,
        convention=convention,
        scale_layout=scale_layout,
        mean=None,
        rows_per_mean=1,
        padded_keys=padded_keys,
    )


def _quantize(
    x: torch.Tensor,
    block_format: BlockFormat,
    *,
    tensor_scale: torch.Tensor | None,
    convention: str,
    scale_layout: str,
    mean: torch.Tensor | None,
    rows_per_mean: int,
    padded_keys: int | None,
) -> BlockTensor:
    convention = convention or block_format.default_convention
    block_format.check_convention(convention)
    assert x.stride(-1) == 1, "the last axis must be contiguous"
    batch, heads, tokens, head_dim = x.shape
    along_keys = padded_keys is not None
    num_rows, num_elements = (head_dim, tokens) if along_keys else (tokens, head_dim)
    padded = padded_keys if padded_keys is not None else head_dim
    num_blocks = padded // block_format.block_size
    shape: tuple[int, ...] = (num_rows, num_blocks)
    if scale_layout == "swizzled":
        shape = (swizzled_elements(num_rows, num_blocks),)
    codes = x.new_empty((batch, heads, num_rows, padded // 2), dtype=torch.uint8)
    make = torch.zeros if scale_layout == "swizzled" else torch.empty  # padding is not written
    scales = make((batch, heads, *shape), dtype=torch.uint8, device=x.device)
    tensor_scale = unit_tensor_scale(x.device) if tensor_scale is None else tensor_scale
    num_tiles = -(-num_rows // _BLOCK_M) * -(-padded // _BLOCK_N)
    num_programs = batch * heads * num_tiles
    if num_programs:
        spec = quantize_spec(
            x.dtype,
            block_format,
            convention=convention,
            scale_layout=scale_layout,
            along_keys=along_keys,
            has_mean=mean is not None,
            is_aligned=x.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in x.stride()[:3]),
            arch=_arch_of(x.device),
        )
        kernel = _bound(spec, _arch_of(x.device), x.device)
        kernel(
            (num_programs, 1, 1),
            *(x, tensor_scale if mean is None else mean, codes, scales, tensor_scale),
            *x.stride()[:3],
            *(heads, num_rows, num_elements, padded, scales[0, 0].numel(), rows_per_mean),
            1 if mean is None else mean.shape[2],
        )
    if block_format is NVFP4:
        scales = scales.view(torch.float8_e4m3fn)
    return BlockTensor(codes, scales, tensor_scale, block_format, scale_layout)


def quantize_spec(
    dtype: torch.dtype,
    block_format: BlockFormat,
    *,
    convention: str,
    scale_layout: str,
    along_keys: bool,
    has_mean: bool,
    is_aligned: bool,
    arch: int,
) -> TritonKernelSpec:
    """What is compiled: no size is part of it."""
    aligned = {"mean", "codes", "padded_elements"}
    if is_aligned:
        aligned |= {"x", "x_stride_b", "x_stride_h", "x_stride_s"}
    if not along_keys:
        aligned.add("num_elements")  # a multiple of the block
    return TritonKernelSpec(
        module=_MODULE,
        name="quantize_kernel",
        signature={
            "x": f"*{_TRITON_TYPES[dtype]}",
            "mean": "*fp32",
            "codes": "*u8",
            "scales": "*u8",
            "tensor_scale": "*fp32",
            **dict.fromkeys(("x_stride_b", "x_stride_h", "x_stride_s"), "i64"),
            **dict.fromkeys(("num_heads", "num_rows", "num_elements", "padded_elements"), "i32"),
            **dict.fromkeys(("scales_per_matrix", "rows_per_mean", "num_means"), "i32"),
        },
        constexprs={
            "ALONG_KEYS": along_keys,
            "FORMAT": block_format.name,
            "CONVENTION": convention,
            "LAYOUT": scale_layout,
            "HAS_MEAN": has_mean,
            "HARDWARE": has_hardware_conversion(arch),
            "BLOCK_M": _BLOCK_M,
            "BLOCK_N": _BLOCK_N,
        },
        aligned=frozenset(aligned),
        num_warps=_NUM_WARPS_OF_TWO if convention in FOUR_OVER_SIX else _NUM_WARPS,
        num_stages=1,
    )


_kernels: dict[tuple[object, ...], BoundTritonKernel] = {}


def _bound(spec: TritonKernelSpec, arch: int, device: torch.device) -> BoundTritonKernel:
    """The loaded kernel, one for each device: a module belongs to a CUDA context."""
    key = (*spec.signature.items(), *spec.constexprs.items(), spec.aligned, device.index)
    if key not in _kernels:
        _kernels[key] = spec.bind(arch)
    return _kernels[key]


@cache
def _arch_of(device: torch.device) -> int:
    """Compute capability as compilers write it; 0 where Triton's interpreter runs."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
