"""Plain-torch recurrence in fp32, seeded inputs, and the comparison with a tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)

from ..base import Comparison
from .problem import GdnDecodeProblem

__all__ = [
    "GdnDecodeInputs",
    "GdnDecodeOutputs",
    "compare",
    "gates",
    "make_in_place",
    "make_inputs",
    "make_outputs",
    "make_validation_inputs",
    "outputs_equal",
    "reference",
]

MAX_COMPARED_SEQUENCES = 32

# The state is fp32 while tokens are taken in, so each tensor carries one rounding to its dtype.
# fp32: sums of 128 products in another order.
RELATIVE_RMS_BOUND = {torch.bfloat16: 4.0e-3, torch.float16: 5.0e-4, torch.float32: 2.0e-6}
"""Bound of ||x - ref|| / ||ref|| by the dtype of x: its unit roundoff, 17 of them for fp32."""
MAX_ERROR_BOUND = {torch.bfloat16: 4.0e-2, torch.float16: 5.0e-3, torch.float32: 3.0e-5}
"""Bound of one element's error, beside its own rounding, over the RMS of its tensor."""


@dataclass(frozen=True)
class GdnDecodeInputs:
    """What the operation reads."""

    q: torch.Tensor
    """``[batch, num_steps, num_heads, head_dim_k]``; packed: ``[1, tokens, ...]``."""
    k: torch.Tensor
    """Like q."""
    v: torch.Tensor
    """``[batch, num_steps, num_v_heads, head_dim_v]``."""
    gate: torch.Tensor
    """``[batch, num_steps, num_v_heads]``, contiguous: log decay g, or the raw projection a."""
    beta: torch.Tensor
    """Like ``gate``: beta, or the raw projection b."""
    a_log: torch.Tensor | None
    """``[num_v_heads]``; None where the gate is given."""
    dt_bias: torch.Tensor | None
    """``[num_v_heads]``; None where the gate is given."""
    state: torch.Tensor | None
    """``[slots, num_v_heads, K, V]`` or ``[slots, num_v_heads, V, K]``; None: zeros."""
    slots: torch.Tensor | None
    """int32 or int64 ``[batch]``: row of the state of each sequence, negative: skip; None: 0 to
    batch - 1."""
    scale: float
    """Factor of q."""
    cu_seqlens: torch.Tensor | None = None
    """int32 or int64 ``[batch + 1]``: bounds of packed sequences; None: all have num_steps."""
    has_beta_sigmoid: bool = False
    """Whether beta is the raw projection b, which goes through a sigmoid."""
    beta_scale: float = 1.0
    """Factor of the sigmoid: 2 allows negative eigenvalues."""


@dataclass(frozen=True)
class GdnDecodeOutputs:
    """What the operation writes."""

    out: torch.Tensor
    """Like v."""
    state: torch.Tensor | None
    """Like the state read, and may be the same memory; None: not wanted."""


def gates(problem: GdnDecodeProblem, inputs: GdnDecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay g and beta in fp32, shaped like ``inputs.gate``."""
    g, beta = inputs.gate.float(), inputs.beta.float()
    if problem.gate == "fused":
        assert inputs.a_log is not None
        assert inputs.dt_bias is not None
        g = -inputs.a_log.float().exp() * F.softplus(g + inputs.dt_bias.float())
    if inputs.has_beta_sigmoid:
        beta = inputs.beta_scale * beta.sigmoid()
    return g, beta


def reference(
    problem: GdnDecodeProblem, inputs: GdnDecodeInputs, sequence: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[steps, num_v_heads, V]`` and final state ``[num_v_heads, K, V]``, fp32.

    The recurrence of "Gated Delta Networks" (Yang et al., arXiv 2412.06464), decay first.
    """
    q, k, v, g, beta = (_steps(inputs, sequence, x) for x in _tokens(problem, inputs))
    group = problem.num_v_heads // problem.num_heads
    if problem.use_qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    state = _initial_state(problem, inputs, sequence)
    outputs = []
    for step in range(q.shape[0]):
        state = state * g[step].exp()[:, None, None]
        error = v[step] - torch.einsum("hkv,hk->hv", state, k[step])
        state = state + k[step][:, :, None] * (beta[step][:, None] * error)[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[step] * inputs.scale))
    out = torch.stack(outputs) if outputs else v.new_zeros(v.shape)
    return out, state


def _tokens(problem: GdnDecodeProblem, inputs: GdnDecodeInputs) -> tuple[torch.Tensor, ...]:
    return inputs.q, inputs.k, inputs.v, *gates(problem, inputs)


def _steps(inputs: GdnDecodeInputs, sequence: int, x: torch.Tensor) -> torch.Tensor:
    """The tokens of one sequence in fp32."""
    if inputs.cu_seqlens is None:
        return x[sequence].float()
    first, end = (int(i) for i in inputs.cu_seqlens[sequence : sequence + 2])
    return x[0, first:end].float()


def _initial_state(
    problem: GdnDecodeProblem, inputs: GdnDecodeInputs, sequence: int
) -> torch.Tensor:
    if inputs.state is None:
        shape = (problem.num_v_heads, problem.head_dim_k, problem.head_dim_v)
        return torch.zeros(shape, device=inputs.q.device)
    slot = sequence if inputs.slots is None else int(inputs.slots[sequence])
    return as_kv(problem, inputs.state[slot].float())


def as_kv(problem: GdnDecodeProblem, state: torch.Tensor) -> torch.Tensor:
    """The state with head_dim_k before head_dim_v."""
    return state if problem.state_layout == "KV" else state.transpose(-1, -2)


def _make(
    problem: GdnDecodeProblem,
    *,
    device: str | torch.device,
    seed: int,
    num_spare_slots: int,
    skips_one: bool,
) -> GdnDecodeInputs:
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tokens = (problem.batch, problem.num_steps)
    k = normal(*tokens, problem.num_heads, problem.head_dim_k)
    if not problem.use_qk_l2norm:
        k = F.normalize(k, dim=-1)  # the recurrence is only stable for keys of length up to one
    gate, beta = (normal(*tokens, problem.num_v_heads) for _ in range(2))
    is_fused = problem.gate == "fused"
    if is_fused:
        gate, beta = gate.to(dtype), beta.to(dtype)
    else:
        gate, beta = F.logsigmoid(gate), beta.sigmoid()
    dims = (problem.head_dim_k, problem.head_dim_v)
    num_slots = problem.batch + num_spare_slots
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))
    slots = slots[: problem.batch].to(torch.int32)
    if skips_one and problem.batch > 1:
        slots[1] = -1
    return GdnDecodeInputs(
        q=normal(*tokens, problem.num_heads, problem.head_dim_k).to(dtype),
        k=k.to(dtype),
        v=normal(*tokens, problem.num_v_heads, problem.head_dim_v).to(dtype),
        gate=gate,
        beta=beta,
        a_log=torch.rand(problem.num_v_heads, generator=generator, device=device)
        if is_fused
        else None,
        dt_bias=torch.rand(problem.num_v_heads, generator=generator, device=device)
        if is_fused
        else None,
        state=normal(
            num_slots,
            problem.num_v_heads,
            *(dims if problem.state_layout == "KV" else dims[::-1]),
        ).to(getattr(torch, problem.state_dtype)),
        slots=slots.to(device),
        scale=problem.head_dim_k**-0.5,
        has_beta_sigmoid=is_fused,
    )


def make_inputs(
    problem: GdnDecodeProblem, *, device: str | torch.device, seed: int
) -> GdnDecodeInputs:
    """Inputs to time: states in random order in a pool that just holds them."""
    return _make(problem, device=device, seed=seed, num_spare_slots=0, skips_one=False)


def make_validation_inputs(
    problem: GdnDecodeProblem, *, device: str | torch.device, seed: int
) -> GdnDecodeInputs:
    """Inputs to verify: spare slots, one sequence skipped, a gate that forgets, one that keeps."""
    inputs = _make(problem, device=device, seed=seed, num_spare_slots=2, skips_one=True)
    if problem.gate == "given":
        inputs.gate[0, 0, 0] = -1e4
        inputs.gate[-1, -1, -1] = 0.0
    return inputs


def make_outputs(problem: GdnDecodeProblem, inputs: GdnDecodeInputs) -> GdnDecodeOutputs:
    """Outputs filled with NaN, so that what a kernel does not write shows."""
    del problem
    state = None if inputs.state is None else torch.full_like(inputs.state, math.nan)
    return GdnDecodeOutputs(torch.full_like(inputs.v, math.nan), state)


def make_in_place(
    problem: GdnDecodeProblem, inputs: GdnDecodeInputs
) -> tuple[GdnDecodeInputs, GdnDecodeOutputs]:
    """Inputs with a state of their own, and outputs that update it."""
    del problem
    state = None if inputs.state is None else inputs.state.clone()
    outputs = GdnDecodeOutputs(torch.full_like(inputs.v, math.nan), state)
    return replace(inputs, state=state), outputs


def compare(
    problem: GdnDecodeProblem, inputs: GdnDecodeInputs, outputs: GdnDecodeOutputs
) -> Comparison:
    """Compares output and final state of the first, the last and some further sequences."""
    worst_error, worst_rms = 0.0, 0.0
    for sequence in _sequences_to_compare(problem):
        slot = sequence if inputs.slots is None else int(inputs.slots[sequence])
        got = _steps(inputs, sequence, outputs.out)
        if slot < 0:
            if bool((got != 0).any()):
                return Comparison(f"skipped sequence {sequence} must be 0", math.inf, math.inf)
            continue
        expected, state = reference(problem, inputs, sequence)
        pairs = [("output", got, expected, outputs.out.dtype)]
        if outputs.state is not None:
            final = as_kv(problem, outputs.state[slot].float())
            pairs.append(("state", final, state, outputs.state.dtype))
        for what, value, exact, dtype in pairs:
            error, rms, reason = _difference(value, exact, dtype)
            worst_error, worst_rms = max(worst_error, error), max(worst_rms, rms)
            if reason is not None:
                return Comparison(
                    f"{what} of sequence {sequence}: {reason}", worst_error, worst_rms
                )
    return Comparison(None, worst_error, worst_rms)


def _sequences_to_compare(problem: GdnDecodeProblem) -> list[int]:
    step = max(1, problem.batch // MAX_COMPARED_SEQUENCES)
    return sorted({*range(0, problem.batch, step), problem.batch - 1})


def _difference(
    value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> tuple[float, float, str | None]:
    """Largest error, relative RMS error, and what is wrong.

    What the last rounding may cost an element, however large, is no error of a kernel: one of ten
    times the RMS is off by 0.04 of the RMS as soon as it is written in bf16.
    """
    if not value.numel():
        return 0.0, 0.0, None
    if not bool(torch.isfinite(value).all()):
        return math.inf, math.inf, "NaN or infinity"
    error = (value - exact).abs()
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    scale = exact.square().mean().sqrt().clamp_min(1e-30)
    rms = (error.square().mean().sqrt() / scale).item()
    largest = ((error - rounding).max() / scale).item()
    reason = None
    if rms > RELATIVE_RMS_BOUND[dtype]:
        reason = f"relative RMS error {rms:.3g} exceeds {RELATIVE_RMS_BOUND[dtype]:g}"
    elif largest > MAX_ERROR_BOUND[dtype]:
        reason = f"largest error {largest:.3g} RMS and rounding exceeds {MAX_ERROR_BOUND[dtype]:g}"
    return error.max().item(), rms, reason


def outputs_equal(first: GdnDecodeOutputs, second: GdnDecodeOutputs) -> bool:
    """Whether two outputs are equal bit for bit; states no sequence wrote are NaN in both."""
    if not torch.equal(first.out, second.out):
        return False
    if first.state is None or second.state is None:
        return first.state is second.state
    is_unwritten = first.state.isnan() & second.state.isnan()
    return bool(((first.state == second.state) | is_unwritten).all())
