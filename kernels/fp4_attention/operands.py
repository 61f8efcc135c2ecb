"""From q, k and v to the quantised operands: smoothing, tensor scales, blocks along the right axis.

Smoothing takes the mean over keys off K, which softmax does not see, and the mean of some query
rows off Q, whose product with K comes back as ``delta`` (SageAttention3, arXiv 2505.11594).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..quantization.block_tensor import BlockTensor, amax_tensor_scale, unit_tensor_scale
from ..quantization.formats import E4M3_MAX, MXFP4, NVFP4, BlockFormat
from ..quantization.reference import quantize
from ..quantization.triton_quantizer import quantize_along_dim, quantize_along_keys
from .inputs import Fp4AttentionFwdInputs
from .problem import KEY_PADDING, Q_BLOCK_ROWS

__all__ = ["Operands", "TensorScale", "quantize_operands"]

TensorScale = Literal["amax", "unit"]
_LEAST_SCALE = 2.0**-100


@dataclass(frozen=True)
class Operands:
    """Quantised operands and what was taken off K."""

    inputs: Fp4AttentionFwdInputs
    k_mean: torch.Tensor | None
    """fp32 ``[batch, num_kv_heads, 1, head_dim]``; None: nothing was."""


def quantize_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mode: str,
    sm_scale: float,
    smooth_k: bool = False,
    q_mean: str = "none",
    tensor_scale: TensorScale = "amax",
    with_kernels: bool = True,
) -> Operands:
    """The operands of a problem of this mode; q, k and v are not modified.

    Args:
        q: ``[batch, num_qo_heads, query_len, head_dim]``, the last axis contiguous.
        k: ``[batch, num_kv_heads, kv_len, head_dim]``, likewise.
        v: Like k.
        mode: Of the problem.
        sm_scale: Factor of the logits.
        smooth_k: Whether the mean over keys is taken off K.
        q_mean: Of the problem.
        tensor_scale: ``amax``: from each tensor's largest magnitude; ``unit``: 1.
        with_kernels: The Triton quantiser; False: the plain-torch one, with equal bits.
    """
    k_mean = k.mean(2, keepdim=True, dtype=torch.float32) if smooth_k else None
    means = _query_means(q, q_mean)
    delta = None if means is None else _delta(means, k, k_mean)
    rows_per_mean = Q_BLOCK_ROWS if q_mean == "block" else max(1, q.shape[2])
    along_dim = quantize_along_dim if with_kernels else _along_dim
    scales = {
        name: _tensor_scale(x, tensor_scale, has_mean)
        for name, x, has_mean in (("q", q, means is not None), ("k", k, smooth_k))
    }
    v_operand, v_scale = _v_operand(v, mode, tensor_scale, with_kernels)
    inputs = Fp4AttentionFwdInputs(
        q=along_dim(q, tensor_scale=scales["q"], mean=means, rows_per_mean=rows_per_mean),
        k=along_dim(k, tensor_scale=scales["k"], mean=k_mean, rows_per_mean=max(1, k.shape[2])),
        v=v_operand,
        v_scale=v_scale,
        sm_scale=sm_scale,
        delta=delta,
    )
    return Operands(inputs, k_mean)


def _query_means(q: torch.Tensor, q_mean: str) -> torch.Tensor | None:
    """fp32 ``[batch, heads, means, head_dim]``; the last block may be short."""
    if q_mean == "none":
        return None
    if q_mean == "sequence":
        return q.mean(2, keepdim=True, dtype=torch.float32)
    batch, heads, tokens, head_dim = q.shape
    whole = tokens // Q_BLOCK_ROWS * Q_BLOCK_ROWS
    blocks = q[:, :, :whole].reshape(batch, heads, -1, Q_BLOCK_ROWS, head_dim)
    means = [blocks.mean(3, dtype=torch.float32)]
    if whole < tokens:
        means.append(q[:, :, whole:].mean(2, keepdim=True, dtype=torch.float32))
    return torch.cat(means, 2).contiguous()


def _delta(means: torch.Tensor, k: torch.Tensor, k_mean: torch.Tensor | None) -> torch.Tensor:
    """(mean of Q) K^T in fp32: fp16 overflows where both have large means."""
    centred = k.float() if k_mean is None else k.float() - k_mean
    batch, heads, num_means, head_dim = means.shape
    grouped = means.view(batch, k.shape[1], -1, head_dim)
    return (grouped @ centred.mT).view(batch, heads, num_means, k.shape[2])


def _tensor_scale(x: torch.Tensor, how: TensorScale, has_mean: bool) -> torch.Tensor:
    if how == "unit":
        return unit_tensor_scale(x.device)
    # Less a mean, magnitudes at most double.
    return amax_tensor_scale(x) * (2.0 if has_mean else 1.0)


def _v_operand(
    v: torch.Tensor, mode: str, tensor_scale: TensorScale, with_kernels: bool
) -> tuple[BlockTensor | torch.Tensor, torch.Tensor]:
    padded_keys = -(-v.shape[2] // KEY_PADDING) * KEY_PADDING
    if mode == "fp8_p":
        return _e4m3_operand(v, padded_keys)
    block_format = NVFP4 if mode == "nvfp4" else MXFP4
    scale = _tensor_scale(v, tensor_scale, has_mean=False) if mode == "nvfp4" else None
    along_keys = quantize_along_keys if with_kernels else _along_keys
    quantized = along_keys(v, block_format, padded_keys=padded_keys, tensor_scale=scale)
    return quantized, quantized.tensor_scale


def _e4m3_operand(v: torch.Tensor, padded_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 ``[batch, heads, head_dim, padded_keys]``, fp32 scale of each head)."""
    scale = v.abs().amax((2, 3)).float().div(E4M3_MAX).clamp_min(_LEAST_SCALE)
    out = v.new_zeros((*v.shape[:2], v.shape[3], padded_keys), dtype=torch.float8_e4m3fn)
    scaled = v.float() / scale[..., None, None]
    out[..., : v.shape[2]] = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).mT
    return out, scale.flatten()


def _along_dim(
    x: torch.Tensor,
    block_format: BlockFormat = NVFP4,
    *,
    tensor_scale: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    rows_per_mean: int = 1,
) -> BlockTensor:
    """The plain-torch form of ``quantize_along_dim``."""
    values = x.float()
    if mean is not None:
        rows = torch.arange(x.shape[2], device=x.device) // rows_per_mean
        values = values - mean[:, :, rows]
    return quantize(values, block_format, tensor_scale=tensor_scale)


def _along_keys(
    x: torch.Tensor,
    block_format: BlockFormat = NVFP4,
    *,
    padded_keys: int,
    tensor_scale: torch.Tensor | None = None,
) -> BlockTensor:
    """The plain-torch form of ``quantize_along_keys``."""
    padded = torch.nn.functional.pad(x.float().mT, (0, padded_keys - x.shape[2]))
    return quantize(
        padded, block_format, tensor_scale=None if block_format is MXFP4 else tensor_scale
    )
