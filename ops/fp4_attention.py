"""FP4 attention: quantise q, k and v, and attend; our function and those that others have.

Checks the tensors, quantises with the fused Triton quantiser, looks the config up, launches.
Inputs are never modified; what is not supported is an error. Nothing here is differentiable.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, overload

import torch

from ..errors import UnsupportedError, UsageError
from ..kernels.fp4_attention import Fp4AttentionFwdOutputs
from ..kernels.fp4_attention.operands import Operands, TensorScale, quantize_operands
from ..kernels.fp4_attention.problem import MODES
from .checks import check_flags, refuse_grad
from .fp4_checks import (
    check_qkv,
    check_word,
    check_words,
    checked_sm_scale,
    last_contiguous,
    swapped,
)
from .fp4_launch import launch, resolve_products
from .fp4_library import AttentionOperator
from .fp4_nvfp4_pair import nvfp4_attention_sm120_fwd, nvfp4_attention_sm120_quantize_qkv
from .library import is_traced
from .on_device import on_device

__all__ = [
    "fp4_attention",
    "nvfp4_attention_sm120_fwd",
    "nvfp4_attention_sm120_quantize_qkv",
    "sageattn3_blackwell",
]

Layout = Literal["HND", "NHD"]
_LAYOUTS = ("HND", "NHD")
_MODES = ("auto", *MODES, "emulate")
_SMOOTH = ("q", "k")
_TENSOR_SCALES = ("amax", "unit")
_OURS = "fp4_attention"
_SAGE = "sageattn3_blackwell"


@overload
def fp4_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = ...,
    sm_scale: float | None = ...,
    layout: Layout = ...,
    mode: str = ...,
    products: str = ...,
    smooth: Collection[str] = ...,
    per_block_mean: bool = ...,
    tensor_scale: TensorScale = ...,
    p_scale: str = ...,
    p_map: str = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def fp4_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = ...,
    sm_scale: float | None = ...,
    layout: Layout = ...,
    mode: str = ...,
    products: str = ...,
    smooth: Collection[str] = ...,
    per_block_mean: bool = ...,
    tensor_scale: TensorScale = ...,
    p_scale: str = ...,
    p_map: str = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def fp4_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    sm_scale: float | None = None,
    layout: Layout = "HND",
    mode: str = "auto",
    products: str = "auto",
    smooth: Collection[str] = ("q", "k"),
    per_block_mean: bool = True,
    tensor_scale: TensorScale = "amax",
    p_scale: str = "ceil",
    p_map: str = "exact",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T sm_scale) v with q and k in NVFP4, P and v in what ``mode`` says.

    Args:
        q: ``[B, Hq, Sq, D]`` (HND) or ``[B, Sq, Hq, D]`` (NHD), bf16, fp16 or fp32; D 64 or 128.
        k: ``[B, Hkv, Sk, D]`` or ``[B, Sk, Hkv, D]``; Hq a multiple of Hkv.
        v: Like k.
        is_causal: Whether query i sees keys up to i + Sk - Sq.
        sm_scale: Factor of the logits, above 0; None: ``D ** -0.5``.
        layout: ``HND`` or ``NHD``, of the inputs and of the output.
        mode: ``nvfp4``, ``direct`` or ``fp8_p``; ``auto``: fp8_p where causal, else nvfp4;
            ``emulate``: nvfp4 with emulated products.
        products: ``native``: FP4 tensor cores; ``emulated``: the same codes in 16-bit products;
            ``auto``: native where the GPU can.
        smooth: What a mean is taken off before quantising: any of ``q`` and ``k``.
        per_block_mean: Means of q over 128 rows each, else over all.
        tensor_scale: ``amax``: from the tensors; ``unit``: 1, for values of ordinary size.
        p_scale: ``ceil`` or ``floor``, mode direct only.
        p_map: ``exact``, ``affine`` or ``affine_wan``, mode direct only.
        return_lse: Whether the logarithm of the sum of exponentials is returned too.

    Returns:
        The output like q; with ``return_lse`` also fp32 ``[B, Hq, Sq]``, natural logarithm.

    Raises:
        UsageError: a tensor has a wrong shape, dtype or device, an argument is unknown, or an input
            requires grad under grad mode.
        UnsupportedError: no template serves the problem on this GPU.
    """
    check_word(_OURS, "layout", layout, _LAYOUTS)
    check_word(_OURS, "mode", mode, _MODES)
    check_word(_OURS, "tensor_scale", tensor_scale, _TENSOR_SCALES)
    check_words(_OURS, "smooth", smooth, _SMOOTH)
    check_flags(_OURS, is_causal=is_causal, per_block_mean=per_block_mean, return_lse=return_lse)
    if mode == "emulate" and products == "native":
        raise UsageError(f"mode='emulate' of {_OURS} has no native products: leave products out")
    if is_traced(q, k, v):
        refuse_grad(_OURS, q, k, v)
        return _operator(
            q=q,
            k=k,
            v=v,
            is_causal=is_causal,
            sm_scale=sm_scale,
            layout=layout,
            mode=mode,
            products=products,
            smooth=smooth,
            per_block_mean=per_block_mean,
            tensor_scale=tensor_scale,
            p_scale=p_scale,
            p_map=p_map,
            return_lse=return_lse,
        )
    if layout == "NHD":
        q, k, v = (swapped(_OURS, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    check_qkv(_OURS, q, k, v)
    if mode == "auto":
        mode = "fp8_p" if is_causal else "nvfp4"
    if mode == "emulate":
        mode, products = "nvfp4", "emulated"
    products = resolve_products(_OURS, products, q.device)
    scale = checked_sm_scale(_OURS, q, sm_scale)
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    out = torch.empty_like(q, memory_format=torch.preserve_format)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    if not out.numel():
        return out if lse is None else (out, lse)
    q_mean = ("block" if per_block_mean else "sequence") if "q" in smooth else "none"
    with on_device(q.device):
        operands = quantize_operands(
            *(q, k, v),
            mode=mode,
            sm_scale=scale,
            smooth_k="k" in smooth,
            q_mean=q_mean,
            tensor_scale=tensor_scale,
        )
    launch(
        *(_OURS, operands.inputs, Fp4AttentionFwdOutputs(out, lse)),
        mode=mode,
        products=products,
        is_causal=is_causal,
        p_scale=p_scale,
        p_map=p_map,
        q_mean=q_mean,
    )
    if layout == "NHD":
        out = out.transpose(1, 2)
    return out if lse is None else (out, _with_k_mean(lse, q, operands, scale))


def sageattn3_blackwell(  # noqa: PLR0917  (SageAttention3's signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    per_block_mean: bool = True,
    **unknown: Any,
) -> torch.Tensor:
    """SageAttention3: NVFP4 with two-level P, one level of scales elsewhere, q and k smoothed.

    Args:
        q: ``[B, Hq, Sq, D]``, fp16 or bf16; D 64 or 128.
        k: ``[B, Hkv, Sk, D]``; Hq a multiple of Hkv.
        v: Like k.
        attn_mask: Refused.
        is_causal: Whether query i sees keys up to i + Sk - Sq.
        per_block_mean: Means of q over 128 rows each, else over all.
        **unknown: Refused, by name.

    Returns:
        The output like q. FP4 tensor cores where the GPU has them, else emulated products.

    Raises:
        UsageError: As for ``fp4_attention``.
        UnsupportedError: an argument is refused, or no template serves the problem on this GPU.
    """
    given = [*(["attn_mask"] if attn_mask is not None else []), *unknown]
    if given:
        raise UnsupportedError(f"{_SAGE} does not support {', '.join(given)}: leave it out")
    return fp4_attention(
        *(q, k, v),
        is_causal=is_causal,
        mode="nvfp4",
        per_block_mean=per_block_mean,
        tensor_scale="unit",
    )


def _with_k_mean(
    lse: torch.Tensor, q: torch.Tensor, operands: Operands, sm_scale: float
) -> torch.Tensor:
    """The logarithm for k with its mean: taking it off moved every logit of a row alike."""
    if operands.k_mean is None:
        return lse
    batch, kv_heads, _, head_dim = operands.k_mean.shape
    grouped = q.float().reshape(batch, kv_heads, -1, head_dim)
    return lse + sm_scale * (grouped @ operands.k_mean.mT).view(lse.shape)


_operator = AttentionOperator(fp4_attention)
