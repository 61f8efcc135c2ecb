"""The codes of P that a kernel multiplies, read from its outputs, and how many are another's.

With V = 6 I for as many keys as a head has dimensions, and zeros elsewhere, the output is P of
those keys over the denominator: exact in every format of V, and in every sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from tilescout.kernels.fp4_attention import (
    Fp4AttentionFwdInputs,
    Fp4AttentionFwdOutputs,
    Fp4AttentionFwdProblem,
)
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.fp4_attention.operands import quantize_operands
from tilescout.kernels.quantization.codec import encode

__all__ = ["CodeDifference", "check_codes", "differing_codes"]

Launch = Callable[[Fp4AttentionFwdProblem, Fp4AttentionFwdInputs], Fp4AttentionFwdOutputs]
_PROBE = 6.0
_NORMAL = 2.0**-6
"""Least normal number of e4m3: below it codes depend on the tile."""
NVFP4_BLOCK = 16
LEAST_COUNTED = 0.9
"""Of all codes: those of e4m3's subnormals are few in any mode with normal inputs."""
LARGEST_ERROR = 1e-5


@dataclass(frozen=True)
class CodeDifference:
    """Codes of P that are not the reference's, of those that no tile changes."""

    num_codes: int
    codes: int
    num_scales: int
    scales: int
    largest_error: float
    """Of P over the row's largest, where code and scale are the reference's."""

    @property
    def share(self) -> float:
        """Of the codes."""
        return self.codes / self.num_codes

    def __str__(self) -> str:
        text = f"{self.codes} of {self.num_codes} codes differ, {self.share:.1e}"
        return f"{text}; {self.scales} of {self.num_scales} scales" if self.num_scales else text


def check_codes(
    label: str, problem: Fp4AttentionFwdProblem, inputs: Fp4AttentionFwdInputs, launch: Launch
) -> None:
    """Prints the share of codes that differ, in one line, and holds it to its bound."""
    found = differing_codes(problem, inputs, launch)
    print(f"{label}: {found}; P elsewhere to {found.largest_error:.1e}")  # noqa: T201
    codes = problem.batch * problem.num_qo_heads * problem.query_len * problem.kv_len
    assert found.num_codes > LEAST_COUNTED * codes, f"{found.num_codes} of {codes} are counted"
    # A tie that falls to the other side is no mistake, however few the codes are.
    allowed = max(1, int(ref.DIFFERING_CODES * found.num_codes))
    assert found.codes <= allowed, f"{found}: {allowed} may"
    assert found.largest_error <= LARGEST_ERROR, f"P is {found.largest_error:.1e} off"


def differing_codes(
    problem: Fp4AttentionFwdProblem, inputs: Fp4AttentionFwdInputs, launch: Launch
) -> CodeDifference:
    """Counts them over all heads, rows and keys; launch computes the outputs for inputs."""
    kernel = _probed(problem, inputs, launch)
    found: list[tuple[int, ...]] = []
    worst = 0.0
    for batch, head in torch.cartesian_prod(
        torch.arange(problem.batch), torch.arange(problem.num_qo_heads)
    ).tolist():
        rows = torch.arange(problem.query_len, device=inputs.device)
        p, total, _ = ref.reference_p(problem, inputs, batch, head, rows)
        p = p[:, : problem.kv_len]
        other = kernel[batch, head] * total
        # A code that differs changes the denominator of its whole row, where codes have it.
        ratio = (other / p).masked_fill((p == 0) | (other == 0), torch.nan).nanmedian(1).values
        other = other / torch.where(ratio.isnan(), 1.0, ratio)[:, None]
        counts, error = _compared(problem, p, other)
        found.append(counts)
        worst = max(worst, error)
    return CodeDifference(*(sum(column) for column in zip(*found, strict=True)), worst)


def _probed(
    problem: Fp4AttentionFwdProblem, inputs: Fp4AttentionFwdInputs, launch: Launch
) -> torch.Tensor:
    """fp32 P over its denominator ``[batch, heads, rows, kv_len]``, a launch for each block."""
    assert problem.out_dtype == "float32"
    shape = (problem.batch, problem.num_kv_heads, problem.kv_len, problem.head_dim)
    rows = torch.zeros(*shape[:2], 1, shape[3], device=inputs.device)
    parts = []
    for first in range(0, problem.kv_len, problem.head_dim):
        v = torch.zeros(shape, device=inputs.device)
        v.diagonal(first * -1, 2, 3).fill_(_PROBE)
        given = quantize_operands(
            *(rows, rows, v),
            mode=problem.mode,
            sm_scale=1.0,
            tensor_scale="unit",
            with_kernels=False,
        ).inputs
        probe = replace(inputs, v=given.v, v_scale=given.v_scale)
        parts.append(launch(problem, probe).out / _PROBE)
    return torch.cat(parts, -1)[..., : problem.kv_len]


def _compared(
    problem: Fp4AttentionFwdProblem, p: torch.Tensor, other: torch.Tensor
) -> tuple[tuple[int, int, int, int], float]:
    """((codes, differing, scales, differing), largest error of P) of one head."""
    largest = p.amax(1, keepdim=True).clamp_min(1e-30)
    if problem.mode == "nvfp4":
        ours, theirs = _codes_and_scales(p), _codes_and_scales(other)
        counted = (ours[1] >= _NORMAL) & (theirs[1] >= _NORMAL)
        moved = (ours[1] != theirs[1]) & counted
        counts = (int(counted.sum()), int(moved.sum()))
        keys = [x.repeat_interleave(NVFP4_BLOCK, 1)[:, : p.shape[1]] for x in (counted, moved)]
        counted, differs = keys[0], (ours[0] != theirs[0]) & keys[0]
        same = counted & ~differs & ~keys[1]
    else:
        # A code of MXFP4 times its power of two, or e4m3: another value is another code.
        least = _NORMAL if problem.mode == "fp8_p" else 0.0
        counted = torch.maximum(p, other) >= least
        differs = ((p - other).abs() > 0.02 * torch.maximum(p, other)) & counted
        same, counts = counted & ~differs, (0, 0)
    error = ((p - other).abs() / largest)[same]
    worst = error.max().item() if error.numel() else 0.0
    return (int(counted.sum()), int(differs.sum()), *counts), worst


def _codes_and_scales(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[rows, keys]`` and scales ``[rows, blocks]``: the largest of a block has code 6."""
    blocks = torch.nn.functional.pad(p, (0, -p.shape[1] % NVFP4_BLOCK))
    blocks = blocks.unflatten(1, (-1, NVFP4_BLOCK))
    scales = (blocks.amax(2) / 6.0).to(torch.float8_e4m3fn).float()
    codes = encode(blocks / scales.clamp_min(2.0**-10)[:, :, None])
    return codes.flatten(1)[:, : p.shape[1]], scales
