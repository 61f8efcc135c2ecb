"""A program: compiles the defaults and seeds of Triton templates with the Triton that it finds.

Run with the folder of another Triton first in PYTHONPATH; prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import triton
from tilescout.errors import UnsupportedError
from tilescout.kernels import registry
from tilescout.kernels.base import Problem
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import catalog
from tilescout.tuner.compile_pool import compile_config

WORKLOADS = {
    "paged_decode": ("paged_decode_grid", "deepseek_mla", "paged_decode_nvfp4"),
    "gdn_decode": ("gdn_decode",),
    "gdn_chunk_fwd": ("gdn_chunk",),
    "fp4_attention_fwd": ("fp4_attention", "fp4_attention_emulated"),
    "fp4_attention_bwd": ("fp4_attention_bwd", "fp4_attention_bwd_emulated"),
}
"""The first problem of each serves."""
SKUS = ("h200", "b200", "rtx5090")


@dataclass(frozen=True)
class Outcome:
    """What became of one config."""

    workload: str
    template: str
    sku: str
    config: str
    is_default: bool
    status: str
    reason: str


def outcomes(op: str, skus: tuple[str, ...], *, only_defaults: bool) -> Iterator[Outcome]:
    """Every Triton template's default, and seeds, compiled for each SKU."""
    for workload in WORKLOADS[op]:
        problem = catalog.workload(workload).problems[0].problem
        for sku in skus:
            yield from _outcomes(workload, problem, sku, only_defaults=only_defaults)


def _outcomes(
    workload: str, problem: Problem, sku: str, *, only_defaults: bool
) -> Iterator[Outcome]:
    device = catalog.gpu(sku)
    try:
        spaces = joint_space(problem, device).spaces
    except UnsupportedError:
        return
    for space in spaces:
        template = registry.template(problem.op, space.template)
        if template.backend != "triton" or template.is_external:
            continue
        for config in space.valid_seeds()[: 1 if only_defaults else None]:
            found = compile_config(
                *(problem.op, registry.module_of(problem.op), space.template),
                *(problem, config, device.arch),
                reads_code=False,
            )
            yield Outcome(
                *(workload, space.template, sku, str(config), config == space.default),
                *(found.status.value, found.reason),
            )


def main() -> None:
    """Compiles and prints the Triton's version and all outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=WORKLOADS)
    parser.add_argument("--sku", nargs="+", default=SKUS)
    parser.add_argument("--only-defaults", action="store_true")
    arguments = parser.parse_args()
    found = outcomes(arguments.op, tuple(arguments.sku), only_defaults=arguments.only_defaults)
    json.dump({"triton": triton.__version__, "outcomes": [asdict(x) for x in found]}, sys.stdout)


if __name__ == "__main__":
    main()
