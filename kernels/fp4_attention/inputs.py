"""What FP4 attention forward reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quantization.block_tensor import BlockTensor

__all__ = ["Fp4AttentionFwdInputs", "Fp4AttentionFwdOutputs"]


@dataclass(frozen=True)
class Fp4AttentionFwdInputs:
    """Quantised operands; all tensors contiguous, scales plain."""

    q: BlockTensor
    """NVFP4, codes ``[batch, num_qo_heads, query_len, head_dim / 2]``."""
    k: BlockTensor
    """NVFP4, codes ``[batch, num_kv_heads, kv_len, head_dim / 2]``."""
    v: BlockTensor | torch.Tensor
    """Transposed, for ``padded_keys`` keys, zeros past the last: codes
    ``[batch, num_kv_heads, head_dim, padded_keys / 2]``, or e4m3
    ``[batch, num_kv_heads, head_dim, padded_keys]``."""
    v_scale: torch.Tensor
    """fp32: the tensor scale of V, of one element; for e4m3 one for each batch entry and head."""
    sm_scale: float
    """Factor of the logits, above 0."""
    delta: torch.Tensor | None = None
    """fp32 ``[batch, num_qo_heads, means, kv_len]``: (mean of Q) K^T, added to Q K^T."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q.codes.device


@dataclass(frozen=True)
class Fp4AttentionFwdOutputs:
    """What the operation writes."""

    out: torch.Tensor
    """``[batch, num_qo_heads, query_len, head_dim]``, any strides but 1 for the last axis."""
    lse: torch.Tensor | None
    """fp32 ``[batch, num_qo_heads, query_len]``, contiguous: natural logarithm of the sum of
    exponentials of the logits, not of their quantised form; None: not wanted."""
