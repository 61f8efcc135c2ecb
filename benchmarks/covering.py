#!/usr/bin/env python3
"""A covering sample of paged-decode configs, each compiled and compared with the reference.

In the sample every pair of values of two parameters that can occur together does, for each template
on each of a few families of problems; it is filled up at random. A config is compiled on all cores,
then one launcher of it serves full, ragged, skewed and nearly empty batches in turn (the jobs are
in ``covering_jobs``), twice each. Counts by status are printed and written:

    python benchmarks/covering.py --budget-s 200 --json covering.json

A run that was cut by its budget goes on where it was if the JSON is there. ``--dry-run`` prints the
sample's sizes; ``--compile-only --gpu h200`` compiles without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from covering_jobs import BATCH, check_config, length_mixes
from side_by_side import require_gpu, write_record
from tilescout.errors import UnsupportedError
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.covering import covering_sample
from tilescout.search_spaces.registry import joint_space
from tilescout.search_spaces.space import SearchSpace
from tilescout.tuner import catalog
from tilescout.tuner.compile_pool import CompilePool, default_num_workers
from tilescout.tuner.process_pool import JobCrashedError, JobTimeoutError, WorkerPool
from tilescout.tuner.records import TrialStatus

_SHAPE: Mapping[str, Any] = {"batch": BATCH, "kv_len": 2048, "dtype": "bfloat16"}
_HEADS = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    name: {**dict(zip(_HEADS, sizes, strict=True)), **fields}
    for name, sizes, fields in (
        ("llama", (16, 4, 128, 16), {}),
        ("group 8, page 1", (8, 1, 64, 1), {}),
        ("group 7, page 48", (14, 2, 128, 48), {"dtype": "float16"}),
        ("no groups, HND, page 256", (4, 4, 64, 256), {"kv_layout": "HND"}),
        ("fp8, window", (8, 2, 128, 64), {"kv_dtype": "float8_e4m3fn", "window_left": 699}),
        ("mla", (16, 1, 576, 64), {"head_dim_v": 512}),
    )
}
"""Problems by what sets them apart, all with the same mixes of lengths."""

CHECK_TIMEOUT_S = 60.0
_FAILED = ("runtime_error", "incorrect", "unrepeatable", "timeout", "crashed")
"""Fates that are a fault of the template; a config may well not compile or not fit."""


@dataclass(frozen=True)
class Item:
    """One config of the sample."""

    family: str
    config: Config

    @property
    def problem(self) -> PagedDecodeProblem:
        """The problem it is compiled for and checked on."""
        return PagedDecodeProblem.from_dict({**_SHAPE, **FAMILIES[self.family]})

    @property
    def key(self) -> str:
        """Equal where a result may be taken over: same problem, config and kernel source."""
        source = template("paged_decode", self.config.template).source_hash()
        return f"{self.problem.key()} {self.config.template} {self.config} {source}"


@dataclass
class Result:
    """What became of one config."""

    key: str
    family: str
    template: str
    config: dict[str, Any]
    status: str
    reason: str
    compile_s: float = 0.0


def sample(device: DeviceSpec, wanted: Mapping[str, int]) -> list[Item]:
    """The configs, templates and families taking turns, those that cover pairs first.

    Args:
        device: the GPU whose spaces are sampled.
        wanted: by backend; spaces are sampled one after the other until there are as many.
    """
    spaces: list[tuple[str, SearchSpace]] = []
    for family, fields in FAMILIES.items():
        try:
            joint = joint_space(PagedDecodeProblem.from_dict({**_SHAPE, **fields}), device)
        except UnsupportedError as error:
            print(f"{family}: {error}", file=sys.stderr)
            continue
        spaces += [(family, space) for space in joint.spaces]
    groups = []
    for backend, count in wanted.items():
        own = [s for s in spaces if template("paged_decode", s[1].template).backend == backend]
        groups += _groups(own, count)
    turns = itertools.zip_longest(*groups)
    return [item for turn in turns for item in turn if item is not None]


def _groups(spaces: Sequence[tuple[str, SearchSpace]], wanted: int) -> list[list[Item]]:
    """Covering samples of as many of the spaces as ``wanted`` takes, of about equal sizes."""
    groups: list[list[Item]] = []
    for seed, (family, space) in enumerate(spaces):
        if sum(map(len, groups)) >= wanted:
            break
        found = covering_sample(space, wanted // len(spaces), seed=seed)
        print(
            f"{family:<26}{space.template:<17}{len(found.configs):>5} configs, the first "
            f"{found.num_covering} cover {found.num_pairs} pairs; "
            f"{len(found.impossible)} pairs cannot be",
            file=sys.stderr,
        )
        groups.append([Item(family, config) for config in found.configs])
    return groups


class Run:
    """Compiles items on all cores and checks what compiled on the GPU, until a deadline."""

    def __init__(
        self, device: DeviceSpec, *, num_compilers: int, num_checkers: int, deadline: float
    ) -> None:
        """``num_checkers`` 0: what compiled is ok and nothing is launched."""
        self._device = device
        self._compilers = CompilePool(num_compilers)
        self._checkers = WorkerPool(num_checkers) if num_checkers else None
        self._deadline = deadline
        self._results: queue.Queue[Result] = queue.Queue()

    def results(self, items: Sequence[Item]) -> Iterator[Result]:
        """Results as they come; fewer than items where the deadline passes."""
        try:
            for item in items:
                self._compile(item)
            for _ in items:
                try:
                    yield self._results.get(timeout=max(0.0, self._deadline - time.monotonic()))
                except queue.Empty:
                    return
        finally:
            self._compilers.close()
            if self._checkers is not None:
                self._checkers.close()

    def _compile(self, item: Item) -> None:
        job = self._compilers.submit(
            "paged_decode",
            module_of("paged_decode"),
            item.config.template,
            item.problem,
            item.config,
            self._device.arch,
        )
        job.add_done_callback(partial(self._compiled, item))

    def _compiled(self, item: Item, job: Future[Any]) -> None:
        if job.cancelled():
            return
        if (error := job.exception()) is not None:
            self._put(item, TrialStatus.COMPILE_ERROR.value, f"{type(error).__name__}: {error}")
            return
        found = job.result()
        if found.status is not TrialStatus.OK or self._checkers is None:
            self._put(item, found.status.value, found.reason, found.compile_s)
            return
        try:
            check = self._checkers.submit(CHECK_TIMEOUT_S, check_config, item.problem, item.config)
        except AssertionError:
            return  # closed meanwhile
        check.add_done_callback(partial(self._checked, item, found.compile_s))

    def _checked(self, item: Item, compile_s: float, job: Future[tuple[str, str]]) -> None:
        if job.cancelled():
            return
        error = job.exception()
        if error is None:
            self._put(item, *job.result(), compile_s)
        elif isinstance(error, JobTimeoutError):
            self._put(item, TrialStatus.TIMEOUT.value, str(error), compile_s)
        elif isinstance(error, JobCrashedError):
            self._put(item, TrialStatus.CRASHED.value, str(error), compile_s)
        else:
            reason = f"{type(error).__name__}: {error}"
            self._put(item, TrialStatus.RUNTIME_ERROR.value, reason, compile_s)

    def _put(self, item: Item, status: str, reason: str, compile_s: float = 0.0) -> None:
        config = item.config
        self._results.put(
            Result(
                *(item.key, item.family, config.template, config.as_dict()),
                *(status, reason, compile_s),
            )
        )


def earlier_results(path: Path | None, items: Sequence[Item]) -> list[Result]:
    """Results of an earlier run that are about these items and these sources."""
    if path is None or not path.exists():
        return []
    keys = {item.key for item in items}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [Result(**row) for row in rows if row["key"] in keys]


def print_counts(results: Sequence[Result], num_wanted: int) -> None:
    """Counts by template and status, then the faults."""
    statuses = sorted({r.status for r in results}, key=lambda s: (s != "ok", s))
    counts = Counter((r.template, r.status) for r in results)
    print(f"{'template':<18}", *(f"{status:>17}" for status in statuses), f"{'all':>8}")
    for name in sorted({r.template for r in results}):
        row = [counts[name, status] for status in statuses]
        print(f"{name:<18}", *(f"{count:>17}" for count in row), f"{sum(row):>8}")
    print(f"{len(results)} of {num_wanted} configs, {sum(r.status == 'ok' for r in results)} ok")
    faults = [r for r in results if r.status in _FAILED]
    for r in faults[:20]:
        values = " ".join(f"{k}={v}" for k, v in r.config.items())
        print(f"{r.status} {r.template} [{r.family}] {values}: {r.reason}")
    if len(faults) > 20:
        print(f"... and {len(faults) - 20} faults more")


def write_results(path: Path, device: DeviceSpec, results: Sequence[Result], wanted: int) -> None:
    """Writes counts, mixes of lengths and every result."""
    counts = Counter((r.template, r.status) for r in results)
    by_status = [
        {"template": name, "status": status, "count": n}
        for (name, status), n in sorted(counts.items())
    ]
    write_record(
        path,
        device,
        [asdict(r) for r in results],
        counts=by_status,
        num_wanted=wanted,
        families={name: {**_SHAPE, **fields} for name, fields in FAMILIES.items()},
        lengths=length_mixes(int(_SHAPE["kv_len"])),
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--triton", type=int, default=900, help="configs of Triton templates")
    parser.add_argument("--tilelang", type=int, default=200, help="configs of TileLang templates")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="end in this time")
    parser.add_argument("--json", type=Path, help="write results here; go on with what is there")
    parser.add_argument("--gpu", help="SKU to compile for with --compile-only and --dry-run")
    parser.add_argument("--compile-only", action="store_true", help="launch nothing")
    parser.add_argument("--dry-run", action="store_true", help="only print the sample's sizes")
    parser.add_argument("--limit", type=int, help="only the first so many configs")
    parser.add_argument("--compilers", type=int, default=default_num_workers())
    parser.add_argument("--checkers", type=int, default=2, help="processes that share the GPU")
    return parser.parse_args()


def main() -> None:
    """Samples, compiles, checks, counts."""
    arguments = parse_arguments()
    start = time.monotonic()
    needs_gpu = not (arguments.compile_only or arguments.dry_run)
    device = require_gpu() if needs_gpu else catalog.gpu(arguments.gpu or "h200")
    wanted = {"triton": arguments.triton, "tilelang": arguments.tilelang}
    items = sample(device, wanted)[: arguments.limit]
    if arguments.dry_run:
        print(f"{len(items)} configs")
        return
    results = earlier_results(arguments.json, items)
    known = {result.key for result in results}
    run = Run(
        device,
        num_compilers=arguments.compilers,
        num_checkers=0 if arguments.compile_only else arguments.checkers,
        deadline=min(start + arguments.budget_s, start + 86_400.0),
    )
    for result in run.results([item for item in items if item.key not in known]):
        results.append(result)
        if len(results) % 50 == 0:
            print(f"{len(results)} of {len(items)}", file=sys.stderr, flush=True)
            if arguments.json:
                write_results(arguments.json, device, results, len(items))
    if arguments.json:
        write_results(arguments.json, device, results, len(items))
    print_counts(results, len(items))
    if any(result.status in _FAILED for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
