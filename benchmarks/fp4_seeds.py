#!/usr/bin/env python3
"""FP4 attention forward without a tune: every seed of every template, verified and timed.

    python benchmarks/fp4_seeds.py --mode direct fp8_p --tokens 16384 --json fp4_seeds.json

16 heads of 128 dimensions, products as in ``fp4_attention.py``. Kernels are compiled on all cores
first; a config that is wrong is listed as such. ``cudnn`` is torch's scaled dot-product attention
in bf16. With ``--dry-run`` it compiles for the named GPU and times nothing: no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from fp4_attention import MODES, operands, problem_of
from seeds import (
    HEADING,
    add_arguments,
    chosen_device,
    compile_all,
    median_us,
    print_seeds,
    seeds_of,
)
from side_by_side import write_record
from tilescout.kernels.base import Config
from tilescout.kernels.fp4_attention import Fp4AttentionFwdProblem
from tilescout.kernels.fp4_attention.triton_template import FP4_TENSOR_CORES
from tilescout.kernels.registry import operation, template
from torch.nn.attention import SDPBackend, sdpa_kernel

LAUNCHES = 4


def measured(
    problem: Fp4AttentionFwdProblem, inputs: Any, outputs: Any, config: Config
) -> Mapping[str, Any]:
    """Microseconds, or what is wrong."""
    launcher = template(problem.op, config.template).build(problem, config, inputs)
    outputs.out.fill_(float("nan"))
    launcher.launch(inputs, outputs)
    torch.cuda.synchronize()
    reason = operation(problem.op).compare(problem, inputs, outputs).reason
    if reason is not None:
        return {"reason": reason}
    us = median_us([partial(launcher.launch, inputs, outputs)], LAUNCHES)
    return {"us": us, "tflops": problem.flops / us / 1e6}


def print_cudnn(problem: Fp4AttentionFwdProblem) -> None:
    """A line of bf16 on the same shapes."""
    q, k, v = operands(problem, seed=0)

    def call() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal)

    us = median_us([call], LAUNCHES)
    print(f"{us:>10.2f} {problem.flops / us / 1e6:>8.1f} {'':>10}  cudnn bf16")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["direct", "fp8_p"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--causal", action="store_true")
    add_arguments(parser)
    arguments = parser.parse_args()
    device = chosen_device(arguments)
    has_fp4 = device.compute_capability in FP4_TENSOR_CORES
    products = "native" if has_fp4 else "emulated"
    problems = [
        problem_of(mode, tokens, products=products, is_causal=arguments.causal)
        for mode in arguments.mode
        for tokens in arguments.tokens
    ]
    compiled = compile_all(((p, c) for p in problems for c in seeds_of(p, device)), device)
    rows: list[dict[str, Any]] = []
    for problem in problems:
        print(f"{problem.mode} {problem.query_len} tokens, causal {problem.is_causal}\n{HEADING}")
        measure = None
        if not arguments.dry_run:
            inputs = operation(problem.op).make_inputs(problem, device="cuda", seed=0)
            outputs = operation(problem.op).make_outputs(problem, inputs)
            print_cudnn(problem)
            measure = partial(measured, problem, inputs, outputs)
            del inputs, outputs
        rows += print_seeds(problem, seeds_of(problem, device), compiled, measure)
        del measure
        torch.cuda.empty_cache()
    if arguments.json:
        write_record(arguments.json, device, rows)


if __name__ == "__main__":
    main()
