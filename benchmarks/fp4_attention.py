#!/usr/bin/env python3
"""FP4 attention forward on the GPU at hand: our winner, our untuned default, bf16, and the errors.

Native products where the GPU has FP4 tensor cores, else emulated ones; 16 heads of 128 dimensions;
``side_by_side`` says how contenders are timed.

    python benchmarks/fp4_attention.py --db results.db --json fp4_attention.json

``cudnn`` is torch's scaled dot-product attention in bf16 on the same shapes; ``quantize`` is what
making the operands from bf16 q, k and v takes, which ours does not include. TFLOP/s counts two
products over the pairs that are seen. ``--errors`` prints each mode's error against exact attention
on normal values instead.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from seeds import compile_all
from side_by_side import OURS, Baseline, Cell, require_gpu, time_cell, write_record
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.fp4_attention import Fp4AttentionFwdOutputs, Fp4AttentionFwdProblem
from tilescout.kernels.fp4_attention.operands import quantize_operands
from tilescout.kernels.fp4_attention.triton_template import FP4_TENSOR_CORES
from tilescout.kernels.registry import template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.timers import Call
from torch.nn.attention import SDPBackend, sdpa_kernel

MODES: dict[str, dict[str, Any]] = {
    "nvfp4": {"mode": "nvfp4"},
    "direct": {"mode": "direct"},
    "direct floor": {"mode": "direct", "p_scale": "floor"},
    "direct affine": {"mode": "direct", "p_scale": "floor", "p_map": "affine"},
    "fp8_p": {"mode": "fp8_p"},
}
NUM_HEADS, HEAD_DIM = 16, 128
ERROR_HEADS = 2


def operands(problem: Fp4AttentionFwdProblem, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k and v of normal values, bf16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = (problem.num_qo_heads, problem.num_kv_heads, problem.num_kv_heads)
    tokens = (problem.query_len, problem.kv_len, problem.kv_len)
    return tuple(
        torch.randn(problem.batch, h, t, problem.head_dim, generator=generator, device="cuda")
        .bfloat16()
        .contiguous()
        for h, t in zip(heads, tokens, strict=True)
    )


def cudnn_calls(cell: Cell) -> list[Call]:
    """Launches of cuDNN's bf16 attention on the shapes of the cell."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(
                *(q, k, v),
                is_causal=cell.problem.is_causal,
                enable_gqa=cell.problem.group_size > 1,
            )

    return [partial(call, *operands(cell.problem, seed)) for seed in range(len(cell.inputs))]


def quantize_calls(cell: Cell) -> list[Call]:
    """Launches that make the operands from bf16."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        quantize_operands(
            *(q, k, v),
            mode=cell.problem.mode,
            sm_scale=1.0,
            q_mean=cell.problem.q_mean,
            tensor_scale="unit",
        )

    return [partial(call, *operands(cell.problem, seed)) for seed in range(len(cell.inputs))]


def problem_of(
    mode: str, tokens: int, *, products: str, is_causal: bool, out_dtype: str = "bfloat16"
) -> Fp4AttentionFwdProblem:
    """One head count, one length."""
    return Fp4AttentionFwdProblem(
        *(1, NUM_HEADS, NUM_HEADS, tokens, tokens, HEAD_DIM),
        **MODES[mode],
        products=products,
        is_causal=is_causal,
        out_dtype=out_dtype,
    )


def print_times(arguments: argparse.Namespace, device: DeviceSpec, products: str) -> None:
    """Times every mode at every length, prints the table, writes the JSON."""
    baselines: dict[str, Baseline] = {"cudnn": cudnn_calls, "quantize": quantize_calls}
    rows: list[dict[str, Any]] = []
    heading = f"{'mode':>14} {'tokens':>7}"
    print(heading, *(f"{n:>10}" for n in (OURS, "default", "cudnn", "quantize")), "TFLOP/s  config")
    for mode in arguments.mode:
        for tokens in arguments.tokens:
            problem = problem_of(mode, tokens, products=products, is_causal=arguments.causal)
            row = time_cell(problem, device, arguments.db, baselines, is_verified=baselines)
            row["tflops"] = {n: problem.flops / us / 1e6 for n, us in row["us"].items()}
            rows.append(row)
            names = (OURS, "default", "cudnn", "quantize")
            figures = " ".join(f"{row['us'].get(n, float('nan')):>10.1f}" for n in names)
            rates = "/".join(f"{row['tflops'].get(n, 0.0):.0f}" for n in (OURS, "cudnn"))
            config = " ".join(f"{k}={v}" for k, v in row["config"].items())
            print(f"{mode:>14} {tokens:>7} {figures} {rates:>8}  {config}", flush=True)
            torch.cuda.empty_cache()
    if arguments.json:
        write_record(arguments.json, device, rows)


def print_errors(device: DeviceSpec, products: str, lengths: list[int]) -> None:
    """Cosine and relative error of each mode against exact attention, unit tensor scales."""
    print(f"{'mode':>14} {'tokens':>7} {'cosine':>8} {'rel. L2':>8} {'norm':>6}  template")
    # One stream of numbers over all lengths, as the published figures of docs/fp4_attention.md.
    generator = torch.Generator().manual_seed(20260814)
    for tokens in lengths:
        shape = (1, ERROR_HEADS, tokens, HEAD_DIM)
        q, k, v = (torch.randn(shape, generator=generator).cuda() for _ in range(3))
        exact = torch.stack(
            [
                torch.softmax(q[0, h].double() @ k[0, h].double().T * HEAD_DIM**-0.5, -1)
                @ v[0, h].double()
                for h in range(ERROR_HEADS)
            ]
        )
        problems = {
            mode: replace(
                problem_of(mode, tokens, products=products, is_causal=False, out_dtype="float32"),
                num_qo_heads=ERROR_HEADS,
                num_kv_heads=ERROR_HEADS,
            )
            for mode in MODES
        }
        defaults = (
            (p, space.default) for p in problems.values() for space in joint_space(p, device).spaces
        )
        compile_all(defaults, device)
        for mode, problem in problems.items():
            inputs = quantize_operands(
                *(q, k, v), mode=problem.mode, sm_scale=HEAD_DIM**-0.5, tensor_scale="unit"
            ).inputs
            for space in joint_space(problem, device).spaces:
                out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
                launcher = template(problem.op, space.template).build(
                    problem, space.default, inputs
                )
                launcher.launch(inputs, Fp4AttentionFwdOutputs(out, lse))
                figures = " ".join(errors(out[0].double(), exact))
                print(f"{mode:>14} {tokens:>7} {figures}  {space.template}", flush=True)


def errors(got: torch.Tensor, exact: torch.Tensor) -> tuple[str, str, str]:
    """Cosine, relative error and ratio of norms, as columns."""
    cosine = (got * exact).sum() / (got.norm() * exact.norm())
    error, norm = (got - exact).norm() / exact.norm(), got.norm() / exact.norm()
    return f"{cosine:>8.4f}", f"{error:>8.4f}", f"{norm:>6.3f}"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--errors", action="store_true", help="print errors, time nothing")
    parser.add_argument("--db", action="append", help="database of winners; default: as dispatch")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    device = require_gpu()
    has_fp4 = device.compute_capability in FP4_TENSOR_CORES
    products = "native" if has_fp4 else "emulated"
    if arguments.errors:
        print_errors(device, products, [1024, 4096])
    else:
        print_times(arguments, device, products)


if __name__ == "__main__":
    main()
