"""What the FP4 attention backward reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quantization.block_tensor import BlockTensor

__all__ = ["Fp4AttentionBwdInputs", "Fp4AttentionBwdOutputs"]


@dataclass(frozen=True)
class Fp4AttentionBwdInputs:
    """What a forward in mode ``fp8_p`` had and gave, and the gradient of its output."""

    q: BlockTensor
    """NVFP4 with plain scales, codes ``[batch, num_qo_heads, query_len, head_dim / 2]``."""
    k: BlockTensor
    """NVFP4 with plain scales, codes ``[batch, num_kv_heads, kv_len, head_dim / 2]``."""
    v: torch.Tensor
    """e4m3 ``[batch, num_kv_heads, head_dim, padded_keys]``, zeros past the last key."""
    v_scale: torch.Tensor
    """fp32, one for each batch entry and KV head, above 0."""
    out: torch.Tensor
    """``[batch, num_qo_heads, query_len, head_dim]``, any strides but 1 for the last axis."""
    grad_out: torch.Tensor
    """Like ``out``, with strides of its own."""
    lse: torch.Tensor
    """fp32 ``[batch, num_qo_heads, query_len]``: natural logarithm of the exact sum of
    exponentials; -inf for a row that sees no key."""
    sm_scale: float
    """Factor of the logits, above 0."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q.codes.device


@dataclass(frozen=True)
class Fp4AttentionBwdOutputs:
    """What the operation writes: any strides, but 1 for the last axis."""

    dq: torch.Tensor
    """``[batch, num_qo_heads, query_len, head_dim]``."""
    dk: torch.Tensor
    """``[batch, num_kv_heads, kv_len, head_dim]``."""
    dv: torch.Tensor
    """Like ``dk``."""
