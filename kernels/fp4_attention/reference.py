"""The operation in plain torch on the same codes, seeded inputs, and the comparison."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)

from ..base import Comparison
from ..quantization.block_tensor import BlockTensor
from ..quantization.reference import dequantize
from .inputs import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs
from .numerics import represented_p
from .operands import quantize_operands
from .problem import Q_BLOCK_ROWS, Fp4AttentionFwdProblem

__all__ = [
    "Fp4AttentionFwdInputs",
    "Fp4AttentionFwdOutputs",
    "compare",
    "make_inputs",
    "make_outputs",
    "make_validation_inputs",
    "outputs_equal",
    "reference",
    "reference_p",
    "row_bound",
]

_LOG2_E = math.log2(math.e)
_MAX_HEADS, _ROWS_OF_A_RUN = 4, 96

# Codes and scales are the reference's own, and the sums of Q K, at unit tensor scales, come out
# exact in 16-bit products, Hopper's shortened ones too. What differs is the last bit of a log2
# score (one rounding where the reference has two) and of exp2: about one P in a million falls to
# the other side of a tie. That moves its row by some hundredths, of few keys by up to the row's
# own size, and no other row. Without such a P rows agree to 1e-6 (tests/kernels/fp4_attention/
# test_rounding.py).
ROW_BOUND = 1.0e-4
"""Bound of a row's RMS error over its RMS, or over that of all where larger; half a unit of the
output's dtype comes on top."""
FP8_BOUND = 2.0e-3
"""Hopper's FP8 products are cut to 14 bits of the largest, and so is what they sum to: up to 5e-4
of a row by a model of them, 6e-4 on an H200."""
DIFFERING_CODES = 1.0e-5
"""Share of the codes of P that may be another: as many rows may exceed the bound."""
RMS_BOUND, _STEADY_CODES = 1.0e-3, 1.0e7
"""Bound of all rows together, beside that of a row: such codes add up to 2e-4 or 3e-4, whatever the
number of keys. Of fewer codes one weighs more, and the bound grows with the root."""
MAX_ERROR = 1.0
"""Bound of one element's error over the same RMS, in rows with such a code."""
LSE_BOUND = 1.0e-4
"""Absolute error of a logarithm near 0, and relative to it elsewhere."""


def reference(
    problem: Fp4AttentionFwdProblem,
    inputs: Fp4AttentionFwdInputs,
    batch: int,
    head: int,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out ``[rows, head_dim]``, lse ``[rows]``) in fp32 of some query rows of one head."""
    p, total, lse = reference_p(problem, inputs, batch, head, rows)
    out = (p @ _v_values(inputs, batch, head // problem.group_size).T) / total
    return torch.where(total > 0.0, out, torch.zeros_like(out)), lse


def reference_p(
    problem: Fp4AttentionFwdProblem,
    inputs: Fp4AttentionFwdInputs,
    batch: int,
    head: int,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(P ``[rows, padded_keys]``, its denominator ``[rows, 1]``, lse ``[rows]``), all fp32.

    P and denominator are times a constant of the mode, see ``represented_p``.
    """
    q = _values(inputs.q, batch, head)[rows]
    k = _values(inputs.k, batch, head // problem.group_size)
    # The factors in the kernel's order: a last bit more or less would move ties.
    factor = inputs.q.tensor_scale * inputs.k.tensor_scale * (inputs.sm_scale * _LOG2_E)
    scores = (q @ k.T) * factor
    if inputs.delta is not None:
        per_block = problem.q_mean == "block"
        means = rows // Q_BLOCK_ROWS if per_block else torch.zeros_like(rows)
        scores = scores + inputs.delta[batch, head, means] * (inputs.sm_scale * _LOG2_E)
    if problem.is_causal:
        keys = torch.arange(problem.kv_len, device=rows.device)
        last = rows + (problem.kv_len - problem.query_len)
        scores = scores.masked_fill(keys[None, :] > last[:, None], -math.inf)
    m = torch.ceil(scores.amax(-1, keepdim=True))
    t = scores - torch.where(m == -math.inf, torch.zeros_like(m), m)
    padding = problem.padded_keys - problem.kv_len
    p, total = represented_p(F.pad(t, (0, padding), value=-math.inf), problem)
    lse = (m[:, 0] + torch.log2(torch.exp2(t).sum(-1))) / _LOG2_E
    return p, total, lse


def _values(tensor: BlockTensor, batch: int, head: int) -> torch.Tensor:
    """fp32 of one head without the tensor scale."""
    codes, scales = tensor.codes[batch, head], tensor.scales[batch, head]
    one = torch.ones_like(tensor.tensor_scale)
    return dequantize(replace(tensor, codes=codes, scales=scales, tensor_scale=one))


def _v_values(inputs: Fp4AttentionFwdInputs, batch: int, kv_head: int) -> torch.Tensor:
    """fp32 ``[head_dim, padded_keys]``."""
    if isinstance(inputs.v, BlockTensor):
        return _values(inputs.v, batch, kv_head) * inputs.v_scale
    scale = inputs.v_scale.view(inputs.v.shape[:2])[batch, kv_head]
    return inputs.v[batch, kv_head].float() * scale


def make_inputs(
    problem: Fp4AttentionFwdProblem, *, device: str | torch.device, seed: int
) -> Fp4AttentionFwdInputs:
    """Inputs to time: normal values, quantised."""
    return _make(problem, device=device, seed=seed, spread=1.0)


def make_validation_inputs(
    problem: Fp4AttentionFwdProblem, *, device: str | torch.device, seed: int
) -> Fp4AttentionFwdInputs:
    """Inputs to verify: sharper logits, one key that wins everywhere, NaN behind Q and K."""
    inputs = _make(problem, device=device, seed=seed, spread=2.0)
    return replace(inputs, q=_poisoned(inputs.q), k=_poisoned(inputs.k))


def _make(
    problem: Fp4AttentionFwdProblem, *, device: str | torch.device, seed: int, spread: float
) -> Fp4AttentionFwdInputs:
    """One batch entry at a time: the fp32 forms of all would take ten times the inputs' memory."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        shape = (1, heads, tokens, problem.head_dim)
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    parts = []
    for _ in range(problem.batch):
        q = normal(problem.num_qo_heads, problem.query_len) * spread
        k = normal(problem.num_kv_heads, problem.kv_len)
        k[:, :, problem.kv_len // 2] *= spread
        parts.append(
            quantize_operands(
                *(q, k, normal(problem.num_kv_heads, problem.kv_len)),
                mode=problem.mode,
                sm_scale=problem.head_dim**-0.5,
                q_mean=problem.q_mean,
                tensor_scale="unit",
                with_kernels=False,
            ).inputs
        )
    first = parts[0]
    deltas = [part.delta for part in parts if part.delta is not None]
    v_parts = [part.v for part in parts]
    return Fp4AttentionFwdInputs(
        q=_joined([part.q for part in parts]),
        k=_joined([part.k for part in parts]),
        v=_joined([v for v in v_parts if isinstance(v, BlockTensor)])
        if isinstance(first.v, BlockTensor)
        else torch.cat([v for v in v_parts if isinstance(v, torch.Tensor)]),
        v_scale=first.v_scale
        if isinstance(first.v, BlockTensor)
        else torch.cat([part.v_scale for part in parts]),
        sm_scale=first.sm_scale,
        delta=torch.cat(deltas) if deltas else None,
    )


def _joined(parts: list[BlockTensor]) -> BlockTensor:
    """One tensor of all batch entries, which share the tensor scale."""
    scales = torch.cat([part.scales.view(torch.uint8) for part in parts])
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=scales.view(parts[0].scales.dtype),
    )


def _poisoned(tensor: BlockTensor) -> BlockTensor:
    """The same values with NaN scales in the memory that follows."""
    rows = 2 * tensor.scales.shape[-1] * Q_BLOCK_ROWS
    raw = tensor.scales.view(torch.uint8)
    room = torch.full((raw.numel() + rows,), 0x7F, dtype=torch.uint8, device=raw.device)
    room[: raw.numel()] = raw.flatten()
    scales = room[: raw.numel()].view(raw.shape).view(tensor.scales.dtype)
    return replace(tensor, scales=scales)


def make_outputs(
    problem: Fp4AttentionFwdProblem, inputs: Fp4AttentionFwdInputs
) -> Fp4AttentionFwdOutputs:
    """Outputs filled with NaN, so that what a kernel does not write shows."""
    shape = (problem.batch, problem.num_qo_heads, problem.query_len, problem.head_dim)
    dtype, device = getattr(torch, problem.out_dtype), inputs.device
    return Fp4AttentionFwdOutputs(
        torch.full(shape, math.nan, dtype=dtype, device=device),
        torch.full(shape[:3], math.nan, device=device),
    )


def compare(
    problem: Fp4AttentionFwdProblem,
    inputs: Fp4AttentionFwdInputs,
    outputs: Fp4AttentionFwdOutputs,
) -> Comparison:
    """Compares runs of rows at the start, the middle and the end of some heads."""
    rows = _rows_to_compare(problem, inputs.device)
    heads = _heads_to_compare(problem)
    wanted = [reference(problem, inputs, batch, head, rows) for batch, head in heads]
    expected, lse = (torch.stack(parts) for parts in zip(*wanted, strict=True))
    got = torch.stack([outputs.out[batch, head][rows] for batch, head in heads]).float()
    if not bool(torch.isfinite(got).all()):
        where = _place(~torch.isfinite(got).all(-1), heads, rows)
        return Comparison(f"{where}: NaN or infinity", math.inf, math.inf)
    reason = None
    if outputs.lse is not None:
        logs = torch.stack([outputs.lse[batch, head][rows] for batch, head in heads])
        reason = _lse_difference(logs, lse)
    error = (got - expected).abs()
    scale = expected.square().mean().sqrt().clamp_min(1e-30)
    rms = (error.square().mean().sqrt() / scale).item()
    reason = reason or _row_difference(problem, heads, rows, error, expected)
    bound = row_bound(problem)
    bound += RMS_BOUND * math.sqrt(max(1.0, _STEADY_CODES / _num_codes(problem, heads, rows)))
    if reason is None and rms > bound:
        reason = f"relative RMS error {rms:.3g} exceeds {bound:.3g}"
    return Comparison(reason, error.max().item(), rms)


def _heads_to_compare(problem: Fp4AttentionFwdProblem) -> list[tuple[int, int]]:
    total = problem.batch * problem.num_qo_heads
    step = max(1, total // _MAX_HEADS)
    chosen = sorted({*range(0, total, step), total - 1})
    return [divmod(index, problem.num_qo_heads) for index in chosen]


def _rows_to_compare(problem: Fp4AttentionFwdProblem, device: torch.device) -> torch.Tensor:
    rows = torch.arange(problem.query_len, device=device)
    if problem.query_len <= 3 * _ROWS_OF_A_RUN:
        return rows
    middle = problem.query_len // 2
    return torch.cat(
        [rows[:_ROWS_OF_A_RUN], rows[middle : middle + _ROWS_OF_A_RUN], rows[-_ROWS_OF_A_RUN:]]
    )


def _row_difference(
    problem: Fp4AttentionFwdProblem,
    heads: list[tuple[int, int]],
    rows: torch.Tensor,
    error: torch.Tensor,
    expected: torch.Tensor,
) -> str | None:
    """What is wrong with the rows ``[heads, rows, head_dim]``."""
    sizes = expected.square().mean(-1).sqrt()
    sizes = sizes.clamp_min(expected.square().mean().sqrt().clamp_min(1e-30))
    row_errors = error.square().mean(-1).sqrt() / sizes
    bound = row_bound(problem)
    differing, allowed = int((row_errors > bound).sum()), _rows_allowed(problem, heads, rows)
    if differing > allowed:
        where = _place(row_errors == row_errors.max(), heads, rows)
        return (
            f"{differing} of {row_errors.numel()} rows differ by more than {bound:.3g} of their "
            f"RMS, {allowed} may; the worst is {where}, by {row_errors.max().item():.3g}"
        )
    largest = error.amax(-1) / sizes
    if largest.max().item() > MAX_ERROR:
        where = _place(largest == largest.max(), heads, rows)
        return f"{where}: largest error {largest.max().item():.3g} RMS exceeds {MAX_ERROR:g}"
    return None


def row_bound(problem: Fp4AttentionFwdProblem) -> float:
    """The bound of a row's relative RMS error where no code of P differs."""
    rounding = torch.finfo(getattr(torch, problem.out_dtype)).eps / 2
    return ROW_BOUND + rounding + (FP8_BOUND if problem.mode == "fp8_p" else 0.0)


def _rows_allowed(
    problem: Fp4AttentionFwdProblem, heads: list[tuple[int, int]], rows: torch.Tensor
) -> int:
    """How many rows may have a code that differs: the share, and three standard deviations."""
    expected = DIFFERING_CODES * _num_codes(problem, heads, rows)
    return int(expected + 3.0 * math.sqrt(expected))


def _num_codes(
    problem: Fp4AttentionFwdProblem, heads: list[tuple[int, int]], rows: torch.Tensor
) -> int:
    """Pairs of one of these rows and a key that it sees, at least 1."""
    keys = torch.full_like(rows, problem.kv_len)
    if problem.is_causal:
        keys = (rows + 1 + problem.kv_len - problem.query_len).clamp(0, problem.kv_len)
    return max(1, len(heads) * int(keys.sum()))


def _place(is_there: torch.Tensor, heads: list[tuple[int, int]], rows: torch.Tensor) -> str:
    """Names the first of the rows ``[heads, rows]`` that are marked."""
    head_index, row_index = (int(i) for i in is_there.nonzero()[0])
    batch, head = heads[head_index]
    return f"row {int(rows[row_index])} of head {head} of batch entry {batch}"


def _lse_difference(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    is_empty = expected == -math.inf
    if not torch.equal(got == -math.inf, is_empty):
        return "logarithm of the sum is not -inf exactly where no key is seen"
    error = (got - expected).abs() / expected.abs().clamp_min(1.0)
    worst = error.masked_fill(is_empty, 0.0).max().item()
    if not worst <= LSE_BOUND:
        return f"error {worst:.3g} of the logarithm of the sum exceeds {LSE_BOUND:g}"
    return None


def outputs_equal(first: Fp4AttentionFwdOutputs, second: Fp4AttentionFwdOutputs) -> bool:
    """Whether two outputs are equal bit for bit."""
    if first.lse is None or second.lse is None:
        return first.lse is second.lse and torch.equal(first.out, second.out)
    return torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)
