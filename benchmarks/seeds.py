"""What benchmarks of seeds share: all are compiled at once, timed in turn, and have a line each.

They need no tune: what a template's space holds to be good is verified and timed as it is.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from side_by_side import require_gpu
from tilescout.kernels.base import Config, Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.registry import module_of
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import CompilePool, CompileResult
from tilescout.tuner.timers import Call, CudaTimer

__all__ = ["add_arguments", "chosen_device", "compile_all", "median_us", "print_seeds", "seeds_of"]

NUM_ROUNDS = 7
HEADING = f"{'us':>10} {'TFLOP/s':>8} {'regs':>4} {'spill':>5}  config"

Found = Mapping[str, Any]
"""``us`` and ``parts_us`` of a seed, or the ``reason`` why it has none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that all of them take."""
    parser.add_argument("--dry-run", metavar="GPU", help="compile for this GPU, time nothing")
    parser.add_argument("--json", type=Path, help="write everything here")


def chosen_device(arguments: argparse.Namespace) -> DeviceSpec:
    """The GPU that is named, or else the one at hand."""
    return gpu(arguments.dry_run) if arguments.dry_run else require_gpu()


def seeds_of(
    problem: Problem, device: DeviceSpec, templates: Sequence[str] | None = None
) -> list[Config]:
    """Defaults and seeds of these templates; None: of all."""
    spaces = joint_space(problem, device, templates).spaces
    return list(dict.fromkeys(c for s in spaces for c in (s.default, *s.valid_seeds())))


def compile_all(
    wanted: Iterable[tuple[Problem, Config]], device: DeviceSpec
) -> dict[tuple[Problem, Config], CompileResult]:
    """What the compilers made of each config; launchers then find the kernels on disk."""
    with CompilePool() as pool:
        jobs = {
            (problem, config): pool.submit(
                *(problem.op, module_of(problem.op), config.template, problem, config, device.arch)
            )
            for problem, config in wanted
        }
        return {key: job.result() for key, job in jobs.items()}


def median_us(calls: Sequence[Call], num_launches: int) -> float:
    """Of CUDA graphs of so many launches each, going round the calls."""
    timer = CudaTimer(is_graph=True)
    for call in calls:
        call()
    run = timer.prepare(calls, num_launches)
    run.enqueue()
    return statistics.median(timer.time_us([run] * NUM_ROUNDS))


def print_seeds(
    problem: Problem,
    configs: Sequence[Config],
    compiled: Mapping[tuple[Problem, Config], CompileResult],
    measure: Callable[[Config], Found] | None,
) -> list[dict[str, Any]]:
    """Prints a line for each config and returns what goes into the JSON.

    Args:
        problem: what they serve.
        configs: seeds.
        compiled: the compilers' results.
        measure: verifies and times a config on the GPU; None: nothing is timed.
    """
    rows = []
    for config in configs:
        result = compiled[problem, config]
        found: Found = {"reason": result.reason}
        if result.facts and measure is not None:
            found = _measured(measure, config)
        print(_line(problem, config, result, found), flush=True)
        values = {"template": config.template, "config": config.as_dict()}
        rows.append({"problem": problem.as_dict(), **values, **found})
    return rows


def _measured(measure: Callable[[Config], Found], config: Config) -> Found:
    try:
        return measure(config)
    except RuntimeError as error:
        return {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}


def _line(problem: Problem, config: Config, result: CompileResult, found: Found) -> str:
    facts = result.facts[-1] if result.facts else None
    registers = f"{facts.registers:>4} {facts.spill_bytes:>5}" if facts else f"{'':>10}"
    us = found.get("us", math.nan)
    times = f"{us:>10.2f} {problem.flops / us / 1e6:>8.1f}"
    parts = " ".join(f"{name} {value:.1f}" for name, value in found.get("parts_us", {}).items())
    return f"{times} {registers}  {config.template} {config}  {parts}{found.get('reason', '')}"
