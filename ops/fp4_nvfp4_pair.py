"""FlashInfer's pair of functions for NVFP4 attention: quantise q, k and v, then attend."""

from __future__ import annotations

import torch

from ..kernels.fp4_attention import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs
from ..kernels.fp4_attention.operands import quantize_operands
from ..kernels.fp4_attention.problem import KEY_PADDING, Q_BLOCK_ROWS
from ..kernels.quantization.block_tensor import BlockTensor, unit_tensor_scale
from ..kernels.quantization.formats import NVFP4
from .checks import check_flags, check_tensor, refuse_grad, wrong
from .fp4_checks import check_operand, check_qkv, checked_out, checked_sm_scale, last_contiguous
from .fp4_launch import launch, resolve_products
from .fp4_library import ForwardOperator, QuantizeOperator
from .launched_call import Role
from .library import is_traced
from .on_device import on_device
from .prepared import PreparedCalls

__all__ = ["nvfp4_attention_sm120_fwd", "nvfp4_attention_sm120_quantize_qkv"]

_QUANTIZE, _FORWARD = "nvfp4_attention_sm120_quantize_qkv", "nvfp4_attention_sm120_fwd"
_calls = PreparedCalls(
    {
        **{f"{name}_fp4": Role((f"inputs.{name}.codes",)) for name in ("q", "k")},
        **{f"{name}_scale": Role((f"inputs.{name}.scales",)) for name in ("q", "k")},
        "v_fp4_t": Role(("inputs.v.codes",)),
        "v_scale_t": Role(("inputs.v.scales",)),
        "qk_correction": Role(("inputs.delta",)),
        "out": Role(("outputs.out",), is_output=True),
        "lse": Role(("outputs.lse",), is_output=True),
    }
)


def nvfp4_attention_sm120_quantize_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, per_block_mean: bool = True
) -> tuple[torch.Tensor, ...]:
    """FlashInfer's quantiser of this name: q and k smoothed, everything in NVFP4.

    Args:
        q: ``[B, Hq, Sq, D]``; D 64 or 128.
        k: ``[B, Hkv, Sk, D]``.
        v: Like k.
        per_block_mean: Means of q over 128 rows each, else over all.

    Returns:
        (q_fp4, k_fp4, v_fp4_t, q_scale, k_scale, v_scale_t, qk_correction) for
        ``nvfp4_attention_sm120_fwd`` of this module. Scales are plain, V is padded to 128 keys.

    Raises:
        UsageError: As for ``fp4_attention``.
    """
    check_flags(_QUANTIZE, per_block_mean=per_block_mean)
    if is_traced(q, k, v):
        refuse_grad(_QUANTIZE, q, k, v)
        return _quantize(q, k, v, per_block_mean=per_block_mean)
    check_qkv(_QUANTIZE, q, k, v)
    resolve_products(_QUANTIZE, "auto", q.device)
    with on_device(q.device):
        inputs = quantize_operands(
            *(last_contiguous(x) for x in (q, k, v)),
            mode="nvfp4",
            sm_scale=1.0,
            smooth_k=True,
            q_mean="block" if per_block_mean else "sequence",
            tensor_scale="unit",
        ).inputs
    assert isinstance(inputs.v, BlockTensor)
    assert inputs.delta is not None
    tensors = (inputs.q, inputs.k, inputs.v)
    return (*(x.codes for x in tensors), *(x.scales for x in tensors), inputs.delta)


@_calls.serve
def nvfp4_attention_sm120_fwd(  # noqa: PLR0917  (FlashInfer's signature)
    q_fp4: torch.Tensor,
    k_fp4: torch.Tensor,
    v_fp4_t: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale_t: torch.Tensor,
    qk_correction: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = False,
    per_block_mean: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's forward of this name, on what ``nvfp4_attention_sm120_quantize_qkv`` gave.

    Args:
        q_fp4: uint8 ``[B, Hq, Sq, D / 2]``.
        k_fp4: uint8 ``[B, Hkv, Sk, D / 2]``.
        v_fp4_t: uint8 ``[B, Hkv, D, padded / 2]``, padded the next multiple of 128 of Sk.
        q_scale: e4m3 ``[B, Hq, Sq, D / 16]``.
        k_scale: e4m3 ``[B, Hkv, Sk, D / 16]``.
        v_scale_t: e4m3 ``[B, Hkv, D, padded / 16]``.
        qk_correction: fp32 ``[B, Hq, means, Sk]``.
        sm_scale: Factor of the logits; None: ``D ** -0.5``.
        causal: Whether query i sees keys up to i + Sk - Sq.
        per_block_mean: As it was quantised.
        out: Where to write ``[B, Hq, Sq, D]``; None: allocated.
        lse: Where to write fp32 ``[B, Hq, Sq]``; None: allocated.
        out_dtype: Of a new output.

    Returns:
        (out, lse); lse is of k less its mean, natural logarithm.

    Raises:
        UsageError: a tensor has a wrong shape, dtype or device.
        UnsupportedError: no template serves the problem on this GPU.
    """
    name = _FORWARD
    operands = (q_fp4, k_fp4, v_fp4_t, q_scale, k_scale, v_scale_t, qk_correction)
    check_flags(name, causal=causal, per_block_mean=per_block_mean)
    if is_traced(*operands):
        return _forward(
            *operands,
            sm_scale=sm_scale,
            causal=causal,
            per_block_mean=per_block_mean,
            out=out,
            lse=lse,
            out_dtype=out_dtype,
        )
    for what, tensor in (("q_fp4", q_fp4), ("k_fp4", k_fp4)):
        check_tensor(name, what, tensor)
    if q_fp4.dim() != 4 or k_fp4.dim() != 4:
        raise wrong(name, "shape of q_fp4", tuple(q_fp4.shape), "[B, Hq, Sq, D / 2]")
    batch, heads, query_len, half = q_fp4.shape
    kv_heads, kv_len, head_dim = k_fp4.shape[1], k_fp4.shape[2], 2 * half
    padded = -(-kv_len // KEY_PADDING) * KEY_PADDING
    means = -(-query_len // Q_BLOCK_ROWS) if per_block_mean else 1
    e4m3 = torch.float8_e4m3fn
    for what, tensor, shape, dtype in (
        ("k_fp4", k_fp4, (batch, kv_heads, kv_len, half), torch.uint8),
        ("q_fp4", q_fp4, (batch, heads, query_len, half), torch.uint8),
        ("v_fp4_t", v_fp4_t, (batch, kv_heads, head_dim, padded // 2), torch.uint8),
        ("q_scale", q_scale, (batch, heads, query_len, head_dim // 16), e4m3),
        ("k_scale", k_scale, (batch, kv_heads, kv_len, head_dim // 16), e4m3),
        ("v_scale_t", v_scale_t, (batch, kv_heads, head_dim, padded // 16), e4m3),
        ("qk_correction", qk_correction, (batch, heads, means, kv_len), torch.float32),
    ):
        check_operand(name, what, tensor, shape, dtype, q_fp4.device)
    products = resolve_products(name, "auto", q_fp4.device)
    out = checked_out(name, out, (batch, heads, query_len, head_dim), out_dtype, q_fp4.device)
    lse = out.new_empty(out.shape[:3], dtype=torch.float32) if lse is None else lse
    check_operand(name, "lse", lse, tuple(out.shape[:3]), torch.float32, q_fp4.device)
    one = unit_tensor_scale(q_fp4.device)
    inputs = Fp4AttentionFwdInputs(
        q=BlockTensor(q_fp4, q_scale, one, NVFP4),
        k=BlockTensor(k_fp4, k_scale, one, NVFP4),
        v=BlockTensor(v_fp4_t, v_scale_t, one, NVFP4),
        v_scale=one,
        sm_scale=checked_sm_scale(name, out, sm_scale),
        delta=qk_correction,
    )
    launched = launch(
        *(name, inputs, Fp4AttentionFwdOutputs(out, lse)),
        mode="nvfp4",
        products=products,
        is_causal=causal,
        q_mean="block" if per_block_mean else "sequence",
    )
    _calls.hand_over(launched)
    return out, lse


_quantize = QuantizeOperator(nvfp4_attention_sm120_quantize_qkv)
_forward = ForwardOperator(nvfp4_attention_sm120_fwd, _calls)
