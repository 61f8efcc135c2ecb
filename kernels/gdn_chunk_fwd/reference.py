"""Plain-torch references in fp64, by the recurrence and by chunks, and the comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)

from ..base import Comparison
from .inputs import (
    GdnChunkInputs,
    GdnChunkOutputs,
    make_inputs,
    make_outputs,
    make_validation_inputs,
)
from .problem import GdnChunkProblem

__all__ = [
    "GdnChunkInputs",
    "GdnChunkOutputs",
    "chunked_reference",
    "compare",
    "make_inputs",
    "make_outputs",
    "make_validation_inputs",
    "outputs_equal",
    "recurrent_reference",
]

REFERENCE_CHUNK = 64

# Between the products everything is rounded to the operands' dtype: the inverse, w, u or the
# errors, the state that queries read, the decayed errors; each adds about one unit roundoff of a
# tensor of its own size. fp32: sums and substitution in another order, and the gate's sum, which
# reaches 200 in base 2 and so is known to 1e-5.
RELATIVE_RMS_BOUND = {torch.bfloat16: 8.0e-3, torch.float16: 1.5e-3, torch.float32: 2.0e-5}
"""Bound of ||x - ref|| / ||ref|| of a sequence, by the dtype of q."""
MAX_ERROR_BOUND = {torch.bfloat16: 1.2e-1, torch.float16: 2.5e-2, torch.float32: 1.0e-3}
"""Bound of one element's error over the RMS of its tensor, by the dtype of q."""


@dataclass(frozen=True)
class _Sequence:
    """One sequence in fp64; q (scaled) and k normalised if asked for, heads expanded."""

    q: torch.Tensor
    """``[HV, tokens, K]``."""
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    """``[HV, tokens]``: log decay."""
    beta: torch.Tensor
    state: torch.Tensor
    """``[HV, K, V]``: before the sequence."""


def recurrent_reference(
    problem: GdnChunkProblem, inputs: GdnChunkInputs, sequence: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[HV, tokens, V]`` and final state ``[HV, K, V]``, fp64, token by token.

    The recurrence of "Gated Delta Networks" (Yang et al., arXiv 2412.06464), decay first.
    """
    x = _sequence(problem, inputs, *_bounds(inputs)[sequence], sequence)
    state, out = x.state, torch.empty_like(x.v)
    for t in range(x.q.shape[1]):
        state = state * x.g[:, t].exp()[:, None, None]
        error = x.v[:, t] - torch.einsum("hkv,hk->hv", state, x.k[:, t])
        error = error * x.beta[:, t][:, None]
        state = state + x.k[:, t][:, :, None] * error[:, None, :]
        out[:, t] = torch.einsum("hkv,hk->hv", state, x.q[:, t])
    return out, state


def chunked_reference(
    problem: GdnChunkProblem,
    inputs: GdnChunkInputs,
    sequence: int,
    chunk: int = REFERENCE_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as ``recurrent_reference``, in chunks: its time is products, not launches."""
    first, end = _bounds(inputs)[sequence]
    state = _initial_state(problem, inputs, sequence)
    outs = [state.new_empty(problem.num_v_heads, 0, problem.head_dim_v)]
    for begin in range(first, end, chunk):
        x = _sequence(problem, inputs, begin, min(begin + chunk, end), sequence)
        out, state = _chunk(x, state)
        outs.append(out)
    return torch.cat(outs, dim=1), state


def _chunk(x: _Sequence, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, state after) of one chunk: the triangular system is solved, never inverted."""
    total = x.g.cumsum(-1)
    size = total.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
    difference = total[:, :, None] - total[:, None, :]
    decay = difference.masked_fill(~lower, -math.inf).exp()
    system = (x.beta[:, :, None] * (x.k @ x.k.transpose(1, 2)) * decay).tril(-1)
    system = system + torch.eye(size, dtype=system.dtype, device=system.device)
    growth = total.exp()[:, :, None]
    right = x.beta[:, :, None] * (x.v - growth * (x.k @ state))
    errors = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = growth * (x.q @ state) + ((x.q @ x.k.transpose(1, 2)) * decay) @ errors
    left = (total[:, -1:] - total).exp()[:, :, None] * errors
    return out, total[:, -1].exp()[:, None, None] * state + x.k.transpose(1, 2) @ left


def _bounds(inputs: GdnChunkInputs) -> list[tuple[int, int]]:
    """First token and end of every sequence, in rows of the flattened batch."""
    if inputs.cu_seqlens is None:
        batch, tokens = inputs.q.shape[:2]
        return [(i * tokens, (i + 1) * tokens) for i in range(batch)]
    bounds = inputs.cu_seqlens.tolist()
    return list(itertools.pairwise(bounds))


def _sequence(
    problem: GdnChunkProblem, inputs: GdnChunkInputs, first: int, end: int, sequence: int
) -> _Sequence:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)[first:end].double().transpose(0, 1)

    q, k, g, beta = (rows(x) for x in (inputs.q, inputs.k, inputs.gate, inputs.beta))
    if problem.use_qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    group = problem.num_v_heads // problem.num_heads
    q, k = (x.repeat_interleave(group, dim=0) for x in (q, k))
    if problem.gate == "fused":
        assert inputs.a_log is not None
        assert inputs.dt_bias is not None
        raw = g + inputs.dt_bias.double()[:, None]
        g = -inputs.a_log.double().exp()[:, None] * F.softplus(raw)
    if inputs.has_beta_sigmoid:
        beta = inputs.beta_scale * beta.sigmoid()
    state = _initial_state(problem, inputs, sequence)
    return _Sequence(q * inputs.scale, k, rows(inputs.v), g, beta, state)


def _initial_state(problem: GdnChunkProblem, inputs: GdnChunkInputs, sequence: int) -> torch.Tensor:
    if inputs.initial_state is None:
        shape = (problem.num_v_heads, problem.head_dim_k, problem.head_dim_v)
        return torch.zeros(shape, dtype=torch.float64, device=inputs.q.device)
    return _as_kv(problem, inputs.initial_state[sequence].double())


def _as_kv(problem: GdnChunkProblem, state: torch.Tensor) -> torch.Tensor:
    """The state with head_dim_k before head_dim_v."""
    return state if problem.state_layout == "KV" else state.transpose(-1, -2)


@dataclass(frozen=True)
class _Expected:
    """The reference of all sequences, and which contents of the inputs it belongs to."""

    versions: tuple[int, ...]
    sequences: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(output, final state) in fp32."""


_expected: WeakKeyDictionary[GdnChunkInputs, _Expected] = WeakKeyDictionary()


def _reference_of(problem: GdnChunkProblem, inputs: GdnChunkInputs) -> _Expected:
    """The chunked reference, kept while the inputs live: many configs are compared with it."""
    values = (getattr(inputs, each.name) for each in fields(inputs))
    versions = tuple(x._version for x in values if isinstance(x, torch.Tensor))
    found = _expected.get(inputs)
    if found is None or found.versions != versions:
        pairs = (chunked_reference(problem, inputs, i) for i in range(inputs.num_sequences))
        found = _Expected(versions, tuple((out.float(), state.float()) for out, state in pairs))
        _expected[inputs] = found
    return found


def compare(
    problem: GdnChunkProblem, inputs: GdnChunkInputs, outputs: GdnChunkOutputs
) -> Comparison:
    """Compares output and final state of every sequence; rows behind the last one must be 0."""
    dtype = inputs.q.dtype
    worst_error, worst_rms = 0.0, 0.0
    for what, value, exact in _pairs(problem, inputs, outputs):
        error, rms, reason = _difference(value, exact, dtype)
        worst_error, worst_rms = max(worst_error, error), max(worst_rms, rms)
        if reason is not None:
            return Comparison(f"{what}: {reason}", worst_error, worst_rms)
    end = _bounds(inputs)[-1][1]
    if bool((outputs.out.flatten(0, 1)[end:] != 0).any()):
        return Comparison("rows behind the last sequence must be 0", math.inf, math.inf)
    return Comparison(None, worst_error, worst_rms)


def _pairs(
    problem: GdnChunkProblem, inputs: GdnChunkInputs, outputs: GdnChunkOutputs
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, value, exact value) of the output and the state of every sequence."""
    expected = _reference_of(problem, inputs).sequences
    rows = outputs.out.flatten(0, 1)
    for sequence, (first, end) in enumerate(_bounds(inputs)):
        out, state = expected[sequence]
        yield f"output of sequence {sequence}", rows[first:end].transpose(0, 1).float(), out
        if outputs.final_state is not None:
            final = _as_kv(problem, outputs.final_state[sequence])
            yield f"state of sequence {sequence}", final, state


def _difference(
    value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> tuple[float, float, str | None]:
    """Largest error, relative RMS error, and what is wrong."""
    if not value.numel():
        return 0.0, 0.0, None
    if not bool(torch.isfinite(value).all()):
        return math.inf, math.inf, "NaN or infinity"
    error = (value - exact).abs()
    scale = exact.square().mean().sqrt().clamp_min(1e-30)
    rms = (error.square().mean().sqrt() / scale).item()
    largest = (error.max() / scale).item()
    reason = None
    if rms > RELATIVE_RMS_BOUND[dtype]:
        reason = f"relative RMS error {rms:.3g} exceeds {RELATIVE_RMS_BOUND[dtype]:g}"
    elif largest > MAX_ERROR_BOUND[dtype]:
        reason = f"largest error {largest:.3g} RMS exceeds {MAX_ERROR_BOUND[dtype]:g}"
    return error.max().item(), rms, reason


def outputs_equal(first: GdnChunkOutputs, second: GdnChunkOutputs) -> bool:
    """Whether two outputs are equal bit for bit."""
    if not torch.equal(first.out, second.out):
        return False
    if first.final_state is None or second.final_state is None:
        return first.final_state is second.final_state
    return torch.equal(first.final_state, second.final_state)
