#!/usr/bin/env python3
"""A covering sample of configs, each compiled and compared with the reference on a grid of batches.

In the sample every pair of values of two parameters that can occur together does, for each template
on a few families of problems, until there are as many configs as wanted; on the other families each
template has its default and its seeds. Configs share kernels as far as the pairs allow, and a
kernel is compiled once, on one of all cores; then one process of a few takes a config over the grid
(``covering_problems``), each batch twice. Counts by status are printed and written:

    python benchmarks/covering.py --budget-s 150 --json covering.json
    python benchmarks/covering.py --op gdn_chunk_fwd gdn_decode --budget-s 150 --json gdn.json

A run that was cut by its budget goes on where it was if the JSON is there, and what it says of
today's kernels counts towards the pairs. Making the sample takes a minute: ``--dry-run --sample
FILE`` makes it where no GPU is. ``--compile-only --gpu h200`` compiles without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from covering_problems import FAMILIES
from covering_run import Result, Run
from covering_sample import (
    Group,
    Item,
    in_turn,
    load_sample,
    sample,
    write_sample,
)
from side_by_side import require_gpu, write_record
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.search_spaces.covering import pairs_of
from tilescout.tuner import catalog
from tilescout.tuner.compile_pool import default_num_workers

_FAILED = ("runtime_error", "incorrect", "unrepeatable", "timeout", "crashed")
"""Fates that are a fault of the template; a config may well not compile or not fit."""


def earlier_results(path: Path | None, ops: Sequence[str]) -> list[Result]:
    """Results of an earlier run that are of these operations and of today's sources."""
    if path is None or not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    results = [Result(**row) for row in rows if row["op"] in ops]
    return [r for r in results if r.family in FAMILIES[r.op] and item_of(r).key == r.key]


def item_of(result: Result) -> Item:
    """The item that the result is of."""
    return Item(result.op, result.family, Config.of(result.template, result.config))


def print_counts(results: Sequence[Result], num_wanted: int) -> None:
    """Counts by template and status, then the faults."""
    statuses = sorted({r.status for r in results}, key=lambda s: (s != "ok", s))
    counts = Counter((r.op, r.template, r.status) for r in results)
    print(f"{'operation':<14} {'template':<17}", *(f"{s:>17}" for s in statuses), f"{'all':>8}")
    for op, name in sorted({(r.op, r.template) for r in results}):
        row = [counts[op, name, status] for status in statuses]
        print(f"{op:<14} {name:<17}", *(f"{count:>17}" for count in row), f"{sum(row):>8}")
    print(f"{len(results)} of {num_wanted} configs, {sum(r.status == 'ok' for r in results)} ok")
    faults = [r for r in results if r.status in _FAILED]
    for r in faults[:20]:
        values = " ".join(f"{k}={v}" for k, v in r.config.items())
        print(f"{r.status} {r.op}/{r.template} [{r.family}] {values}: {r.reason}")
    if len(faults) > 20:
        print(f"... and {len(faults) - 20} faults more")


def pair_counts(groups: Sequence[Group], results: Sequence[Result]) -> list[dict[str, object]]:
    """Of every sampled space: its pairs, and those that a config that is ok covers."""
    ok: dict[tuple[str, str, str], list[Config]] = {}
    for r in results:
        if r.status == "ok":
            ok.setdefault((r.op, r.family, r.template), []).append(item_of(r).config)
    counts: list[dict[str, object]] = []
    for group in (group for group in groups if group.num_pairs):
        names = group.op, group.family, group.template
        counts.append(
            {
                **dict(zip(("op", "family", "template"), names, strict=True)),
                "num_configs": len(group.configs),
                "num_pairs": group.num_pairs,
                "num_pairs_ok": len(set().union(*map(pairs_of, ok.get(names, ())))),
            }
        )
    return counts


def print_pairs(counts: Sequence[dict[str, object]]) -> None:
    """How many of the pairs of every group were seen in a config that is ok."""
    for c in counts:
        print(
            f"{c['op']!s:<14} {c['template']!s:<17} {c['family']!s:<26}"
            f"{c['num_pairs_ok']:>6} of {c['num_pairs']:>5} pairs in a config that is ok"
        )


def write_results(
    path: Path, device: DeviceSpec, groups: Sequence[Group], results: Sequence[Result], **extra: int
) -> None:
    """Writes counts, pairs, families and every result."""
    counts = Counter((r.op, r.template, r.status) for r in results)
    by_status = [
        {"op": op, "template": name, "status": status, "count": n}
        for (op, name, status), n in sorted(counts.items())
    ]
    ops = sorted({group.op for group in groups})
    write_record(
        path,
        device,
        [asdict(r) for r in results],
        counts=by_status,
        pairs=pair_counts(groups, results),
        families={op: FAMILIES[op] for op in ops},
        **extra,
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", nargs="+", choices=FAMILIES, default=["paged_decode"])
    parser.add_argument("--triton", type=int, default=800, help="configs of Triton templates")
    parser.add_argument("--tilelang", type=int, default=200, help="configs of TileLang templates")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="end in this time")
    parser.add_argument("--json", type=Path, help="write results here; go on with what is there")
    parser.add_argument("--sample", type=Path, help="the sample: read, or made and written")
    parser.add_argument("--gpu", help="SKU to compile for with --compile-only and --dry-run")
    parser.add_argument("--compile-only", action="store_true", help="launch nothing")
    parser.add_argument("--dry-run", action="store_true", help="only print the sample's sizes")
    parser.add_argument("--limit", type=int, help="only the first so many configs")
    parser.add_argument("--compilers", type=int, default=default_num_workers())
    parser.add_argument("--checkers", type=int, default=3, help="processes that share the GPU")
    return parser.parse_args()


def chosen_sample(
    arguments: argparse.Namespace, device: DeviceSpec, known: Sequence[Item]
) -> list[Group]:
    """The sample that ``--sample`` names, or a new one."""
    path: Path | None = arguments.sample
    groups: list[Group]
    if path is not None and path.exists():
        groups = load_sample(path, device)
        if {group.op for group in groups} != set(arguments.op):
            raise SystemExit(f"{path} is not a sample of {' and '.join(arguments.op)}")
        print(*groups, sep="\n", file=sys.stderr)
        return groups
    wanted = {"triton": arguments.triton, "tilelang": arguments.tilelang}
    groups = sample(arguments.op, device, wanted, known)
    if path is not None:
        write_sample(path, groups)
    return groups


def main() -> None:
    """Samples, compiles, checks, counts."""
    arguments = parse_arguments()
    start = time.monotonic()
    needs_gpu = not (arguments.compile_only or arguments.dry_run)
    device = require_gpu() if needs_gpu else catalog.gpu(arguments.gpu or "h200")
    earlier = earlier_results(arguments.json, arguments.op)
    groups = chosen_sample(arguments, device, [item_of(result) for result in earlier])
    sampled = {item.key for group in groups for item in group.items}
    results = [result for result in earlier if result.key in sampled]
    items = in_turn(groups, frozenset(r.key for r in results))[: arguments.limit]
    if arguments.dry_run:
        kernels = {key for item in items for key in item.specs}
        print(f"{len(sampled)} configs, {len(items)} to check, {len(kernels)} kernels to compile")
        return
    run = Run(
        device,
        num_compilers=arguments.compilers,
        num_checkers=0 if arguments.compile_only else arguments.checkers,
        deadline=min(start + arguments.budget_s, start + 86_400.0),
    )
    for result in run.results(items):
        results.append(result)
        if len(results) % 50 == 0:
            elapsed_s = time.monotonic() - start
            print(f"{len(results)} of {len(sampled)} after {elapsed_s:.0f} s", file=sys.stderr)
    print_counts(results, len(sampled))
    print_pairs(pair_counts(groups, results))
    print(f"{run.num_kernels} kernels compiled in {time.monotonic() - start:.0f} s")
    if arguments.json:
        extra = {"num_wanted": len(sampled), "num_kernels_compiled": run.num_kernels}
        write_results(arguments.json, device, groups, results, **extra)
    if any(result.status in _FAILED for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
