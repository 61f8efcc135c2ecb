#!/usr/bin/env python3
"""Paged decode on the GPU at hand: our winner, our untuned default and FlashInfer, in one run.

Suites of problems and what each is to reach are in ``paged_decode_suites``, FlashInfer's backends
in ``flashinfer_paged``; ``side_by_side`` says how contenders are timed. Pages lie in random order,
in the same order in every copy of the data.

    python benchmarks/paged_decode.py --suite grid skewed uniform one_head small_page group_8 \
        window fp8 --db results.db --json paged_decode.json

FlashInfer is optional: without it only ours is timed. It compiles a module at first use;
``--prepare`` compiles and loads what the suites need and times nothing. Bandwidth counts K, V, q
and the output once.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from paged_decode_suites import SUITES, TARGETS, SuiteCell, Target, cell_of
from side_by_side import DEFAULT, OURS, require_gpu, time_cell, write_record
from tilescout.errors import TilescoutError
from tilescout.kernels.device import DeviceSpec

BASELINE_NAMES = ("fa2", "fa2_tc", "fa2_tc_plain", "persistent", "xqa")
Rows = Mapping[str, Mapping[str, Any]]
"""Rows of one suite by label."""


def best_baseline(row: Mapping[str, Any]) -> tuple[str, float]:
    """Name and microseconds of the fastest baseline; NaN without one."""
    theirs = {name: us for name, us in row["us"].items() if name not in (OURS, DEFAULT)}
    return min(theirs.items(), key=lambda item: item[1], default=("none", float("nan")))


def reached(target: Target, rows: Rows) -> float | None:
    """The ratio that the target bounds; None where a cell it needs was not timed."""
    labels = target.cells or tuple(c.label for c in SUITES[target.suite] if c.has_baselines)
    if any(label not in rows for label in (*labels, *target.against)):
        return None
    ours: list[float] = [rows[label]["us"][OURS] for label in labels]
    if target.against:
        others: list[float] = [rows[label]["us"][OURS] for label in target.against]
    else:
        others = [best_baseline(rows[label])[1] for label in labels]
    ratios = [other / own for other, own in zip(others, ours, strict=True)]
    if any(map(math.isnan, ratios)):
        return None
    if target.is_upper:
        return max(1 / ratio for ratio in ratios)
    return min(ratios) if target.statistic == "least" else statistics.geometric_mean(ratios)


def judge_targets(suite: str, rows: Rows) -> list[dict[str, Any]]:
    """What each target of the suite asks and what was reached."""
    judged = []
    for target in TARGETS:
        if target.suite != suite:
            continue
        value = reached(target, rows)
        is_met = value is not None and (
            value <= target.bound if target.is_upper else value >= target.bound
        )
        judged.append(
            {
                "words": target.words,
                "bound": target.bound,
                "is_upper": target.is_upper,
                "reached": value,
                "is_met": is_met,
            }
        )
    return judged


def print_suite(suite: str, rows: Rows, baselines: Sequence[str]) -> None:
    """One line a cell: microseconds, bandwidth of ours, ratios to ours; then the targets."""
    names = [OURS, DEFAULT, *baselines]
    width = max([12, *map(len, rows)])
    print(f"\n{suite:<{width}}", *(f"{n.removeprefix('flashinfer:'):>12}" for n in names), end="")
    print(f"{'TB/s':>7}{'default/':>10}{'best/':>8}  tier   config")
    for label, row in rows.items():
        us = row["us"]
        print(
            f"{label:<{width}}", *(f"{us.get(name, float('nan')):>12.2f}" for name in names), end=""
        )
        print(f"{row['tb_per_s'][OURS]:>7.2f}{us[DEFAULT] / us[OURS]:>10.3f}", end="")
        print(
            f"{best_baseline(row)[1] / us[OURS]:>8.3f}  {row['tier']:<6} {row['template']} ", end=""
        )
        print(" ".join(f"{k}={v}" for k, v in row["config"].items()), flush=True)
    for judged in judge_targets(suite, rows):
        value = judged["reached"]
        relation = "at most" if judged["is_upper"] else "at least"
        got = "not measured" if value is None else f"reached {value:.3f}"
        verdict = "" if value is None else "  met" if judged["is_met"] else "  MISSED"
        print(f"  {judged['words']}: target {relation} {judged['bound']:.2f}, {got}{verdict}")


def available_baselines(wanted: Sequence[str]) -> list[str]:
    """The baselines that can run here; says which cannot."""
    try:
        import flashinfer
    except ImportError as error:
        print(f"FlashInfer is not timed: {error}", file=sys.stderr)
        return []
    print(f"FlashInfer {flashinfer.__version__}", file=sys.stderr)
    return [f"flashinfer:{name}" for name in wanted]


def prepare(cells: Sequence[SuiteCell]) -> None:
    """Compiles and loads the modules of FlashInfer that the cells need."""
    from flashinfer_modules import build_modules

    for spec in build_modules([cell.problem for cell in cells if cell.has_baselines]):
        spec.build_and_load()
    print("all modules load", file=sys.stderr)


def time_one(
    cell: SuiteCell, device: DeviceSpec, databases: Sequence[str] | None, names: Sequence[str]
) -> dict[str, Any]:
    """The row of one cell."""
    from flashinfer_paged import BASELINES, rms_bounds, with_equal_tables

    theirs = {name: BASELINES[name] for name in names} if cell.has_baselines else {}
    try:
        row: dict[str, Any] = time_cell(
            cell.problem,
            device,
            databases,
            theirs,
            rms_bounds=rms_bounds(cell.problem),
            adjust_inputs=with_equal_tables,
        )
        return row
    finally:
        torch.cuda.empty_cache()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, nargs="+", default=["grid"])
    parser.add_argument(
        "--problem",
        action="append",
        metavar="FIELD=VALUE,...",
        help="a problem of your own in place of the suites; fields left out are those of the grid",
    )
    parser.add_argument("--db", action="append", help="database of winners; default: as dispatch")
    parser.add_argument("--baseline", choices=BASELINE_NAMES, nargs="*", default=BASELINE_NAMES)
    parser.add_argument("--prepare", action="store_true", help="only build FlashInfer's modules")
    parser.add_argument("--list", action="store_true", help="print the cells and targets, and end")
    parser.add_argument("--json", type=Path, help="write everything here, after every cell anew")
    return parser.parse_args()


def wanted_cells(arguments: argparse.Namespace) -> dict[str, tuple[SuiteCell, ...]]:
    """Cells by suite; problems of one's own are the suite ``own``."""
    if not arguments.problem:
        return {suite: SUITES[suite] for suite in arguments.suite}
    own: list[SuiteCell] = []
    for text in arguments.problem:
        fields = dict(pair.partition("=")[::2] for pair in text.split(","))
        own.append(cell_of(fields, prefix=f"{len(own)} "))
    return {"own": tuple(own)}


def list_cells(suites: Mapping[str, Sequence[SuiteCell]]) -> None:
    """Prints what would be timed."""
    for suite, cells in suites.items():
        for cell in cells:
            print(f"{suite:<12}{cell.label:<20}{cell.problem}")
        for judged in judge_targets(suite, {}):
            relation = "at most" if judged["is_upper"] else "at least"
            print(f"{suite:<12}target: {judged['words']} {relation} {judged['bound']}")


def main() -> None:
    """Times every cell, prints tables and targets, writes the JSON."""
    arguments = parse_arguments()
    try:
        suites = wanted_cells(arguments)
    except TilescoutError as error:
        raise SystemExit(str(error)) from None
    if arguments.list:
        list_cells(suites)
        return
    device = require_gpu()
    names = available_baselines(arguments.baseline)
    if arguments.prepare:
        if not names:
            raise SystemExit("nothing to prepare")
        prepare([cell for cells in suites.values() for cell in cells])
        return
    records: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    has_failed = False
    for suite, cells in suites.items():
        rows: dict[str, dict[str, Any]] = {}
        for cell in cells:
            try:
                row = time_one(cell, device, arguments.db, names)
            except TilescoutError as error:
                has_failed = True
                print(f"{suite} {cell.label} has no row: {error}", file=sys.stderr, flush=True)
                continue
            rows[cell.label] = row
            records.append({"suite": suite, "label": cell.label, **row})
            print(f"{suite} {cell.label} done", file=sys.stderr, flush=True)
            summary[suite] = judge_targets(suite, rows)
            if arguments.json:
                write_record(arguments.json, device, records, summary=summary)
        print_suite(suite, rows, names)
    if has_failed:
        raise SystemExit("some cells have no row")


if __name__ == "__main__":
    main()
