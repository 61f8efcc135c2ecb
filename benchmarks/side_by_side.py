"""What the benchmarks of operations share: equal inputs, verified outputs, contenders in turn.

Every contender gets the same copies of inputs and outputs, rotated so that L2 is cold; its launches
are captured in a CUDA graph; all contenders are timed in every round, so drift of the clocks meets
all alike; the median over the rounds counts. A baseline that cannot serve a problem, or is wrong on
it, is left out and its reason is printed and recorded; ours being wrong raises.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tilescout.errors import TilescoutError
from tilescout.kernels.base import Comparison, Config, Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.registry import operation, template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.dispatch import current_snapshot
from tilescout.tuner.environment import current_device, toolchain
from tilescout.tuner.finals import time_rounds
from tilescout.tuner.measure import MeasureSettings, count_copies, count_launches
from tilescout.tuner.timers import Call, CudaTimer

__all__ = [
    "DEFAULT",
    "DISPATCH",
    "OURS",
    "Baseline",
    "Cell",
    "LeftOutError",
    "require_gpu",
    "time_cell",
    "write_record",
]

NUM_ROUNDS = 30
OURS, DEFAULT, DISPATCH = "tilescout", "default", "dispatch"


@dataclass(frozen=True)
class Cell:
    """One problem with its copies of inputs and outputs."""

    problem: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    in_place: Sequence[tuple[Any, Any]] = ()
    """Copies whose outputs share what of the inputs is updated, for an operation that does that."""


Baseline = Callable[[Cell], Sequence[Call]]
"""Launches of somebody else's kernel on the data of a cell, one a copy."""


class LeftOutError(Exception):
    """The baseline does not serve this problem; the message is the reason."""


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
    rms_bounds: Mapping[str, float] | None = None,
    adjust_inputs: Callable[[list[Any]], list[Any]] | None = None,
    libraries: Collection[str] = (),
) -> dict[str, Any]:
    """Median microseconds of our winner, our default and the baselines, and what ours ran.

    Args:
        problem: what is timed.
        device: the GPU at hand.
        databases: of winners; None: as dispatch.
        baselines: by name, in the order they are timed.
        is_verified: baselines that verify their outputs themselves.
        rms_bounds: relative RMS error that a baseline may have where our bound is tighter than what
            its authors promise.
        adjust_inputs: makes the copies what all contenders can serve.
        libraries: external templates, which are not ours: what dispatch chooses with them is a
            contender of its own, ``DISPATCH``.
    """
    cell = _make_cell(problem, device, adjust_inputs)
    snapshot = current_snapshot(databases)
    found = snapshot.lookup(problem, device, without=frozenset(libraries))
    chosen = snapshot.lookup(problem, device)
    if chosen.config != found.config:
        baselines = {DISPATCH: partial(_dispatch_calls, chosen.config), **baselines}
        is_verified = {DISPATCH, *is_verified}
    cell, ours = _our_calls(cell, found.config, joint_space(problem, device).default)
    theirs, left_out = _usable_baselines(cell, baselines, is_verified, rms_bounds or {})
    for name, reason in left_out.items():
        print(f"{name} is left out of {problem}: {reason}", file=sys.stderr, flush=True)
    times = _time_contenders({**ours, **theirs})
    if libraries and chosen.config == found.config:
        times[DISPATCH] = times[OURS]
    return {
        "problem": problem.as_dict(),
        "config": found.config.as_dict(),
        "template": found.config.template,
        "dispatch_template": chosen.config.template,
        "tier": found.tier,
        "trial_id": found.trial_id,
        "us": times,
        "left_out": left_out,
        "tb_per_s": {name: problem.bytes_moved / us / 1e6 for name, us in times.items()},
        "num_rounds": NUM_ROUNDS,
    }


def _make_cell(
    problem: Problem,
    device: DeviceSpec,
    adjust_inputs: Callable[[list[Any]], list[Any]] | None,
) -> Cell:
    """Allocates as many copies as keep L2 cold, every variant of the inputs equally often."""
    op = operation(problem.op)
    held_before = torch.cuda.memory_allocated()
    first = op.make_inputs(problem, device="cuda", seed=0)
    copies = count_copies(
        bytes_moved=problem.bytes_moved,
        bytes_held=max(problem.bytes_moved, torch.cuda.memory_allocated() - held_before),
        l2_bytes=device.l2_bytes,
        free_bytes=torch.cuda.mem_get_info()[0],
        settings=MeasureSettings(),
        num_variants=problem.num_input_variants,
    )
    others = [op.make_inputs(problem, device="cuda", seed=seed) for seed in range(1, copies)]
    inputs = [first, *others]
    if adjust_inputs is not None:
        inputs = adjust_inputs(inputs)
    return Cell(problem, inputs, [op.make_outputs(problem, i) for i in inputs])


def _our_calls(
    cell: Cell, winner: Config, default: Config
) -> tuple[Cell, dict[str, Sequence[Call]]]:
    """Verified launches of our configs, in place where the operation may be, and the cell for that.

    Raises:
        TilescoutError: one is wrong.
    """
    configs = {OURS: winner, DEFAULT: default}
    ours: dict[str, Sequence[Call]] = {n: _config_calls(cell, c) for n, c in configs.items()}
    for name, calls in ours.items():
        _require_right(cell, name, calls)
    if operation(cell.problem.op).make_in_place is None:
        return cell, ours
    cell = replace(cell, in_place=_in_place_pairs(cell))
    return cell, {name: _in_place_calls(cell, config) for name, config in configs.items()}


def _config_calls(cell: Cell, config: Config) -> list[Call]:
    """Launches of one of our configs, one a copy."""
    launcher = template(cell.problem.op, config.template).build(
        cell.problem, config, cell.inputs[0]
    )
    return [partial(launcher.launch, i, o) for i, o in zip(cell.inputs, cell.outputs, strict=True)]


def _dispatch_calls(config: Config, cell: Cell) -> list[Call]:
    """Launches of what dispatch chose, a library's kernel: verified, then in place where ours are.

    Raises:
        LeftOutError: it is wrong.
    """
    op = operation(cell.problem.op)
    # A library may put memory of its own in the place of outputs, so these are nobody else's.
    own = Cell(cell.problem, cell.inputs, [op.make_outputs(cell.problem, i) for i in cell.inputs])
    calls = _config_calls(own, config)
    comparison = _run_once(own, calls)
    if not comparison.is_ok:
        raise LeftOutError(f"wrong: {comparison.reason}")
    return _in_place_calls(cell, config) if cell.in_place else calls


def _in_place_pairs(cell: Cell) -> list[tuple[Any, Any]]:
    make = operation(cell.problem.op).make_in_place
    assert make is not None
    return [make(cell.problem, i) for i in cell.inputs]


def _in_place_calls(cell: Cell, config: Config) -> list[Call]:
    """Launches of a config that update their inputs, as production has them."""
    launcher = template(cell.problem.op, config.template).build(
        cell.problem, config, cell.in_place[0][0]
    )
    calls: list[Call] = [partial(launcher.launch, i, o) for i, o in cell.in_place]
    for call in calls:
        call()  # outside any capture
    return calls


def _require_right(cell: Cell, name: str, calls: Sequence[Call]) -> None:
    comparison = _run_once(cell, calls)
    if not comparison.is_ok:
        raise TilescoutError(f"{name} is wrong on {cell.problem}: {comparison.reason}")


def _usable_baselines(
    cell: Cell,
    baselines: Mapping[str, Baseline],
    is_verified: Collection[str],
    rms_bounds: Mapping[str, float],
) -> tuple[dict[str, Sequence[Call]], dict[str, str]]:
    """Launches of the baselines that serve the problem and are right, and why the others are not.

    Args:
        cell: problem, inputs and outputs.
        baselines: by name.
        is_verified: those whose launches do not write ``cell.outputs`` and verify themselves.
        rms_bounds: see ``time_cell``.
    """
    usable: dict[str, Sequence[Call]] = {}
    left_out: dict[str, str] = {}
    for name, calls_of in baselines.items():
        try:
            calls = calls_of(cell)
            comparison = _run_once(cell, calls)
        except LeftOutError as error:
            left_out[name] = str(error)
            continue
        # Somebody else's library raises whatever it likes where it does not support a problem.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            left_out[name] = f"{type(error).__name__}: {lines[0][:200]}"
            continue
        is_close = comparison.relative_rms_error <= rms_bounds.get(name, 0.0)
        if comparison.is_ok or is_close or name in is_verified:
            usable[name] = calls
        else:
            left_out[name] = f"wrong: {comparison.reason}"
    return usable, left_out


def _time_contenders(contenders: Mapping[str, Sequence[Call]]) -> dict[str, float]:
    """Median microseconds of each contender; all have run before.

    Args:
        contenders: launches by name, one a copy.
    """
    timer, settings = CudaTimer(is_graph=True), MeasureSettings()
    runs = []
    for calls in contenders.values():
        rough_us = timer.time_us([timer.prepare(calls, len(calls))])[0]
        runs.append(timer.prepare(calls, count_launches(rough_us, len(calls), settings)))
    for run in runs:
        run.enqueue()
    samples_us = time_rounds(runs, timer, NUM_ROUNDS)
    return {
        name: statistics.median(samples)
        for name, samples in zip(contenders, samples_us, strict=True)
    }


def _run_once(cell: Cell, calls: Sequence[Call]) -> Comparison:
    """Runs every launch once and compares what the first wrote with the reference.

    Compilers load their code at the first launch, which no capture may contain.
    """
    for call in calls[1:]:
        call()
    cell.outputs[0].out.fill_(float("nan"))
    calls[0]()
    torch.cuda.synchronize()
    return operation(cell.problem.op).compare(cell.problem, cell.inputs[0], cell.outputs[0])


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
