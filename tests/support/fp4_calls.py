"""Operands and runs of FP4 attention that its tests share."""

from __future__ import annotations

import torch
from tilescout.kernels.base import Config
from tilescout.kernels.fp4_attention import (
    Fp4AttentionFwdInputs,
    Fp4AttentionFwdOutputs,
    Fp4AttentionFwdProblem,
)
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.registry import template

MODES = {
    "nvfp4": {"mode": "nvfp4"},
    "fp8_p": {"mode": "fp8_p"},
    "direct ceil": {"mode": "direct"},
    "direct floor": {"mode": "direct", "p_scale": "floor"},
    "direct affine": {"mode": "direct", "p_scale": "floor", "p_map": "affine"},
}


def problem_of(**changes: object) -> Fp4AttentionFwdProblem:
    """A small problem; fields by name."""
    fields: dict[str, object] = {
        "batch": 1,
        "num_qo_heads": 2,
        "num_kv_heads": 1,
        "query_len": 64,
        "kv_len": 192,
        "head_dim": 64,
        "mode": "nvfp4",
        "products": "emulated",
        "out_dtype": "float32",
    }
    return Fp4AttentionFwdProblem(**{**fields, **changes})  # type: ignore[arg-type]


def config_of(
    problem: Fp4AttentionFwdProblem,
    block_m: int = 64,
    block_n: int = 64,
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    choice: str = "",
) -> Config:
    """A config of the template that serves the problem."""
    tile = {"block_m": block_m, "block_n": block_n}
    values = {**tile, "num_warps": num_warps, "num_stages": num_stages}
    if problem.products == "native":
        return Config.of("triton_native", {**values, "conversion": choice or "arithmetic"})
    return Config.of("triton_emulated", {**values, "dequantize": choice or "ahead"})


def run(
    problem: Fp4AttentionFwdProblem, inputs: Fp4AttentionFwdInputs, config: Config | None = None
) -> Fp4AttentionFwdOutputs:
    """The outputs of one launch."""
    config = config or config_of(problem)
    outputs = ref.make_outputs(problem, inputs)
    chosen = template(problem.op, config.template)
    # Launchers take it for granted; dispatch asks, as here.
    assert chosen.supports_tensors(problem, inputs, outputs) is None
    chosen.build(problem, config, inputs).launch(inputs, outputs)
    return outputs


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """||x - ref|| / ||ref|| in fp64."""
    return ((value.double() - exact.double()).norm() / exact.double().norm()).item()


def cosine(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Cosine of the angle between two tensors, in fp64."""
    a, b = value.double().flatten(), exact.double().flatten()
    return (a @ b / (a.norm() * b.norm())).item()


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp64 with a bottom-right causal mask; rows that see no key are 0."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        rows, keys = scores.shape[-2:]
        last = torch.arange(rows, device=q.device)[:, None] + keys - rows
        hidden = torch.arange(keys, device=q.device)[None, :] > last
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, torch.logsumexp(scores, -1)
