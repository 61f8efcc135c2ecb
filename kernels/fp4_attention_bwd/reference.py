"""The backward in plain torch on the same codes, seeded inputs, and the comparison."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..base import Comparison
from ..fp4_attention import reference as forward
from ..fp4_attention.inputs import Fp4AttentionFwdInputs
from ..fp4_attention.problem import Fp4AttentionFwdProblem
from ..quantization.block_tensor import BlockTensor
from ..quantization.formats import E4M3_MAX
from ..quantization.reference import dequantize
from .inputs import Fp4AttentionBwdInputs, Fp4AttentionBwdOutputs
from .problem import Fp4AttentionBwdProblem

__all__ = [
    "Fp4AttentionBwdInputs",
    "Fp4AttentionBwdOutputs",
    "compare",
    "do_power",
    "make_inputs",
    "make_outputs",
    "make_validation_inputs",
    "outputs_equal",
    "reference",
]

_LOG2_E = math.log2(math.e)
_TOP_EXPONENT, _LARGEST_POWER = 14, 100
_P_SHIFT = 8.0
_OPERAND_STEP = 8.0
"""Q and K go to e4m3 as an eighth of code times scale, at most 2688."""
_ROWS_AT_A_TIME = 1024
_HEADS_COMPARED = 2

RELATIVE_RMS_BOUND = {"float32": 1.0e-3, "float16": 1.3e-3, "bfloat16": 4.0e-3}
"""Bound of ||x - ref|| / ||ref|| by dtype. A last bit of a score moves some P and dS in a hundred
thousand to the next e4m3 code, a sixteenth away: 2e-4 of the gradient; rounding comes on top."""
FP8_BOUND = {"dQ": 6.0e-3, "dK": 6.0e-3, "dV": 1.0e-3}
"""Hopper's FP8 tensor cores cut what they add to some 14 bits of the largest. dP so summed, less a
row sum that takes most of it away where few keys are seen, moves dS to the next code: a model of
such sums gives 0.1e-3 to 6.0e-3 (64 to 200 tokens), an H200 2.8e-3 (4096). dV has no dS: 0.3e-3."""
MAX_ERROR_FACTOR = 40.0
"""Bound of one element's error over the RMS of the gradient, or of its row where that is larger, in
units of the bounds above: one key that takes all makes a row of dQ a hundred times the others."""


def reference(
    problem: Fp4AttentionBwdProblem, inputs: Fp4AttentionBwdInputs, batch: int, kv_head: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 dQ ``[group_size, query_len, head_dim]``, dK and dV ``[kv_len, head_dim]`` of a head."""
    group = range(kv_head * problem.group_size, (kv_head + 1) * problem.group_size)
    k = _values(inputs.k, batch, kv_head)
    k_e4m3 = _e4m3(k / _OPERAND_STEP)
    v = inputs.v[batch, kv_head].float().T[: problem.kv_len]
    power = do_power(inputs.grad_out[batch, group.start : group.stop])
    v_scale = inputs.v_scale.view(inputs.v.shape[:2])[batch, kv_head]
    factor = inputs.q.tensor_scale * inputs.k.tensor_scale * (inputs.sm_scale * _LOG2_E)
    dq = k.new_empty(problem.group_size, problem.query_len, problem.head_dim)
    dk, dv = torch.zeros_like(k), torch.zeros_like(k)
    for member, head in enumerate(group):
        q = _values(inputs.q, batch, head)
        for first in range(0, problem.query_len, _ROWS_AT_A_TIME):
            rows = slice(first, min(first + _ROWS_AT_A_TIME, problem.query_len))
            shift = _P_SHIFT - inputs.lse[batch, head, rows] * _LOG2_E
            scores = (q[rows] @ k.T) * factor
            # A row that sees no key has infinity here, and nothing but masked scores.
            shift = shift.masked_fill(shift == math.inf, 0.0)
            p = torch.exp2(_masked(problem, scores, rows) + shift[:, None])
            grad_out = inputs.grad_out[batch, head, rows].float()
            do = (grad_out * power).to(torch.float8_e5m2).float()
            sums = (inputs.out[batch, head, rows].float() * grad_out).sum(-1) / v_scale * power
            ds = p * (do @ v.T - sums[:, None])
            by_row, row_scale = _row_scaled(ds)
            by_key, key_scale = _row_scaled(ds.T)
            dq[member, rows] = (by_row @ k_e4m3) / row_scale
            dk += (by_key @ _e4m3(q[rows] / _OPERAND_STEP)) / key_scale
            dv += _e4m3(p).T @ do
    undone = v_scale / power
    common = inputs.sm_scale * _OPERAND_STEP * 2.0**-_P_SHIFT
    dq *= undone * (inputs.k.tensor_scale * common)
    dk *= undone * (inputs.q.tensor_scale * common)
    return dq, dk, dv * (2.0**-_P_SHIFT / power)


def do_power(grad_out: torch.Tensor) -> torch.Tensor:
    """2^a that takes the largest magnitude to e5m2's top; 1 where it is 0 or not finite."""
    amax = grad_out.abs().amax().float()
    exponent = torch.frexp(amax).exponent - 1
    power = (_TOP_EXPONENT - exponent).clamp(-_LARGEST_POWER, _LARGEST_POWER)
    power = torch.where((amax == 0.0) | ~torch.isfinite(amax), torch.zeros_like(power), power)
    return _power_of_two(power)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Exact fp32 of int32 exponents from -126 to 127: ``ldexp`` multiplies by a computed power."""
    return ((exponent + 127) << 23).view(torch.float32)


def _masked(problem: Fp4AttentionBwdProblem, scores: torch.Tensor, rows: slice) -> torch.Tensor:
    if not problem.is_causal:
        return scores
    keys = torch.arange(problem.kv_len, device=scores.device)
    last = torch.arange(rows.start, rows.stop, device=scores.device)
    last = last + (problem.kv_len - problem.query_len)
    return scores.masked_fill(keys[None, :] > last[:, None], -math.inf)


def _row_scaled(ds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 of ds times a power of two a row in e4m3, the powers)."""
    exponent = torch.frexp(ds.abs().amax(-1, keepdim=True)).exponent - 1
    power = _power_of_two(7 - exponent.clamp(-_LARGEST_POWER, 127))
    return _e4m3(ds * power), power


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounded to e4m3, saturating; NaN stays."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _values(tensor: BlockTensor, batch: int, head: int) -> torch.Tensor:
    """fp32 of one head without the tensor scale."""
    codes, scales = tensor.codes[batch, head], tensor.scales[batch, head]
    one = torch.ones_like(tensor.tensor_scale)
    return dequantize(replace(tensor, codes=codes, scales=scales, tensor_scale=one))


def make_inputs(
    problem: Fp4AttentionBwdProblem, *, device: str | torch.device, seed: int
) -> Fp4AttentionBwdInputs:
    """Inputs to time: normal values, quantised; the output and its logarithm are exact."""
    given = forward.make_inputs(_forward_problem(problem), device=device, seed=seed)
    return _with_gradient(problem, given, seed, spread=1.0)


def make_validation_inputs(
    problem: Fp4AttentionBwdProblem, *, device: str | torch.device, seed: int
) -> Fp4AttentionBwdInputs:
    """Inputs to verify: sharper logits, NaN behind Q and K, gradients small and of all sizes."""
    given = forward.make_validation_inputs(_forward_problem(problem), device=device, seed=seed)
    return _with_gradient(problem, given, seed, spread=1e-4)


def _forward_problem(problem: Fp4AttentionBwdProblem) -> Fp4AttentionFwdProblem:
    values = problem.as_dict()
    values["out_dtype"] = values.pop("dtype")
    return Fp4AttentionFwdProblem.from_dict({**values, "mode": "fp8_p"})


def _with_gradient(
    problem: Fp4AttentionBwdProblem, given: Fp4AttentionFwdInputs, seed: int, spread: float
) -> Fp4AttentionBwdInputs:
    """The forward's operands with what it gave; one row of dO in 64 is 16 times the others."""
    assert isinstance(given.v, torch.Tensor)
    shape = (problem.batch, problem.num_qo_heads, problem.query_len, problem.head_dim)
    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator(device=given.device).manual_seed(seed + 1)
    grad_out = torch.randn(shape, generator=generator, device=given.device) * spread
    if spread < 1.0:
        grad_out[:, :, ::64] *= 16.0
    out = torch.empty(shape, dtype=dtype, device=given.device)
    lse = torch.empty(shape[:3], device=given.device)
    wanted = _forward_problem(problem)
    for batch in range(problem.batch):
        for head in range(problem.num_qo_heads):
            for first in range(0, problem.query_len, _ROWS_AT_A_TIME):
                last = min(first + _ROWS_AT_A_TIME, problem.query_len)
                rows = torch.arange(first, last, device=given.device)
                values, logs = forward.reference(wanted, given, batch, head, rows)
                out[batch, head, rows], lse[batch, head, rows] = values.to(dtype), logs
    return Fp4AttentionBwdInputs(
        q=given.q,
        k=given.k,
        v=given.v,
        v_scale=given.v_scale,
        out=out,
        grad_out=grad_out.to(dtype),
        lse=lse,
        sm_scale=given.sm_scale,
    )


def make_outputs(
    problem: Fp4AttentionBwdProblem, inputs: Fp4AttentionBwdInputs
) -> Fp4AttentionBwdOutputs:
    """Outputs filled with NaN, so that what a kernel does not write shows."""
    queries = (problem.batch, problem.num_qo_heads, problem.query_len, problem.head_dim)
    keys = (problem.batch, problem.num_kv_heads, problem.kv_len, problem.head_dim)
    dq, dk, dv = (
        torch.full(shape, math.nan, dtype=inputs.out.dtype, device=inputs.device)
        for shape in (queries, keys, keys)
    )
    return Fp4AttentionBwdOutputs(dq, dk, dv)


def compare(
    problem: Fp4AttentionBwdProblem,
    inputs: Fp4AttentionBwdInputs,
    outputs: Fp4AttentionBwdOutputs,
) -> Comparison:
    """Compares the three gradients of the first and the last KV head."""
    worst_error, worst_rms = 0.0, 0.0
    total = problem.batch * problem.num_kv_heads
    for index in sorted({0, total - 1})[:_HEADS_COMPARED]:
        batch, head = divmod(index, problem.num_kv_heads)
        first = head * problem.group_size
        got = {
            "dQ": outputs.dq[batch, first : first + problem.group_size],
            "dK": outputs.dk[batch, head],
            "dV": outputs.dv[batch, head],
        }
        expected = reference(problem, inputs, batch, head)
        for (name, tensor), exact in zip(got.items(), expected, strict=True):
            error, rms, reason = _difference(problem, name, tensor.float(), exact)
            worst_error, worst_rms = max(worst_error, error), max(worst_rms, rms)
            if reason is not None:
                where = f"{name} of KV head {head} of batch entry {batch}"
                return Comparison(f"{where}: {reason}", worst_error, worst_rms)
    return Comparison(None, worst_error, worst_rms)


def _difference(
    problem: Fp4AttentionBwdProblem, name: str, got: torch.Tensor, expected: torch.Tensor
) -> tuple[float, float, str | None]:
    """Largest error, relative RMS error, and what is wrong."""
    if not bool(torch.isfinite(got).all()):
        return math.inf, math.inf, "NaN or infinity"
    bound = RELATIVE_RMS_BOUND[problem.dtype] + FP8_BOUND[name]
    error = (got - expected).abs()
    scale = expected.square().mean().sqrt().clamp_min(1e-30)
    rms = (error.square().mean().sqrt() / scale).item()
    rows = expected.square().mean(dim=-1, keepdim=True).sqrt()
    largest = (error / rows.clamp_min(scale)).max().item()
    if rms > bound:
        return error.max().item(), rms, f"relative RMS error {rms:.3g} exceeds {bound:g}"
    if largest > MAX_ERROR_FACTOR * bound:
        what = f"largest error {largest:.3g} RMS exceeds {MAX_ERROR_FACTOR * bound:g}"
        return error.max().item(), rms, what
    return error.max().item(), rms, None


def outputs_equal(first: Fp4AttentionBwdOutputs, second: Fp4AttentionBwdOutputs) -> bool:
    """Whether two outputs are equal bit for bit."""
    pairs = ((first.dq, second.dq), (first.dk, second.dk), (first.dv, second.dv))
    return all(torch.equal(a, b) for a, b in pairs)
