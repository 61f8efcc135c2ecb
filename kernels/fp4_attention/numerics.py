"""The numerics of P in plain torch: what each mode makes of log2 scores.

The row reference m is an integer, the ceiling of the row's largest log2 score. Then another tile,
order or split of the keys changes every P by a power of two only, and codes stay what they are.
"""

from __future__ import annotations

import math

import torch

from ..quantization.codec import decode, encode
from ..quantization.formats import E2M1_MAX, E4M3_MAX
from .problem import P_MAPS, Fp4AttentionFwdProblem

__all__ = [
    "FP8_SHIFT",
    "LEAST_P_EXPONENT",
    "LOG2_CODE_MAX",
    "LOG2_TWO_LEVEL",
    "represented_p",
]

LOG2_CODE_MAX = math.log2(E2M1_MAX)
LOG2_TWO_LEVEL = math.log2(E4M3_MAX * E2M1_MAX)
"""log2 of what the row's largest P becomes on two levels: the largest scale times code."""
FP8_SHIFT = 8.0
"""P of 1 is stored as 2^8, which spares e4m3's subnormals; 448 is its largest."""
LEAST_P_EXPONENT = -110
"""Blocks of P below 2^-110 of the row's largest share this scale; they come out as zeros."""
_BLOCK_OF = {"nvfp4": 16, "direct": 32}


def represented_p(
    t: torch.Tensor, problem: Fp4AttentionFwdProblem
) -> tuple[torch.Tensor, torch.Tensor]:
    """(P as the second product sees it, the sum it is divided by), both times one constant.

    Args:
        t: fp32 ``[..., rows, keys]``: log2 scores less m; -inf where masked. Keys a multiple of 32.
        problem: For ``mode``, ``p_scale`` and ``p_map``.
    """
    if problem.mode == "fp8_p":
        p = torch.exp2(t + FP8_SHIFT)
        return p.to(torch.float8_e4m3fn).float(), p.sum(-1, keepdim=True)
    blocks = t.reshape(*t.shape[:-1], -1, _BLOCK_OF[problem.mode])
    top = blocks.amax(-1, keepdim=True)
    if problem.mode == "nvfp4":
        return _two_level(blocks, top)
    return _direct(blocks, top, problem)


def _two_level(blocks: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 P: the row's largest becomes 448 * 6, the denominator is not quantised."""
    p = torch.exp2(blocks + LOG2_TWO_LEVEL)
    wanted = (torch.exp2(top + LOG2_TWO_LEVEL) * (1.0 / E2M1_MAX)).clamp_max(E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn).float()
    factor = torch.where(scale == 0.0, torch.zeros_like(scale), 1.0 / scale)
    represented = decode(encode(p * factor)) * scale
    return represented.flatten(-2), p.sum((-2, -1)).unsqueeze(-1)


def _direct(
    blocks: torch.Tensor, top: torch.Tensor, problem: Fp4AttentionFwdProblem
) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 P times 6 (Direct-P): the denominator is the sum of what is represented."""
    exponent = torch.ceil(top) if problem.p_scale == "ceil" else torch.floor(top)
    exponent = exponent.clamp_min(LEAST_P_EXPONENT)
    power = torch.exp2(exponent)
    line = P_MAPS[problem.p_map]
    if line is None:
        in_code_units = torch.exp2(blocks + LOG2_CODE_MAX) / power
    else:
        slope, intercept = line
        in_code_units = (slope * (blocks - exponent + LOG2_CODE_MAX) + intercept).clamp_min(0.0)
    represented = (decode(encode(in_code_units)) * power).flatten(-2)
    return represented, represented.sum(-1, keepdim=True)
