#!/usr/bin/env python3
"""Gated delta net without a tune: every seed of our templates, verified and timed.

    python benchmarks/gdn_seeds.py --rows "1x8192 16/32" --template tilelang
    python benchmarks/gdn_seeds.py --decode 1 64 256 --template triton tilelang --json seeds.json

Problems as in ``gdn.py``: rows are its prefill rows, states K first; decode updates states in
place, V first. Times are of CUDA graphs over copies of the inputs that together exceed L2; prefill
also shows the time of each part. Kernels are compiled on all cores first; a wrong config is listed
as such. With ``--dry-run`` it compiles for the named GPU and times nothing: no GPU is needed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gdn import ROWS, problem_of
from side_by_side import require_gpu, write_record
from tilescout.kernels.base import Config, Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.registry import module_of, operation, template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.timers import Call, CudaTimer

LAUNCHES, ROUNDS, MAX_COPIES = 16, 7, 16


def seeds_of(problem: Problem, device: DeviceSpec, templates: Sequence[str]) -> list[Config]:
    """Defaults and seeds of these templates."""
    spaces = joint_space(problem, device, templates).spaces
    return list(dict.fromkeys(c for s in spaces for c in (s.default, *s.valid_seeds())))


def compile_all(
    problems: Sequence[Problem], device: DeviceSpec, templates: Sequence[str]
) -> dict[tuple[Problem, Config], Any]:
    """What the compilers made of every problem's seeds."""
    with CompilePool() as pool:
        jobs = {
            (problem, config): pool.submit(
                *(problem.op, module_of(problem.op), config.template, problem, config, device.arch)
            )
            for problem in problems
            for config in seeds_of(problem, device, templates)
        }
        return {key: job.result() for key, job in jobs.items()}


def median_us(calls: Sequence[Call]) -> float:
    """Of graphs of a few launches each."""
    timer = CudaTimer(is_graph=True)
    for call in calls:
        call()
    run = timer.prepare(calls, max(LAUNCHES, len(calls)))
    run.enqueue()
    return statistics.median(timer.time_us([run] * ROUNDS))


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


def measured(problem: Problem, config: Config, pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Microseconds of the whole and of its parts, or what is wrong."""
    chosen = template(problem.op, config.template)
    try:
        reason = check(problem, config)
        if reason is not None:
            return {"reason": reason}
        launcher: Any = chosen.build(problem, config, pairs[0][0])
        whole = median_us([partial(launcher.launch, *pair) for pair in pairs])
        parts = {
            part.name: median_us([partial(launcher.launch_part, part.name, *p) for p in pairs])
            for part in chosen.parts(problem, config)
        }
    except RuntimeError as error:
        return {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    return {"us": whole, "parts_us": parts}


def row(problem: Problem, config: Config, result: Any, found: dict[str, Any]) -> dict[str, Any]:
    """One line of the table, printed."""
    facts = result.facts[-1] if result.facts else None
    registers = f"{facts.registers:>4} {facts.spill_bytes:>5}" if facts else f"{'':>10}"
    us = found.get("us", float("nan"))
    parts = " ".join(f"{name} {value:.1f}" for name, value in found.get("parts_us", {}).items())
    print(
        f"{us:>9.2f} {registers}  {config.template} {config}  {parts}{found.get('reason', '')}",
        flush=True,
    )
    return {
        "problem": problem.as_dict(),
        "template": config.template,
        "config": config.as_dict(),
        **found,
    }


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=[])
    parser.add_argument("--decode", nargs="*", type=int, default=[], metavar="BATCH")
    parser.add_argument("--template", nargs="+", default=["triton", "tilelang"])
    parser.add_argument("--dry-run", metavar="GPU", help="compile for this GPU, time nothing")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    device = gpu(arguments.dry_run) if arguments.dry_run else require_gpu()
    labels = [*arguments.rows, *map(str, arguments.decode)]
    problems = {label: problem_of(label, "KV" if label in ROWS else "VK") for label in labels}
    compiled = compile_all(list(problems.values()), device, arguments.template)
    rows: list[dict[str, Any]] = []
    for label, problem in problems.items():
        print(f"{label}\n{'us':>9} {'regs':>4} {'spill':>5}  config")
        pairs = [] if arguments.dry_run else copies_of(problem, device)
        for config in seeds_of(problem, device, arguments.template):
            result = compiled[problem, config]
            found = {"reason": result.reason}
            if result.facts and not arguments.dry_run:
                found = measured(problem, config, pairs)
            rows.append(row(problem, config, result, found))
        del pairs
        torch.cuda.empty_cache()
    if arguments.json:
        write_record(arguments.json, device, rows)


if __name__ == "__main__":
    main()
