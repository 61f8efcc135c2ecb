#!/usr/bin/env python3
"""Gated delta net on the GPU at hand, prefill and decode: ours, FLA, FlashQLA and FlashInfer.

One run, all contenders in turn in every round, CUDA-graph replay, cold L2; ``side_by_side`` says
how they are timed, ``gdn_libraries`` how each library is called. Prefill: head dims 128, bf16, fp32
states before and after, log decay and beta given, keys of length one, a quarter of the heads
without decay. Decode: one token a sequence, 16 heads of q and k, 32 of v, head dims 128, bf16, fp32
state, gate and norm computed in the kernel; states lie in a pool and are found by slot index, or
with ``--batch-order`` one behind the other; they are updated in place, but by FLA, which returns
new ones.

    python benchmarks/gdn.py --db results.db --json gdn.json
    python benchmarks/gdn.py --rows "1x8192 16/32" "1x2048 16/48"
    python benchmarks/gdn.py --decode 1 64 --batch-order

``tilescout`` is the winner among our own templates, ``dispatch`` what a look-up gives with the
libraries as external templates. A library that is missing, fails or is wrong is a cell with its
reason. FLA tunes itself and FlashQLA compiles for minutes at first: fill their caches before, one
process a library and row on all cores (FLA's timings take turns), then time with the same folder:

    python benchmarks/gdn.py --fill-cache build/gdn_cache --budget-s 300
    python benchmarks/gdn.py --cache build/gdn_cache --db results.db --json gdn.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gdn_cache import FillTask, fill, use_cache, warm
from gdn_libraries import CHUNK_LIBRARIES, DECODE_LIBRARIES, in_batch_order, usable
from gdn_targets import (
    FASTEST,
    SAME_STATES,
    States,
    Target,
    best_of,
    decode_targets,
    prefill_targets,
)
from side_by_side import DEFAULT, DISPATCH, OURS, require_gpu, time_cell, write_record
from tilescout.kernels.base import Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_decode import GdnDecodeInputs, GdnDecodeProblem
from tilescout.kernels.registry import operation, template

# (lengths, heads of q and k, heads of v)
ROWS = {
    "1x32768 2/8": ((32768,), 2, 8),
    "1x8192 4/16": ((8192,), 4, 16),
    "1x32768 16/64": ((32768,), 16, 64),
    "1x8192 16/32": ((8192,), 16, 32),
    "4x8192 16/32": ((8192,) * 4, 16, 32),
    "8x1024 16/32": ((1024,) * 8, 16, 32),
    "2x16384 8/24": ((16384,) * 2, 8, 24),
    "1x2048 16/48": ((2048,), 16, 48),
}
BATCHES = (1, 4, 16, 64, 256)
_LIBRARIES = ("fla", "flash_qla", "flashinfer")
_FILL_ORDER = ("fla", "flash_qla", OURS, "flashinfer", "flashinfer_kv", "flashinfer_pool")


def prefill_problem(row: str, state_layout: str) -> GdnChunkProblem:
    """The problem of a row of the table."""
    lengths, heads, v_heads = ROWS[row]
    return GdnChunkProblem(
        *(len(lengths), sum(lengths), max(lengths), heads, v_heads, 128, 128, "bfloat16"),
        state_layout=state_layout,
    )


def decode_problem(batch: int, state_layout: str) -> GdnDecodeProblem:
    """The problem of a batch."""
    return GdnDecodeProblem(*(batch, 1, 16, 32, 128, 128, "bfloat16"), state_layout=state_layout)


def problem_of(label: str, state_layout: str) -> Problem:
    """The problem of a label of ``labels``."""
    if label in ROWS:
        return prefill_problem(label, state_layout)
    return decode_problem(int(label.removeprefix("decode ")), state_layout)


def labels(arguments: argparse.Namespace) -> list[str]:
    """What is timed: the rows, then the batches; everything where neither is named."""
    is_all = arguments.rows is None and arguments.decode is None
    rows = list(ROWS) if is_all else arguments.rows
    batches = BATCHES if is_all else arguments.decode
    rows = list(ROWS) if rows == [] else rows or []
    batches = list(BATCHES) if batches == [] else batches or []
    return [*rows, *(f"decode {batch}" for batch in batches)]


def layout_of(label: str, arguments: argparse.Namespace) -> str:
    """State layout of a label: as asked for, else what each table was measured with before."""
    return arguments.state_layout or ("KV" if label in ROWS else "VK")


def states_of(label: str, arguments: argparse.Namespace) -> States:
    """How a label's states lie; prefill has no pool."""
    is_kv = layout_of(label, arguments) == "KV"
    if label in ROWS or arguments.batch_order:
        return "KV" if is_kv else "VK"
    return "KV pool" if is_kv else "VK pool"


def time_label(label: str, device: DeviceSpec, arguments: argparse.Namespace) -> dict[str, Any]:
    """One line of the table; who failed is in ``left_out`` with the reason."""
    problem = problem_of(label, layout_of(label, arguments))
    known = CHUNK_LIBRARIES if label in ROWS else DECODE_LIBRARIES
    baselines, missing = usable(known, arguments.library)
    names = operation(problem.op).template_names
    libraries = [name for name in names if template(problem.op, name).is_external]
    states = states_of(label, arguments)
    reorder = arguments.batch_order and label not in ROWS
    try:
        row = time_cell(
            problem,
            device,
            arguments.db,
            baselines,
            is_verified=set(baselines),
            libraries=libraries,
            adjust_inputs=_in_batch_order if reorder else None,
        )
    # The table must not end with one line: what went wrong is in its place.
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {first[:300]}"
        row = {"problem": problem.as_dict(), "us": {}, "left_out": {OURS: reason}, "config": {}}
    row["left_out"] = {**missing, **row["left_out"]}
    return {"row": label, "states": states, **row}


def _in_batch_order(inputs: list[GdnDecodeInputs]) -> list[GdnDecodeInputs]:
    return [in_batch_order(i) for i in inputs]


def ratios_of(us: dict[str, float], states: States = "KV") -> dict[str, float | None]:
    """Times of libraries over ours, above 1 where ours is faster; None where one is missing.

    The look-up is compared with who takes the row's states as they are.
    """
    pairs = {
        "fla/ours": (("fla",), OURS),
        "fla,qla/ours": (("fla", "flash_qla"), OURS),
        "best/ours": (FASTEST, OURS),
        "best/dispatch": (SAME_STATES[states], DISPATCH),
    }
    found: dict[str, float | None] = {}
    for name, (theirs, mine) in pairs.items():
        best = best_of(us, theirs)
        found[name] = best / us[mine] if best is not None and mine in us else None
    return found


def print_row(row: dict[str, Any], columns: Sequence[str]) -> None:
    """Times and ratios; below them who is missing and why."""
    us = row["us"]
    figures = " ".join(f"{us[c]:>13.2f}" if c in us else f"{'-':>13}" for c in columns)
    ratios = " ".join(
        f"{'-':>{len(name)}}" if ratio is None else f"{ratio:>{len(name)}.2f}"
        for name, ratio in ratios_of(us, row["states"]).items()
    )
    config = " ".join(f"{k}={v}" for k, v in row["config"].items())
    used = f"{row.get('template', '')} {config} (dispatch: {row.get('dispatch_template', '-')})"
    print(f"{row['row']:>14} {figures} {ratios}  {used}", flush=True)
    for name, reason in row["left_out"].items():
        print(f"{'':>14}   {name} is missing: {reason}", flush=True)


def targets_of(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """Every target of what was timed."""
    prefill = [row for row in rows if row["row"] in ROWS]
    decode = [row for row in rows if row["row"] not in ROWS]
    found: list[Target] = []
    if prefill:
        times = {row["row"]: row["us"] for row in prefill}
        found += prefill_targets(times, prefill[0]["states"])
    if decode:
        batches = {row["problem"]["batch"]: row["us"] for row in decode}
        found += decode_targets(batches, decode[0]["states"])
    return found


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", nargs="*", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}; none: all")
    add("--decode", nargs="*", type=int, metavar="BATCH", help="batches; none: 1 4 16 64 256")
    add("--library", nargs="*", choices=_LIBRARIES, default=list(_LIBRARIES))
    add("--state-layout", choices=["KV", "VK"], help="default: KV in prefill, VK in decode")
    add("--batch-order", action="store_true", help="decode without slots; else a pool by slots")
    add("--db", action="append", help="database of winners; default: as dispatch")
    add("--json", type=Path, help="write everything here")
    add("--cache", type=Path, help="folder of the libraries' and compilers' caches")
    add("--fill-cache", type=Path, metavar="DIR", help="fill such a folder, time nothing")
    add("--budget-s", type=float, default=540.0, help="end of filling (default %(default)s)")
    add("--processes", type=int, help="that fill at once (default: the CPU cores)")
    add("--warm", nargs=2, metavar=("LIBRARY", "ROW"), help=argparse.SUPPRESS)
    return parser.parse_args()


def fill_cache(arguments: argparse.Namespace) -> int:
    """Fills the caches and prints what became of each task; returns how many failed."""
    tasks = []
    for label in labels(arguments):
        known = CHUNK_LIBRARIES if label in ROWS else DECODE_LIBRARIES
        found, missing = usable(known, arguments.library)
        for name, reason in missing.items():
            print(f"{name:>13} {label:>14}  missing: {reason}")
        layout = layout_of(label, arguments)
        tasks += [FillTask(name, label, layout) for name in (OURS, *found)]
    # What takes longest first.
    tasks.sort(key=lambda task: _FILL_ORDER.index(task.name))
    script = [sys.executable, str(Path(__file__).resolve())]
    databases = [word for db in arguments.db or () for word in ("--db", db)]
    num_failed: int = fill(
        [*script, *databases],
        tasks,
        arguments.fill_cache,
        budget_s=arguments.budget_s,
        num_processes=arguments.processes,
    )
    return num_failed


def main() -> None:
    """Fills caches, or times every row and batch, prints tables and targets, writes the JSON."""
    arguments = parse_arguments()
    folder = arguments.fill_cache or arguments.cache
    if folder:
        use_cache(folder)
    if arguments.warm:
        name, label = arguments.warm
        problem = problem_of(label, layout_of(label, arguments))
        known = CHUNK_LIBRARIES if label in ROWS else DECODE_LIBRARIES
        warm(name, problem, folder, arguments.db, known)
        return
    device = require_gpu()
    if arguments.fill_cache:
        raise SystemExit(1 if fill_cache(arguments) else 0)
    columns = [OURS, DEFAULT, DISPATCH, *DECODE_LIBRARIES, *CHUNK_LIBRARIES]
    columns = list(dict.fromkeys(columns))
    print(f"{'row':>14}", *(f"{name:>13}" for name in columns), *ratios_of({}), " ours")
    rows = []
    for label in labels(arguments):
        rows.append(time_label(label, device, arguments))
        print_row(rows[-1], columns)
        torch.cuda.empty_cache()
        if arguments.json:
            targets = [vars(target) for target in targets_of(rows)]
            write_record(arguments.json, device, rows, targets=targets)
    for target in targets_of(rows):
        print(target)


if __name__ == "__main__":
    main()
