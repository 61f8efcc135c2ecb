"""The gated-delta-net decode problem: one or a few tokens a sequence against a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import Problem

__all__ = ["DTYPE_BYTES", "GATES", "STATE_LAYOUTS", "GdnDecodeProblem"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
STATE_DTYPES = ("float32", "bfloat16")
STATE_LAYOUTS = ("KV", "VK")
GATES = ("given", "fused")


@dataclass(frozen=True)
class GdnDecodeProblem(Problem):
    """``batch`` sequences of ``num_steps`` tokens, each with a state of its own.

    q and k ``[batch, num_steps, num_heads, head_dim_k]``, v
    ``[batch, num_steps, num_v_heads, head_dim_v]``, state
    ``[slots, num_v_heads, head_dim_k, head_dim_v]``, or the last two swapped.
    """

    op: ClassVar[str] = "gdn_decode"
    dynamic_fields: ClassVar[tuple[str, ...]] = ("batch", "num_steps")

    batch: int
    """Sequences."""
    num_steps: int
    """Tokens a sequence: 1, or a few with speculative decoding."""
    num_heads: int
    """Heads of q and k."""
    num_v_heads: int
    """Heads of v, the gates and the state; value head i reads q/k head i // (HV / H)."""
    head_dim_k: int
    head_dim_v: int
    dtype: str
    """Of q, k, v and the output: ``bfloat16``, ``float16`` or ``float32``."""
    state_dtype: str = "float32"
    """``float32`` or ``bfloat16``; sums are fp32 in either case."""
    state_layout: str = "KV"
    """Which of head_dim_k and head_dim_v comes first in the state."""
    gate: str = "fused"
    """``given``: log decay g and beta are inputs; ``fused``: computed from raw projections."""
    use_qk_l2norm: bool = True
    """Whether q and k are normalised in the kernel."""

    def __post_init__(self) -> None:
        self.check_sizes()
        self.check_one_of("dtype", DTYPE_BYTES)
        self.check_one_of("state_dtype", STATE_DTYPES)
        self.check_one_of("state_layout", STATE_LAYOUTS)
        self.check_one_of("gate", GATES)
        self.check_multiple("num_v_heads", "num_heads")

    @property
    def flops(self) -> int:
        """Decay, S^T k, the rank-one update and S^T q: 7 operations a state element and step."""
        return 7 * self.batch * self.num_steps * self._state_elements

    @property
    def bytes_moved(self) -> int:
        """The state read and written once, q, k, v, the two gates and the output once."""
        state = 2 * self.batch * self._state_elements * DTYPE_BYTES[self.state_dtype]
        qk = 2 * self.num_heads * self.head_dim_k
        v_and_out = 2 * self.num_v_heads * self.head_dim_v
        tokens = self.batch * self.num_steps
        return state + tokens * (qk + v_and_out + 2 * self.num_v_heads) * DTYPE_BYTES[self.dtype]

    @property
    def compute_dtype(self) -> str:
        """All arithmetic is fp32 on the general cores."""
        return "float32"

    @property
    def _state_elements(self) -> int:
        return self.num_v_heads * self.head_dim_k * self.head_dim_v
