"""The chunked gated-delta-net problem: whole sequences, with the state before and after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...errors import UsageError
from ..base import Problem

__all__ = ["DTYPE_BYTES", "GATES", "STATE_LAYOUTS", "GdnChunkProblem"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
STATE_LAYOUTS = ("KV", "VK")
GATES = ("given", "fused")
_STATE_BYTES = 4


@dataclass(frozen=True)
class GdnChunkProblem(Problem):
    """``num_sequences`` sequences packed along one axis of ``num_tokens`` tokens.

    q and k ``[1, num_tokens, num_heads, head_dim_k]``, v and the output
    ``[1, num_tokens, num_v_heads, head_dim_v]``, the gate and beta
    ``[1, num_tokens, num_v_heads]``, states ``[num_sequences, num_v_heads, head_dim_k,
    head_dim_v]`` in fp32, or the last two swapped. A dense batch is the case of equal lengths. The
    longest sequence has ``max_seqlen`` tokens, the others share the rest evenly.
    """

    op: ClassVar[str] = "gdn_chunk_fwd"
    dynamic_fields: ClassVar[tuple[str, ...]] = ("max_seqlen", "num_tokens", "num_sequences")

    num_sequences: int
    num_tokens: int
    """Tokens of all sequences."""
    max_seqlen: int
    """Tokens of the longest sequence: the chain of states is as long."""
    num_heads: int
    """Heads of q and k."""
    num_v_heads: int
    """Heads of v, the gates and the state; value head i reads q/k head i // (HV / H)."""
    head_dim_k: int
    head_dim_v: int
    dtype: str
    """Of q, k, v and the output: ``bfloat16``, ``float16`` or ``float32``."""
    state_layout: str = "KV"
    """Which of head_dim_k and head_dim_v comes first in the states."""
    has_initial_state: bool = True
    """False: sequences start from zeros."""
    has_final_state: bool = True
    """Whether the states after the sequences are wanted."""
    use_qk_l2norm: bool = False
    """Whether q and k are normalised by the operation."""
    gate: str = "given"
    """``given``: log decay g is an input; ``fused``: computed from the raw projection."""
    gate_dtype: str = "float32"
    """Of the gate input."""
    beta_dtype: str = "float32"
    """Of the beta input."""

    def __post_init__(self) -> None:
        self.check_sizes()
        for name in ("dtype", "gate_dtype", "beta_dtype"):
            self.check_one_of(name, DTYPE_BYTES)
        self.check_one_of("state_layout", STATE_LAYOUTS)
        self.check_one_of("gate", GATES)
        self.check_multiple("num_v_heads", "num_heads")
        least = -(-self.num_tokens // self.num_sequences)
        if not least <= self.max_seqlen <= self.num_tokens:
            raise UsageError(
                f"max_seqlen={self.max_seqlen} of a {self.op} problem must be from {least} (the "
                f"mean of num_sequences={self.num_sequences}) to num_tokens={self.num_tokens}"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, the longest first."""
        rest, others = self.num_tokens - self.max_seqlen, self.num_sequences - 1
        if not others:
            return (self.num_tokens,)
        share, extra = divmod(rest, others)
        return (self.max_seqlen, *(share + (i < extra) for i in range(others)))

    @property
    def flops(self) -> int:
        """The recurrence: decay, S^T k, the rank-one update and S^T q, 7 a state element."""
        state = self.num_v_heads * self.head_dim_k * self.head_dim_v
        return 7 * self.num_tokens * state

    @property
    def bytes_moved(self) -> int:
        """q, k, v, gate, beta and output once, the states before and after once."""
        size = DTYPE_BYTES[self.dtype]
        qk = 2 * self.num_heads * self.head_dim_k * size
        v_and_out = 2 * self.num_v_heads * self.head_dim_v * size
        gates = self.num_v_heads * (DTYPE_BYTES[self.gate_dtype] + DTYPE_BYTES[self.beta_dtype])
        state = self.num_v_heads * self.head_dim_k * self.head_dim_v * _STATE_BYTES
        num_states = self.num_sequences * (self.has_initial_state + self.has_final_state)
        return self.num_tokens * (qk + v_and_out + gates) + num_states * state

    @property
    def compute_dtype(self) -> str:
        """Chunks are products of matrices in the operands' dtype."""
        return self.dtype
