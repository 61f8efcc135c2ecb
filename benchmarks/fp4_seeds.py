#!/usr/bin/env python3
"""FP4 attention forward without a tune: every seed of every template, verified and timed.

    python benchmarks/fp4_seeds.py --mode direct fp8_p --tokens 16384 --json fp4_seeds.json

16 heads of 128 dimensions, products as in ``fp4_attention.py``. Kernels are compiled on all cores
first; a config that is wrong is listed as such. ``cudnn`` is torch's scaled dot-product attention
in bf16. With ``--dry-run`` it compiles for the named GPU and times nothing: no GPU is needed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fp4_attention import MODES, operands, problem_of
from side_by_side import require_gpu, write_record
from tilescout.kernels.base import Config, Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.fp4_attention.triton_template import FP4_TENSOR_CORES
from tilescout.kernels.registry import module_of, operation, template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.timers import Call, CudaTimer
from torch.nn.attention import SDPBackend, sdpa_kernel

LAUNCHES, ROUNDS = 4, 7


def seeds_of(problem: Problem, device: DeviceSpec) -> list[Config]:
    """Defaults and seeds of all templates."""
    spaces = joint_space(problem, device).spaces
    return list(dict.fromkeys(c for s in spaces for c in (s.default, *s.valid_seeds())))


def compile_all(problems: Sequence[Problem], device: DeviceSpec) -> dict[tuple[Any, Config], Any]:
    """What the compilers made of every problem's seeds."""
    with CompilePool() as pool:
        jobs = {
            (problem, config): pool.submit(
                *(problem.op, module_of(problem.op), config.template, problem, config, device.arch)
            )
            for problem in problems
            for config in seeds_of(problem, device)
        }
        return {key: job.result() for key, job in jobs.items()}


def median_us(call: Call) -> float:
    """Of graphs of a few launches each."""
    timer = CudaTimer(is_graph=True)
    call()
    run = timer.prepare([call], LAUNCHES)
    run.enqueue()
    return statistics.median(timer.time_us([run] * ROUNDS))


def measured(problem: Any, config: Config, inputs: Any, outputs: Any) -> tuple[float, str]:
    """(microseconds, what is wrong)."""
    try:
        launcher = template(problem.op, config.template).build(problem, config, inputs)
        outputs.out.fill_(float("nan"))
        launcher.launch(inputs, outputs)
        torch.cuda.synchronize()
        reason = operation(problem.op).compare(problem, inputs, outputs).reason
        if reason is not None:
            return float("nan"), reason
        return median_us(partial(launcher.launch, inputs, outputs)), ""
    except RuntimeError as error:
        return float("nan"), f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


def cudnn_us(problem: Any) -> float:
    """bf16 on the same shapes."""
    q, k, v = operands(problem, seed=0)

    def call() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal)

    return median_us(call)


def row(problem: Any, config: Config, result: Any, us: float, reason: str) -> dict[str, Any]:
    """One line of the table, printed."""
    values = " ".join(f"{k}={v}" for k, v in config.as_dict().items())
    facts = result.facts[-1] if result.facts else None
    registers = f"{facts.registers:>4} {facts.spill_bytes:>5}" if facts else f"{'':>10}"
    rate = problem.flops / us / 1e6
    print(f"{us:>10.1f} {rate:>8.0f} {registers}  {config.template} {values}  {reason}", flush=True)
    return {
        "problem": problem.as_dict(),
        "template": config.template,
        "config": config.as_dict(),
        "us": us,
        "tflops": rate,
        "reason": reason,
    }


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["direct", "fp8_p"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dry-run", metavar="GPU", help="compile for this GPU, time nothing")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    device = gpu(arguments.dry_run) if arguments.dry_run else require_gpu()
    has_fp4 = device.compute_capability in FP4_TENSOR_CORES
    products = "native" if has_fp4 else "emulated"
    problems = [
        problem_of(mode, tokens, products=products, is_causal=arguments.causal)
        for mode in arguments.mode
        for tokens in arguments.tokens
    ]
    compiled = compile_all(problems, device)
    rows: list[dict[str, Any]] = []
    for problem in problems:
        print(f"{problem.mode} {problem.query_len} tokens, causal {problem.is_causal}")
        print(f"{'us':>10} {'TFLOP/s':>8} {'regs':>4} {'spill':>5}  config")
        if arguments.dry_run:
            for config in seeds_of(problem, device):
                result = compiled[problem, config]
                rows.append(row(problem, config, result, float("nan"), result.reason))
            continue
        inputs = operation(problem.op).make_inputs(problem, device="cuda", seed=0)
        outputs = operation(problem.op).make_outputs(problem, inputs)
        us = cudnn_us(problem)
        print(f"{us:>10.1f} {problem.flops / us / 1e6:>8.0f} {'':>10}  cudnn bf16")
        for config in seeds_of(problem, device):
            result = compiled[problem, config]
            us, reason = float("nan"), result.reason
            if result.facts:
                us, reason = measured(problem, config, inputs, outputs)
            rows.append(row(problem, config, result, us, reason))
        del inputs, outputs
        torch.cuda.empty_cache()
    if arguments.json:
        write_record(arguments.json, device, rows)


if __name__ == "__main__":
    main()
