#!/usr/bin/env python3
"""FP4 attention backward on the GPU at hand: ours, cuDNN's in bf16, and the plain-torch reference.

16 heads of 128 dimensions, causal, unless told otherwise; takes less than a minute.

    python benchmarks/fp4_backward.py --db results.db --json fp4_backward.json

``tilescout`` is the winner of the database, ``default`` the untuned config, ``cudnn`` the backward
of torch's scaled dot-product attention with the cuDNN backend on q, k and v in bf16; ``reference``
computes ours in plain torch. All but the last take turns, launches back to back between events, and
the median counts. Rates count five products over the pairs that are seen. Parts of ours follow,
then one training step (quantise, forward, backward) beside cuDNN's, and the cosine of our gradients
with cuDNN's on the same bf16 q, k and v.

``--binaries SKU ...`` prints what the seeds compile to instead and needs no GPU; the table of
docs/fp4_attention.md is its output.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from side_by_side import DEFAULT, OURS, require_gpu, write_record
from tilescout.kernels.base import Config, PartwiseLauncher
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.fp4_attention.triton_template import FP4_TENSOR_CORES
from tilescout.kernels.fp4_attention_bwd import Fp4AttentionBwdProblem
from tilescout.kernels.fp4_attention_bwd import reference as ref
from tilescout.kernels.registry import module_of, template
from tilescout.ops import fp4_attention_training
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import compile_config
from tilescout.tuner.dispatch import lookup
from tilescout.tuner.finals import time_rounds
from tilescout.tuner.timers import Call, CudaTimer
from torch.nn.attention import SDPBackend, sdpa_kernel

NUM_ROUNDS, LAUNCHES_PER_ROUND = 15, 4
CUDNN, REFERENCE = "cudnn", "reference"
LEAST_SPEED_UP = 3.0
"""Over the reference."""


def medians_us(calls: Mapping[str, Call]) -> dict[str, float]:
    """Median microseconds of a launch of each, all in every round."""
    timer = CudaTimer(is_graph=False)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    runs = [timer.prepare([call], LAUNCHES_PER_ROUND) for call in calls.values()]
    samples = time_rounds(runs, timer, NUM_ROUNDS)
    return {n: statistics.median(found) for n, found in zip(calls, samples, strict=True)}


def our_calls(
    problem: Fp4AttentionBwdProblem, configs: Mapping[str, Config]
) -> tuple[dict[str, Call], dict[str, Call], Call]:
    """(whole launches of each config, parts of the first, the reference on all heads).

    Raises:
        SystemExit: a config gives wrong gradients.
    """
    inputs = ref.make_inputs(problem, device="cuda", seed=0)
    outputs = ref.make_outputs(problem, inputs)
    whole: dict[str, Call] = {}
    parts: dict[str, Call] = {}
    for name, config in configs.items():
        chosen = template(problem.op, config.template)
        launcher = cast("PartwiseLauncher", chosen.build(problem, config, inputs))
        for tensor in (outputs.dq, outputs.dk, outputs.dv):
            tensor.fill_(float("nan"))
        launcher.launch(inputs, outputs)
        comparison = ref.compare(problem, inputs, outputs)
        if not comparison.is_ok:
            raise SystemExit(f"{name} is wrong: {comparison.reason}: {config}")
        print(f"{name}: relative RMS error {comparison.relative_rms_error:.2g}: {config}")
        whole[name] = partial(launcher.launch, inputs, outputs)
        if not parts:
            parts = {
                part.name: partial(launcher.launch_part, part.name, inputs, outputs)
                for part in chosen.parts(problem, config)
            }

    def reference() -> None:
        for batch in range(problem.batch):
            for head in range(problem.num_kv_heads):
                ref.reference(problem, inputs, batch, head)

    return whole, parts, reference


def bf16_tensors(problem: Fp4AttentionBwdProblem) -> tuple[torch.Tensor, ...]:
    """q, k, v, which require grad, and dO: normal values in bf16."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        shape = (problem.batch, heads, tokens, problem.head_dim)
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    q, do = (normal(problem.num_qo_heads, problem.query_len) for _ in range(2))
    k, v = (normal(problem.num_kv_heads, problem.kv_len) for _ in range(2))
    return (*(x.requires_grad_() for x in (q, k, v)), do)


def cudnn_forward(
    problem: Fp4AttentionBwdProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The output of cuDNN's attention in bf16."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            *(q, k, v), is_causal=problem.is_causal, enable_gqa=problem.group_size > 1
        )


def time_reference(call: Call) -> float:
    """Milliseconds of the faster of two runs after an untimed one."""
    timer = CudaTimer(is_graph=False)
    return min(timer.rough_us(call) for _ in range(2)) / 1e3


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the angle between two tensors, in fp32."""
    x, y = a.float().flatten(), b.float().flatten()
    return float(x @ y / (x.norm() * y.norm()))


def measure(
    problem: Fp4AttentionBwdProblem, device: DeviceSpec, databases: list[str] | None
) -> dict[str, Any]:
    """Times everything, prints the tables and returns what goes into the JSON."""
    found = lookup(problem, gpu=device, databases=databases)
    configs = {OURS: found.config, DEFAULT: joint_space(problem, device).default}
    whole, parts, reference = our_calls(problem, configs)
    q, k, v, do = bf16_tensors(problem)
    attend = partial(cudnn_forward, problem)
    out = attend(q, k, v)
    cudnn = partial(torch.autograd.grad, out, (q, k, v), do, retain_graph=True)
    times = medians_us({**whole, CUDNN: cudnn})
    times[REFERENCE] = 1e3 * time_reference(reference)
    rates = {name: problem.flops / us / 1e6 for name, us in times.items()}
    print(f"{'backward':>12} {'us':>10} {'TFLOP/s':>8} {'x ours':>7}")
    for name, us in times.items():
        print(f"{name:>12} {us:>10.1f} {rates[name]:>8.0f} {us / times[OURS]:>7.2f}", flush=True)
    speed_up = times[REFERENCE] / times[OURS]
    verdict = "reached" if speed_up >= LEAST_SPEED_UP else "MISSED"
    print(f"over the reference: {speed_up:.1f} times, at least {LEAST_SPEED_UP:g}: {verdict}")
    part_us = medians_us(parts)
    print("parts:", ", ".join(f"{name} {us:.1f} us" for name, us in part_us.items()))

    def step(forward: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(q, k, v), (q, k, v), do)

    ours = partial(fp4_attention_training, is_causal=problem.is_causal)
    steps = medians_us({OURS: partial(step, ours), CUDNN: partial(step, attend)})
    print("forward and backward:", ", ".join(f"{n} {us:.1f} us" for n, us in steps.items()))
    pairs = zip(("dq", "dk", "dv"), step(ours), step(attend), strict=True)
    cosines = {name: cosine(mine, theirs) for name, mine, theirs in pairs}
    print("cosine with cuDNN:", ", ".join(f"{n} {value:.4f}" for n, value in cosines.items()))
    return {
        "problem": problem.as_dict(),
        "config": found.config.as_dict(),
        "tier": found.tier,
        "trial_id": found.trial_id,
        "us": times,
        "tflops": rates,
        "part_us": part_us,
        "step_us": steps,
        "cosine_with_cudnn": cosines,
        "num_rounds": NUM_ROUNDS,
    }


COLUMNS = (
    *("SKU", "kernel", "rows x keys", "warps", "stages", "products", "registers", "spill bytes"),
    *("shared KiB", "tensor columns", "instructions", "in loop"),
)


def print_binaries(skus: list[str]) -> None:
    """A Markdown table: each tile of the seeds once, as a causal problem with 16 heads has it."""
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for device in map(gpu, skus):
        has_fp4 = device.compute_capability in FP4_TENSOR_CORES
        products = "native" if has_fp4 else "emulated"
        problem = Fp4AttentionBwdProblem(1, 16, 16, 8192, 8192, 128, products)
        lines: dict[str, None] = {}
        for config in joint_space(problem, device).valid_seeds():
            lines |= dict.fromkeys(binary_lines(problem, config, device))
        print("\n".join(lines), flush=True)


def binary_lines(problem: Fp4AttentionBwdProblem, config: Config, device: DeviceSpec) -> list[str]:
    """One line for each pass of a config."""
    module, name = module_of(problem.op), config.template
    result = compile_config(problem.op, module, name, problem, config, device.arch)
    kinds = "fp8, nvfp4" if problem.products == "native" else "16-bit, fp8"
    lines = []
    for part in template(problem.op, name).parts(problem, config)[1:]:
        block_m, block_n, warps, stages = (
            config[f"{part.name}_{n}"] for n in ("block_m", "block_n", "num_warps", "num_stages")
        )
        head = (device.sku, part.name, f"{block_m} x {block_n}", warps, stages)
        facts = next((f for f in result.facts if f.kernel == part.kernels[0]), None)
        if facts is None:
            lines.append(f"| {' | '.join(map(str, head))} | {result.status}: {result.reason} |")
            continue
        found = (
            *(kinds, facts.registers, facts.spill_bytes, f"{facts.smem_bytes / 1024:.1f}"),
            *(facts.tmem_columns, facts.num_instructions, facts.loop_instructions),
        )
        lines.append(f"| {' | '.join(map(str, (*head, *found)))} |")
    return lines


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="default: as --heads")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--db", action="append", help="database of winners; default: as dispatch")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--binaries", nargs="+", metavar="SKU", help="print what seeds compile to")
    arguments = parser.parse_args()
    if arguments.binaries:
        print_binaries(arguments.binaries)
        return
    device = require_gpu()
    has_fp4 = device.compute_capability in FP4_TENSOR_CORES
    problem = Fp4AttentionBwdProblem(
        batch=1,
        num_qo_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads or arguments.heads,
        query_len=arguments.tokens,
        kv_len=arguments.tokens,
        head_dim=arguments.head_dim,
        products="native" if has_fp4 else "emulated",
        is_causal=not arguments.full,
    )
    row = measure(problem, device, arguments.db)
    if arguments.json:
        write_record(arguments.json, device, [row])


if __name__ == "__main__":
    main()
