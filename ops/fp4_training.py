"""FP4 attention that can be trained: a forward that saves what its backward in FP8 needs.

Both are operators of ``torch.library``, joined by autograd, so that eager mode and
``torch.compile`` take the same way. Saved are Q and K in NVFP4, V in e4m3, the output and its
logarithm: 4.5 and 8 bits an element where bf16 has 16.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError
from ..kernels.fp4_attention import Fp4AttentionFwdOutputs
from ..kernels.fp4_attention.operands import quantize_operands
from ..kernels.fp4_attention.problem import KEY_PADDING, MODES
from ..kernels.fp4_attention_bwd import Fp4AttentionBwdInputs, Fp4AttentionBwdOutputs
from ..kernels.quantization.block_tensor import BlockTensor
from ..kernels.quantization.formats import NVFP4
from .checks import check_flags
from .fp4_attention import Layout
from .fp4_bwd_launch import launch_backward
from .fp4_checks import (
    check_qkv,
    check_word,
    check_words,
    checked_sm_scale,
    last_contiguous,
    swapped,
)
from .fp4_launch import PRODUCTS_ALLOWED, launch, resolve_products
from .library import NAMESPACE, define_operator, is_traced
from .on_device import on_device

__all__ = ["fp4_attention_training"]

_OURS = "fp4_attention_training"
_LAYOUTS = ("HND", "NHD")
_SMOOTH = ("k",)
_FP8 = "fp8_p"


class _Saved(NamedTuple):
    """What the forward's operator returns: the output first, then what the backward reads."""

    out: torch.Tensor
    lse: torch.Tensor
    q_codes: torch.Tensor
    q_scales: torch.Tensor
    q_tensor_scale: torch.Tensor
    k_codes: torch.Tensor
    k_scales: torch.Tensor
    k_tensor_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor
    precise_out: torch.Tensor
    """The output with P and V in FP8, for modes whose output is another; else empty."""


def fp4_attention_training(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = True,
    sm_scale: float | None = None,
    layout: Layout = "HND",
    mode: str = _FP8,
    products: str = "auto",
    smooth: Collection[str] = _SMOOTH,
    allow_mxfp4_p: bool = False,
) -> torch.Tensor:
    """softmax(q k^T sm_scale) v with q and k in NVFP4, differentiable; gradients by FP8 products.

    The backward multiplies P, dS, Q, K and V in e4m3 and dO in e5m2, at any size of dO, and gives
    equal bits every time. It takes rounding to be the identity (straight through).

    Args:
        q: ``[B, Hq, Sq, D]`` (HND) or ``[B, Sq, Hq, D]`` (NHD), bf16, fp16 or fp32; D 64 or 128.
        k: ``[B, Hkv, Sk, D]`` or ``[B, Sk, Hkv, D]``; Hq a multiple of Hkv.
        v: Like k.
        is_causal: Whether query i sees keys up to i + Sk - Sq.
        sm_scale: Factor of the logits, above 0; None: ``D ** -0.5``.
        layout: ``HND`` or ``NHD``, of the inputs and of the output.
        mode: P and v of the forward: ``fp8_p``, the route that was trained with; ``nvfp4``; or
            ``direct`` (MXFP4), with ``allow_mxfp4_p`` only. The other two run the forward of
            ``fp8_p`` too, whose output the gradient of the softmax is taken at.
        products: ``native``: FP4 tensor cores for the scores; ``emulated``: the same codes in
            16-bit products; ``auto``: native where the GPU can.
        smooth: ``("k",)``: the mean over keys is taken off k before quantising; ``()``: it is not.
        allow_mxfp4_p: Whether ``mode='direct'`` is wanted though training with it diverged.

    Returns:
        The output like q.

    Raises:
        UsageError: a tensor has a wrong shape, dtype or device, or an argument is unknown.
        UnsupportedError: P in MXFP4 without ``allow_mxfp4_p``; no template serves the problem on
            this GPU.
    """
    check_word(_OURS, "layout", layout, _LAYOUTS)
    check_word(_OURS, "mode", mode, MODES)
    check_word(_OURS, "products", products, PRODUCTS_ALLOWED)
    check_words(_OURS, "smooth", smooth, _SMOOTH)
    check_flags(_OURS, is_causal=is_causal, allow_mxfp4_p=allow_mxfp4_p)
    if mode == "direct" and not allow_mxfp4_p:
        raise UnsupportedError(
            f"mode='direct' of {_OURS} has P in MXFP4, with which training diverges: in "
            "arXiv 2609.04105 all such runs left the FP8 ones near 0.1 billion tokens, with "
            "gradient norms up to 3.9 million; use mode='fp8_p', or pass allow_mxfp4_p=True"
        )
    if layout == "NHD":
        q, k, v = (swapped(_OURS, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    if not is_traced(q, k, v):
        _check(q, k, v)
    scale = checked_sm_scale(_OURS, q, sm_scale)
    out: torch.Tensor = _forward(
        *(q, k, v),
        is_causal=is_causal,
        sm_scale=scale,
        mode=mode,
        products=products,
        smooth_k="k" in smooth,
    )[0]
    return out.transpose(1, 2) if layout == "NHD" else out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    with torch.no_grad():  # what requires grad is refused by all other FP4 functions
        check_qkv(_OURS, q, k, v)


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    sm_scale: float,
    mode: str,
    products: str,
    smooth_k: bool,
) -> _Saved:
    _check(q, k, v)
    products = resolve_products(_OURS, products, q.device)
    q, k, v = (last_contiguous(x.detach()) for x in (q, k, v))

    def attend(mode: str, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
        with on_device(q.device):
            inputs = quantize_operands(
                *(q, k, v), mode=mode, sm_scale=sm_scale, smooth_k=smooth_k
            ).inputs
        if out.numel():
            outputs = Fp4AttentionFwdOutputs(out, lse)
            launch(*(_OURS, inputs, outputs), mode=mode, products=products, is_causal=is_causal)
        return inputs

    out = torch.empty_like(q, memory_format=torch.preserve_format)
    precise_out = q.new_empty(0) if mode == _FP8 else torch.empty_like(out)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    saved = attend(_FP8, out if mode == _FP8 else precise_out, lse)
    if mode != _FP8:
        attend(mode, out, None)
    return _Saved(
        *(out, lse, saved.q.codes, saved.q.scales, saved.q.tensor_scale),
        *(saved.k.codes, saved.k.scales, saved.k.tensor_scale, saved.v, saved.v_scale),
        precise_out,
    )


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mode: str, **_: Any
) -> _Saved:
    q, k = (last_contiguous(x) for x in (q, k))
    batch, kv_heads, keys, head_dim = k.shape

    def operand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = x.shape[:3]
        return (
            x.new_empty((*rows, head_dim // 2), dtype=torch.uint8),
            x.new_empty((*rows, head_dim // NVFP4.block_size), dtype=torch.float8_e4m3fn),
            x.new_empty(1, dtype=torch.float32),
        )

    padded = (keys + KEY_PADDING - 1) // KEY_PADDING * KEY_PADDING
    out = torch.empty_like(q, memory_format=torch.preserve_format)
    return _Saved(
        out,
        q.new_empty(q.shape[:3], dtype=torch.float32),
        *operand(q),
        *operand(k),
        v.new_empty((batch, kv_heads, head_dim, padded), dtype=torch.float8_e4m3fn),
        v.new_empty(batch * kv_heads, dtype=torch.float32),
        q.new_empty(0) if mode == _FP8 else torch.empty_like(out),
    )


def _run_backward(
    grad_out: torch.Tensor,
    saved: list[torch.Tensor],
    *,
    is_causal: bool,
    sm_scale: float,
    products: str,
    kv_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = _Saved(*saved)
    gradients = _fake_backward(grad_out, saved, kv_len=kv_len)
    if not grad_out.numel():
        for tensor in gradients:
            tensor.zero_()
        return gradients
    inputs = Fp4AttentionBwdInputs(
        q=BlockTensor(found.q_codes, found.q_scales, found.q_tensor_scale, NVFP4),
        k=BlockTensor(found.k_codes, found.k_scales, found.k_tensor_scale, NVFP4),
        v=found.v,
        v_scale=found.v_scale,
        out=found.precise_out if found.precise_out.numel() else found.out,
        grad_out=last_contiguous(grad_out),
        lse=found.lse,
        sm_scale=sm_scale,
    )
    products = resolve_products(_OURS, products, grad_out.device)
    outputs = Fp4AttentionBwdOutputs(*gradients)
    launch_backward(_OURS, inputs, outputs, products=products, is_causal=is_causal)
    return gradients


def _fake_backward(
    grad_out: torch.Tensor, saved: list[torch.Tensor], *, kv_len: int, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients in memory as the output is: heads before tokens, or after them."""
    out, k_codes = saved[0], saved[5]
    batch, heads, rows, dim = out.shape
    has_tokens_first = out.stride(1) < out.stride(2)

    def make(num_heads: int, tokens: int) -> torch.Tensor:
        shape = (batch, tokens, num_heads, dim)
        if has_tokens_first:
            return grad_out.new_empty(shape).transpose(1, 2)
        return grad_out.new_empty((batch, num_heads, tokens, dim))

    kv_heads = k_codes.shape[1]
    return make(heads, rows), make(kv_heads, kv_len), make(kv_heads, kv_len)


_forward = define_operator(
    f"{_OURS}(Tensor q, Tensor k, Tensor v, *, bool is_causal, float sm_scale, str mode, "
    f"str products, bool smooth_k) -> ({', '.join(['Tensor'] * len(_Saved._fields))})",
    _run_forward,
    _fake_forward,
)
_backward = define_operator(
    f"{_OURS}_backward(Tensor grad_out, Tensor[] saved, *, bool is_causal, float sm_scale, "
    "str products, int kv_len) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output)
    ctx.choices = {
        "is_causal": keyword_only_inputs["is_causal"],
        "sm_scale": keyword_only_inputs["sm_scale"],
        "products": keyword_only_inputs["products"],
        "kv_len": inputs[1].shape[2],
    }


def _differentiate(ctx: Any, grad_out: torch.Tensor | None, *_: Any) -> tuple[Any, Any, Any]:
    if grad_out is None:
        return None, None, None
    dq, dk, dv = _backward(grad_out, list(ctx.saved_tensors), **ctx.choices)
    return dq, dk, dv


def _refuse(ctx: Any, *_: Any) -> Any:
    del ctx
    raise UnsupportedError(f"{_OURS} has no second derivative: differentiate once")


torch.library.register_autograd(f"{NAMESPACE}::{_OURS}", _differentiate, setup_context=_save)
torch.library.register_autograd(f"{NAMESPACE}::{_OURS}_backward", _refuse)
