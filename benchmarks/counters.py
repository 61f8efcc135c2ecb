#!/usr/bin/env python3
"""What limits a winner: hardware counters of its kernels, read with Nsight Compute.

Each problem of a workload is launched once with the config that dispatch gives, under ``ncu``, with
L2 flushed before and the clocks left as they are. The table has one row a kernel.

    python benchmarks/counters.py paged_decode_suites --labels "skewed b64 kv32768" --db results.db

Percentages are of the peak that the hardware could sustain. ``stall`` names the two reasons for
which warps waited most, with the warps that waited for it at each issue.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METRICS = {
    "us": "gpu__time_duration.sum",
    "dram %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "L1 %": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "SM %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue %": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "tensor %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "active SM %": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "MB read": "dram__bytes_read.sum",
    "registers": "launch__registers_per_thread",
    "blocks": "launch__grid_size",
}
_STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALL_REASONS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "wait",
    "warpgroup_arrive",
    "gmma",
)
TIMEOUT_S = 240


def main() -> None:
    """Profiles each problem in a process of its own and prints the table."""
    args = parse_arguments()
    if args.launch is not None:
        launch(args.workload, args.launch, args.db)
        return
    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not on PATH: install Nsight Compute, which comes with CUDA")
    rows = []
    for label in args.labels or labels_of(args.workload):
        rows += profile(args.workload, label, args.db)
    if not rows:
        raise SystemExit("no kernel was profiled")
    import pandas as pd

    print(pd.DataFrame(rows).to_string(index=False))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", help="name of a workload")
    parser.add_argument("--labels", nargs="+", help="labels of its problems; default: all")
    parser.add_argument("--db", nargs="+", help="databases of winners; default: as dispatch")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--launch", metavar="LABEL", help=argparse.SUPPRESS)
    return parser.parse_args()


def labels_of(workload: str) -> list[str]:
    """Labels of the problems, in their order."""
    from tilescout.tuner import catalog

    return [entry.label for entry in catalog.workload(workload).problems]


def launch(workload: str, label: str, databases: Sequence[str] | None) -> None:
    """Launches the winner of one problem: twice to warm up, then once for the profiler."""
    import torch
    from tilescout.kernels.registry import operation, template
    from tilescout.tuner import catalog
    from tilescout.tuner.dispatch import current_snapshot
    from tilescout.tuner.environment import current_device

    problems = {entry.label: entry.problem for entry in catalog.workload(workload).problems}
    if label not in problems:
        raise SystemExit(f"{label!r} is no label of {workload}: {', '.join(problems)}")
    problem, device = problems[label], current_device()
    if device is None:
        raise SystemExit("counters need an NVIDIA GPU; see `tilescout env`")
    found = current_snapshot(databases).lookup(problem, device)
    op = operation(problem.op)
    inputs = op.make_inputs(problem, device="cuda", seed=0)
    outputs = op.make_outputs(problem, inputs)
    launcher = template(problem.op, found.config.template).build(problem, found.config, inputs)
    for _ in range(2):
        launcher.launch(inputs, outputs)
    torch.cuda.synchronize()
    print(f"{label}: {found.tier} {found.config}", file=sys.stderr)
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    launcher.launch(inputs, outputs)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def profile(workload: str, label: str, databases: Sequence[str] | None) -> list[dict[str, Any]]:
    """One row a kernel of the problem's winner; none, with the reason printed, if it fails."""
    stalls = [_STALLS.format(reason) for reason in STALL_REASONS]
    # Clocks are left alone: whoever shares the machine may rely on them.
    command = ["ncu", "--csv", "--page", "raw", "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--cache-control", "all"]
    command += ["--metrics", ",".join((*METRICS.values(), *stalls))]
    command += [sys.executable, __file__, workload, "--launch", label]
    command += ["--db", *databases] if databases else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    print(done.stderr.strip(), file=sys.stderr, flush=True)
    if done.returncode:
        print(f"{label}: ncu ended with {done.returncode}: {done.stdout[-500:]}", file=sys.stderr)
        return []
    return [{"problem": label, **row} for row in parse(done.stdout)]


def parse(output: str) -> list[dict[str, Any]]:
    """The rows in what ``ncu --csv --page raw`` printed, units brought to us and MB."""
    import pandas as pd

    start = output.find('"ID"')
    if start < 0:
        return []
    table = pd.read_csv(io.StringIO(output[start:]), dtype=str)
    units, kernels = table.iloc[0], table.iloc[1:]
    rows = []
    for _, kernel in kernels.iterrows():
        row: dict[str, Any] = {"kernel": kernel["Kernel Name"]}
        for name, metric in METRICS.items():
            if metric in kernel:
                row[name] = round(_number(kernel[metric]) * _scale(units[metric]), 2)
        waits = {
            reason: _number(kernel[metric])
            for reason in STALL_REASONS
            if (metric := _STALLS.format(reason)) in kernel
        }
        worst = sorted(waits, key=lambda reason: -waits[reason])[:2]
        row["stall"] = ", ".join(f"{reason} {waits[reason]:.1f}" for reason in worst)
        rows.append(row)
    return rows


def _number(text: str) -> float:
    """The figure; digits are in groups, and a metric that this GPU lacks is empty."""
    return float(text.replace(",", "")) if isinstance(text, str) else float("nan")


def _scale(unit: str) -> float:
    """To microseconds or megabytes from the unit that ncu chose."""
    scales = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
    scales |= {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}
    return scales.get(unit, 1.0)


if __name__ == "__main__":
    main()
