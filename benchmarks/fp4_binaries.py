#!/usr/bin/env python3
"""What the seeds of FP4 attention compile to, as a Markdown table; needs no GPU.

Registers, spills, shared and tensor memory, instructions and the products found in the code, for
head dimension 128 without a causal mask. The table of docs/fp4_attention.md is its output.

    python benchmarks/fp4_binaries.py --gpu h200 b200 b300 rtx5090
"""

from __future__ import annotations

import argparse

from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.fp4_attention import Fp4AttentionFwdProblem
from tilescout.kernels.fp4_attention.mma_kinds import declared_kinds
from tilescout.kernels.fp4_attention.triton_template import FP4_TENSOR_CORES
from tilescout.kernels.registry import module_of
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import compile_config

COLUMNS = (
    *("SKU", "mode", "template", "rows x keys", "warps", "stages", "variant", "products"),
    *("registers", "spill bytes", "shared KiB", "tensor columns", "instructions", "in loop"),
)
VARIANTS = ("conversion", "dequantize", "load")
"""The parameter of a template that is not its tile, where it has one."""


def variant_of(config: Config) -> str:
    """The value of that parameter, or nothing."""
    return next((str(config[name]) for name in VARIANTS if name in config.as_dict()), "")


def head_of(
    problem: Fp4AttentionFwdProblem, config: Config, device: DeviceSpec
) -> tuple[str, str, str, str]:
    """The columns that need no compiler."""
    tile = f"{config['block_m']} x {config['block_n']}"
    return (device.sku, problem.mode, config.template, tile)


def problem_of(mode: str, device: DeviceSpec) -> Fp4AttentionFwdProblem:
    """What is compiled: no size but the head dimension is part of a kernel."""
    has_fp4 = device.compute_capability in FP4_TENSOR_CORES
    products = "native" if has_fp4 else "emulated"
    return Fp4AttentionFwdProblem(*(1, 24, 24, 8192, 8192, 128), mode=mode, products=products)


def row_of(problem: Fp4AttentionFwdProblem, config: Config, device: DeviceSpec) -> tuple[str, ...]:
    """One line of the table: the attention kernel of a config."""
    module = module_of(problem.op)
    arguments = (problem.op, module, config.template, problem, config, device.arch)
    result = compile_config(*arguments)
    head, variant = head_of(problem, config, device), variant_of(config)
    stages = str(config["num_stages"])
    if not result.facts:
        failure = f"{result.status}: {result.reason}"
        return (*head, "", stages, variant, failure, *[""] * 6)
    facts = result.facts[-1]
    # TileLang's waits are loops behind the code, which jump back over all of it.
    in_loop = "" if config.template.startswith("tilelang_") else str(facts.loop_instructions)
    return (
        *(*head, str(facts.threads_per_block // 32), stages, variant),
        ", ".join(sorted(declared_kinds(problem))),
        *(str(facts.registers), str(facts.spill_bytes), f"{facts.smem_bytes / 1024:.1f}"),
        *(str(facts.tmem_columns), str(facts.num_instructions), in_loop),
    )


def main() -> None:
    """Prints the table line by line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", nargs="+", default=["h200", "b200", "b300", "rtx5090"])
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for name in arguments.gpu:
        device = gpu(name)
        for mode in ("nvfp4", "direct", "fp8_p"):
            problem = problem_of(mode, device)
            for config in joint_space(problem, device).valid_seeds():
                print(f"| {' | '.join(row_of(problem, config, device))} |", flush=True)


if __name__ == "__main__":
    main()
