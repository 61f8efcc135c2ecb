"""What the operation reads and writes, and seeded inputs to time and to verify."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)

from .problem import GdnChunkProblem

__all__ = [
    "GdnChunkInputs",
    "GdnChunkOutputs",
    "make_inputs",
    "make_outputs",
    "make_validation_inputs",
    "pack",
]

MAX_VALIDATION_TOKENS = 1500
RESET = -1e4
"""A log decay that leaves nothing of the state."""


@dataclass(frozen=True, eq=False)
class GdnChunkInputs:
    """What the operation reads."""

    q: torch.Tensor
    """``[batch, tokens, num_heads, head_dim_k]``; packed: batch 1."""
    k: torch.Tensor
    """Like q."""
    v: torch.Tensor
    """``[batch, tokens, num_v_heads, head_dim_v]``."""
    gate: torch.Tensor
    """``[batch, tokens, num_v_heads]``, contiguous: log decay g, or the raw projection a."""
    beta: torch.Tensor
    """Like ``gate``: beta, or the raw projection b."""
    scale: float
    """Factor of q."""
    initial_state: torch.Tensor | None
    """fp32 ``[sequences, num_v_heads, K, V]`` or ``[..., V, K]``, contiguous, at a multiple of 16
    bytes; None: zeros."""
    cu_seqlens: torch.Tensor | None
    """int32 or int64 ``[sequences + 1]``: bounds of packed sequences; None: a dense batch."""
    a_log: torch.Tensor | None = None
    """fp32 ``[num_v_heads]``; None where the gate is given."""
    dt_bias: torch.Tensor | None = None
    """fp32 ``[num_v_heads]``; None where the gate is given."""
    has_beta_sigmoid: bool = False
    """Whether beta is the raw projection b, which goes through a sigmoid."""
    beta_scale: float = 1.0
    """Factor of the sigmoid: 2 allows negative eigenvalues."""
    cu_seqlens_cpu: torch.Tensor | None = None
    """``cu_seqlens`` on the CPU, for who plans by it; None: only the device knows."""

    @property
    def num_sequences(self) -> int:
        """Sequences, empty ones included."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Rows of q, those behind the last sequence included."""
        return self.q.shape[0] * self.q.shape[1]


@dataclass(frozen=True)
class GdnChunkOutputs:
    """What the operation writes."""

    out: torch.Tensor
    """Like v; rows behind the last sequence become 0."""
    final_state: torch.Tensor | None
    """Like ``initial_state``; None: not wanted."""


def pack(
    problem: GdnChunkProblem,
    lengths: Sequence[int],
    *,
    device: str | torch.device,
    seed: int,
    num_spare_tokens: int = 0,
    index_dtype: torch.dtype = torch.int32,
) -> GdnChunkInputs:
    """Inputs of these lengths: keys of length one, a quarter of the heads without decay."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    num_tokens = sum(lengths) + num_spare_tokens

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k = (normal(1, num_tokens, problem.num_heads, problem.head_dim_k) for _ in range(2))
    if not problem.use_qk_l2norm:
        # The recurrence is only stable for keys of length up to one.
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    gate, beta = (normal(1, num_tokens, problem.num_v_heads) for _ in range(2))
    is_fused = problem.gate == "fused"
    if not is_fused:
        gate = F.logsigmoid(gate) / 16
        gate[..., math.ceil(0.75 * problem.num_v_heads) :] = 0.0
    initial_state = None
    if problem.has_initial_state:
        dims = (problem.head_dim_k, problem.head_dim_v)
        dims = dims if problem.state_layout == "KV" else dims[::-1]
        initial_state = normal(len(lengths), problem.num_v_heads, *dims)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(index_dtype)
    return GdnChunkInputs(
        q=q.to(dtype),
        k=k.to(dtype),
        v=normal(1, num_tokens, problem.num_v_heads, problem.head_dim_v).to(dtype),
        gate=gate.to(getattr(torch, problem.gate_dtype)),
        beta=(beta if is_fused else beta.sigmoid()).to(getattr(torch, problem.beta_dtype)),
        scale=problem.head_dim_k**-0.5,
        initial_state=initial_state,
        cu_seqlens=bounds.to(device),
        a_log=normal(problem.num_v_heads) if is_fused else None,
        dt_bias=normal(problem.num_v_heads) if is_fused else None,
        has_beta_sigmoid=is_fused,
        cu_seqlens_cpu=bounds,
    )


def make_inputs(
    problem: GdnChunkProblem, *, device: str | torch.device, seed: int
) -> GdnChunkInputs:
    """Inputs to time: the problem's lengths, the longest first."""
    return pack(problem, problem.lengths, device=device, seed=seed)


def make_validation_inputs(
    problem: GdnChunkProblem, *, device: str | torch.device, seed: int
) -> GdnChunkInputs:
    """Inputs to verify: ragged, NaN in rows behind the last sequence, gates that reset and keep.

    Bounds are int32 as in the inputs that are timed: those of int64 are another compile.
    """
    spare = 70
    inputs = pack(
        problem,
        validation_lengths(problem),
        device=device,
        seed=seed,
        num_spare_tokens=spare,
    )
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta):
        tensor[:, -spare:] = math.nan
    if problem.gate == "given":
        first = inputs.gate[0, :, 0]
        first[3:-spare:37] = RESET
        inputs.gate[0, 5:-spare:11, -1] = 0.0
    return inputs


def validation_lengths(problem: GdnChunkProblem) -> tuple[int, ...]:
    """Empty, single, one short of a chunk, one above, long; in no order, of bounded size."""
    lengths = [65, 0, 1, 127, 300, 63, 0, 16, 513, 17]
    longest = min(problem.num_tokens, MAX_VALIDATION_TOKENS)
    lengths = [n for n in lengths if n < longest]
    return (*lengths, longest)


def make_outputs(problem: GdnChunkProblem, inputs: GdnChunkInputs) -> GdnChunkOutputs:
    """Outputs filled with NaN, so that what a kernel does not write shows."""
    final_state = None
    if problem.has_final_state:
        dims = (problem.head_dim_k, problem.head_dim_v)
        dims = dims if problem.state_layout == "KV" else dims[::-1]
        shape = (inputs.num_sequences, problem.num_v_heads, *dims)
        final_state = torch.full(shape, math.nan, device=inputs.q.device)
    return GdnChunkOutputs(torch.full_like(inputs.v, math.nan), final_state)
