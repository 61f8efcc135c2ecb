#!/usr/bin/env python3
"""Gated delta net without a tune: every seed of our templates, verified and timed.

    python benchmarks/gdn_seeds.py --rows "1x8192 16/32" --template tilelang
    python benchmarks/gdn_seeds.py --decode 1 64 256 --template triton tilelang --json seeds.json
    python benchmarks/gdn_seeds.py --rows "1x8192 16/32" --intra-variants

Problems as in ``gdn.py``: rows are its prefill rows, states K first; decode updates states in
place, V first. Times are of CUDA graphs over copies of the inputs that together exceed L2; prefill
also shows the time of each part. Kernels are compiled on all cores first; a wrong config is listed
as such. With ``--intra-variants`` rows time the Triton kernel that inverts chunks, in all variants
that have a chance, before one and the same scan. With ``--dry-run`` it compiles for the named GPU
and times nothing: no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from gdn import ROWS, problem_of
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
from tilescout.kernels.base import Config, ParameterValue, Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.registry import operation, template
from tilescout.search_spaces.registry import joint_space

LAUNCHES, MAX_COPIES = 16, 16

INTRA_FORMS = (("inverse", "stored"), ("wy", "stored"))
"""Form and scores of a variant of the kernel ``intra``."""
WHOLE: Mapping[str, ParameterValue] = {
    **{"intra_tile": "chunk", "intra_block_k": 64, "intra_num_warps": 4, "intra_num_stages": 2},
    **{"inverse_gate": "free", "intra_maxnreg": 255},
}


def _blocks(
    block_k: int, num_stages: int, maxnreg: int, precision: str = "fp16"
) -> Mapping[str, ParameterValue]:
    return {
        "intra_tile": "blocks",
        "intra_block_k": block_k,
        "intra_num_warps": 1,
        "intra_num_stages": num_stages,
        "intra_maxnreg": maxnreg,
        "inverse_precision": precision,
    }


INTRA_VARIANTS: tuple[Mapping[str, ParameterValue], ...] = (
    {**WHOLE, "inverse": "substitution", "inverse_precision": "tf32"},
    {**WHOLE, "inverse": "doubling", "inverse_precision": "fp16"},
    _blocks(32, 2, 255),
    _blocks(32, 1, 255),
    _blocks(32, 3, 255),
    _blocks(32, 2, 168),
    _blocks(16, 3, 255),
    _blocks(16, 3, 128),
    _blocks(64, 2, 255),
    _blocks(32, 2, 255, "tf32"),
)
"""Parameters of the kernel ``intra``; what is not named is as in the default config."""


def copies_of(problem: Problem, device: DeviceSpec) -> list[tuple[Any, Any]]:
    """Inputs and outputs, in place where the operation is, that do not stay in L2."""
    found = operation(problem.op)
    count = min(MAX_COPIES, -(-3 * device.l2_bytes // problem.bytes_moved))
    pairs = []
    for seed in range(count):
        inputs = found.make_inputs(problem, device="cuda", seed=seed)
        if found.make_in_place is None:
            pairs.append((inputs, found.make_outputs(problem, inputs)))
        else:
            pairs.append(found.make_in_place(problem, inputs))
    return pairs


def check(problem: Problem, config: Config) -> str | None:
    """What is wrong on ragged inputs."""
    found = operation(problem.op)
    inputs = found.make_validation_inputs(problem, device="cuda", seed=1)
    outputs = found.make_outputs(problem, inputs)
    template(problem.op, config.template).build(problem, config, inputs).launch(inputs, outputs)
    torch.cuda.synchronize()
    return found.compare(problem, inputs, outputs).reason


def intra_variants(problem: Problem, device: DeviceSpec) -> list[Config]:
    """The fused scan behind every variant of the kernel that inverts chunks."""
    space = joint_space(problem, device, ["triton"]).spaces[0]
    found = []
    for form, scores in INTRA_FORMS:
        for variant in INTRA_VARIANTS:
            shared = {"algorithm": "fused", "form": form, "scores": scores}
            values = {**space.default.as_dict(), **shared, **variant}
            active = {p.name for p in space.active_parameters(values)}
            config = Config.of("triton", {n: v for n, v in values.items() if n in active})
            if space.check(config) is None:
                found.append(config)
    return found


def own_templates(op: str) -> list[str]:
    """The templates of the operation that are not libraries."""
    return [name for name in operation(op).template_names if not template(op, name).is_external]


def measured(
    problem: Problem, pairs: Sequence[tuple[Any, Any]], only: str | None, config: Config
) -> Mapping[str, Any]:
    """Microseconds of the whole and of its parts, or of one part only, or what is wrong."""
    reason = check(problem, config)
    if reason is not None:
        return {"reason": reason}
    chosen = template(problem.op, config.template)
    launcher: Any = chosen.build(problem, config, pairs[0][0])
    timed = partial(median_us, num_launches=max(LAUNCHES, len(pairs)))
    for pair in pairs:
        launcher.launch(*pair)
    if only is not None:
        return {"us": timed([partial(launcher.launch_part, only, *pair) for pair in pairs])}
    us = timed([partial(launcher.launch, *pair) for pair in pairs])
    # Parts read what the whole has left.
    parts = {
        part.name: timed([partial(launcher.launch_part, part.name, *pair) for pair in pairs])
        for part in chosen.parts(problem, config)
    }
    return {"us": us, "parts_us": parts}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=[])
    parser.add_argument("--decode", nargs="*", type=int, default=[], metavar="BATCH")
    parser.add_argument("--intra-variants", action="store_true", help="of rows, instead of seeds")
    parser.add_argument("--template", nargs="+", help="of the operation; default: all of ours")
    add_arguments(parser)
    arguments = parser.parse_args()
    device = chosen_device(arguments)
    labels = [*arguments.rows, *map(str, arguments.decode)]
    seeds = {
        label: (
            problem,
            intra_variants(problem, device)
            if arguments.intra_variants and label in ROWS
            else seeds_of(problem, device, arguments.template or own_templates(problem.op)),
        )
        for label in labels
        for problem in [problem_of(label, "KV" if label in ROWS else "VK")]
    }
    compiled = compile_all(((p, c) for p, configs in seeds.values() for c in configs), device)
    rows: list[dict[str, Any]] = []
    for label, (problem, configs) in seeds.items():
        print(f"{label}\n{HEADING}")
        measure = None
        if not arguments.dry_run:
            only = "intra" if arguments.intra_variants and label in ROWS else None
            measure = partial(measured, problem, copies_of(problem, device), only)
        rows += print_seeds(problem, configs, compiled, measure)
        del measure
        torch.cuda.empty_cache()
    if arguments.json:
        write_record(arguments.json, device, rows)


if __name__ == "__main__":
    main()
