"""What the benchmarks of operations share: equal inputs, verified outputs, contenders in turn.

Every contender gets the same copies of inputs and outputs, rotated so that L2 is cold; its launches
are captured in a CUDA graph; all contenders are timed in every round, so drift of the clocks meets
all alike; the median over the rounds counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tilescout.errors import TilescoutError
from tilescout.kernels.base import Config, Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.registry import operation, template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.dispatch import lookup
from tilescout.tuner.environment import current_device, toolchain
from tilescout.tuner.finals import time_rounds
from tilescout.tuner.measure import MeasureSettings, count_copies, count_launches
from tilescout.tuner.timers import Call, CudaTimer

__all__ = [
    "DEFAULT",
    "OURS",
    "Baseline",
    "Cell",
    "require_gpu",
    "time_cell",
    "write_record",
]

NUM_ROUNDS = 30
OURS, DEFAULT = "tilescout", "default"


@dataclass(frozen=True)
class Cell:
    """One problem with its copies of inputs and outputs."""

    problem: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]


Baseline = Callable[[Cell], Sequence[Call]]
"""Launches of somebody else's kernel on the data of a cell, one a copy."""


def require_gpu() -> DeviceSpec:
    """The GPU at hand; ends the program where there is none."""
    device = current_device()
    if device is None:
        raise SystemExit("this benchmark needs an NVIDIA GPU; see `tilescout env`")
    return device


def time_cell(
    problem: Problem,
    device: DeviceSpec,
    databases: Sequence[str] | None,
    baselines: Mapping[str, Baseline],
    *,
    is_verified: Collection[str] = (),
) -> dict[str, Any]:
    """Median microseconds of our winner, our default and the baselines, and what ours ran.

    Args:
        problem: what is timed.
        device: the GPU at hand.
        databases: of winners; None: as dispatch.
        baselines: by name, in the order they are timed.
        is_verified: baselines that verify their outputs themselves.
    """
    cell = _make_cell(problem, device)
    found = lookup(problem, gpu=device, databases=databases)
    contenders: dict[str, Sequence[Call]] = {
        OURS: _config_calls(cell, found.config),
        DEFAULT: _config_calls(cell, joint_space(problem, device).default),
        **{name: calls_of(cell) for name, calls_of in baselines.items()},
    }
    times = _time_contenders(cell, contenders, is_verified=is_verified)
    return {
        "problem": problem.as_dict(),
        "config": found.config.as_dict(),
        "tier": found.tier,
        "trial_id": found.trial_id,
        "us": times,
        "tb_per_s": {name: problem.bytes_moved / us / 1e6 for name, us in times.items()},
        "num_rounds": NUM_ROUNDS,
    }


def _make_cell(problem: Problem, device: DeviceSpec) -> Cell:
    """Allocates as many copies as keep L2 cold."""
    op = operation(problem.op)
    copies = count_copies(
        bytes_moved=problem.bytes_moved,
        bytes_held=problem.bytes_moved,
        l2_bytes=device.l2_bytes,
        free_bytes=torch.cuda.mem_get_info()[0],
        settings=MeasureSettings(),
    )
    inputs = [op.make_inputs(problem, device="cuda", seed=seed) for seed in range(copies)]
    return Cell(problem, inputs, [op.make_outputs(problem, i) for i in inputs])


def _config_calls(cell: Cell, config: Config) -> list[Call]:
    """Launches of one of our configs, one a copy."""
    launcher = template(cell.problem.op, config.template).build(
        cell.problem, config, cell.inputs[0]
    )
    return [partial(launcher.launch, i, o) for i, o in zip(cell.inputs, cell.outputs, strict=True)]


def _time_contenders(
    cell: Cell,
    contenders: Mapping[str, Sequence[Call]],
    *,
    is_verified: Collection[str],
) -> dict[str, float]:
    """Median microseconds of each contender, after its output was verified.

    Args:
        cell: problem, inputs and outputs.
        contenders: launches by name, one a copy.
        is_verified: those whose launches do not write ``cell.outputs`` and were verified before.

    Raises:
        TilescoutError: an output is wrong.
    """
    timer, settings = CudaTimer(is_graph=True), MeasureSettings()
    runs = []
    for name, calls in contenders.items():
        _run_once(cell, name, calls, is_compared=name not in is_verified)
        rough_us = timer.time_us([timer.prepare(calls, len(calls))])[0]
        runs.append(timer.prepare(calls, count_launches(rough_us, len(calls), settings)))
    for run in runs:
        run.enqueue()
    samples_us = time_rounds(runs, timer, NUM_ROUNDS)
    return {
        name: statistics.median(samples)
        for name, samples in zip(contenders, samples_us, strict=True)
    }


def _run_once(cell: Cell, name: str, calls: Sequence[Call], *, is_compared: bool) -> None:
    """Runs every launch once and compares what the first wrote with the reference.

    Compilers load their code at the first launch, which no capture may contain.
    """
    for call in calls[1:]:
        call()
    cell.outputs[0].out.fill_(float("nan"))
    calls[0]()
    torch.cuda.synchronize()
    if not is_compared:
        return
    op = operation(cell.problem.op)
    comparison = op.compare(cell.problem, cell.inputs[0], cell.outputs[0])
    if not comparison.is_ok:
        raise TilescoutError(f"{name} is wrong on {cell.problem}: {comparison.reason}")


def write_record(
    path: Path, device: DeviceSpec, rows: Sequence[Mapping[str, Any]], **extra: Any
) -> None:
    """Writes the rows with device, date and versions as JSON."""
    record = {
        "gpu": device.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "toolchain": toolchain(with_driver=True).as_dict(),
        **extra,
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
