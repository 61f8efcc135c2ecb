"""Host time of look-ups, operation calls and launches: what a call costs beside its kernel.

On a GPU one compiled kernel is launched in every way, in rounds that take every contender in turn,
one call after the other without waiting: its launcher object called directly, kernel[grid],
@triton.autotune, the public function, its operator. Without a GPU, kernels are replaced by ones
that do nothing: what is left is host time of Python on this CPU, and no target of calls is judged.
Each target is printed with what was measured and whether it is met.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import tilescout
import torch
import triton
from dispatch_calls import Contenders, Workbench, stand_in_kernels
from tilescout.kernels.base import canonical_json
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.ops.on_device import device_spec
from tilescout.search_spaces.registry import space_of
from tilescout.tuner import dispatch
from tilescout.tuner.dispatch import Snapshot

PHASES = ("import", "lookup", "snapshot", "gdn", "paged", "split", "others")
NUM_ROUNDS = 40
CALLS_A_ROUND = 100
IMPORT_RUNS = 3
LARGE = 100_000
NOT_LOADED = ("optuna", "sqlalchemy", "alembic", "pandas", "sklearn")


@dataclass(frozen=True)
class Measured:
    """Host time of one contender."""

    phase: str
    contender: str
    median_us: float
    least_us: float


@dataclass(frozen=True)
class Target:
    """What is to be reached, and what was."""

    what: str
    limit: float | None
    """None: a figure that is only reported."""
    measured: float
    unit: str

    @property
    def is_met(self) -> bool | None:
        """Whether it was reached; None without a limit."""
        return None if self.limit is None else self.measured <= self.limit

    @property
    def line(self) -> str:
        """Verdict, limit and figure in columns."""
        verdict = {True: "pass", False: "FAIL", None: "    "}[self.is_met]
        limit = "none" if self.limit is None else f"{self.limit:.2f}"
        return f"{verdict}  {self.what:58} {limit:>8}  {self.measured:8.2f} {self.unit}"


def main() -> None:
    """Prints a table a phase and the targets; writes both as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--batch", type=int, default=4, help="requests of the calls")
    parser.add_argument("--kv-len", type=int, default=1024, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--capture", action="store_true", help="count look-ups meanwhile")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    is_gpu = torch.cuda.is_available()
    print(environment(is_gpu=is_gpu), flush=True)
    targets: list[Target] = []
    table: list[Measured] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        nullcontext() if is_gpu else stand_in_kernels(),
    ):
        if given.capture:
            tilescout.capture(Path(folder) / "calls.json")
        device = "cuda" if is_gpu else "cpu"
        spec = device_spec(torch.device(device), "benchmarks/dispatch.py")
        bench = Workbench(device, spec, Path(folder), given.batch, given.kv_len)
        for phase in given.phases:
            targets += run_phase(phase, bench, table, given.rounds, is_gpu=is_gpu)
        tilescout.capture(None)
        tilescout.use_lock(None)
    print("\ntarget" + " " * 62 + "limit  measured")
    for target in targets:
        print(target.line)
    if given.json:
        results = {
            "environment": environment(is_gpu=is_gpu),
            "measured": [asdict(row) for row in table],
            "targets": [{**asdict(target), "is_met": target.is_met} for target in targets],
        }
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def environment(*, is_gpu: bool) -> str:
    """One line: what was measured with."""
    where = torch.cuda.get_device_name() if is_gpu else "no GPU: launches do nothing, host only"
    return (
        f"{where}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"Triton {triton.__version__}; {time.strftime('%Y-%m-%d')}"
    )


def run_phase(
    phase: str, bench: Workbench, table: list[Measured], rounds: int, *, is_gpu: bool
) -> list[Target]:
    """Measures one phase, prints it, and returns its targets."""
    print(f"\n{phase}", flush=True)
    if phase == "import":
        return list(import_targets())
    if phase == "snapshot":
        return list(snapshot_targets(bench.folder / "large.db", bench.spec))
    make: dict[str, Callable[[], Contenders]] = {
        "lookup": lambda: lookups(bench),
        "gdn": bench.gdn,
        "paged": lambda: bench.paged(is_split=False),
        "split": lambda: bench.paged(is_split=True),
        "others": small_kernels if is_gpu else dict,
    }
    rows = timed(phase, make[phase](), rounds, torch.cuda.synchronize if is_gpu else lambda: None)
    table += rows
    median = {row.contender: row.median_us for row in rows}
    if phase == "lookup":
        return [Target("look-up hit, median", 0.5, median["lookup, same problem"], "us")]
    return list(call_targets(phase, median)) if is_gpu and phase != "others" else []


def call_targets(phase: str, median: dict[str, float]) -> Iterator[Target]:
    """What a call may cost more than its compiled kernels, launched with the same arguments."""
    direct = median["its launcher, tensors"]
    what = {"gdn": "gdn_decode", "paged": "paged_decode", "split": "paged_decode, split"}[phase]
    yield Target(f"{what}: out= over direct launch", 3.0, median["ours, out="] - direct, "us")
    # Addresses that were never met before in any call: caching allocators give the same ones again.
    over = median["ours, out=, fresh tensors"] - median["its launcher, fresh tensors"]
    yield Target(f"{what}: the same, addresses never met before", None, over, "us")
    over = median["ours, torch.ops"] - direct
    yield Target(f"{what}: torch.ops over direct launch", 6.0, over, "us")
    limit = median["@triton.autotune"]
    yield Target(f"{what}: out=, against @triton.autotune", limit, median["ours, out="], "us")


def import_targets() -> Iterator[Target]:
    """Least time to import the dispatch path in a process that has torch, and what it loads."""
    code = (
        # A pass of the garbage collector over torch's objects is none of ours.
        "import gc, sys, time, torch; gc.collect(); start = time.perf_counter()\n"
        "import tilescout.tuner.dispatch\n"
        "print(1e3 * (time.perf_counter() - start))\n"
        f"print(*[name for name in {NOT_LOADED} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    outputs = [
        subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
        for _ in range(IMPORT_RUNS)
    ]
    least = min(float(lines[0]) for lines in outputs)
    loaded = outputs[0][1].split()
    print(f"{least:.1f} ms beyond torch; of {', '.join(NOT_LOADED)} it loads {loaded or 'none'}")
    yield Target("import of the dispatch path beyond torch", 50.0, least, "ms")
    yield Target("heavy modules that it loads", 0.0, float(len(loaded)), "")


def snapshot_targets(path: Path, spec: DeviceSpec) -> Iterator[Target]:
    """A database of many winners: reading it, and look-ups in what was read."""
    write_large(path, spec)
    gc.collect()
    start = time.perf_counter()
    snapshot = Snapshot.load([path])
    read_s = time.perf_counter() - start
    assert len(snapshot.databases[0].values) == LARGE
    problem = large_problem(LARGE // 2)
    start = time.perf_counter()
    found = snapshot.lookup(problem, spec)
    first_s = time.perf_counter() - start
    assert found.tier == "exact", found.tier
    times = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS_A_ROUND):
            snapshot.lookup(problem, spec)
        times.append(1e6 * (time.perf_counter() - start) / CALLS_A_ROUND)
    hit_us = statistics.median(times)
    print(f"{LARGE} winners: read {read_s:.2f} s, first look-up {first_s:.2f} s, hit {hit_us:.2f}")
    yield Target(f"snapshot of {LARGE} winners, read", 0.5, read_s, "s")
    yield Target(f"look-up hit among {LARGE}", 1.0, hit_us, "us")


def large_problem(batch: int) -> GdnDecodeProblem:
    """One of many problems that differ in a dynamic field."""
    return GdnDecodeProblem(batch, 1, 16, 32, 128, 128, "bfloat16")


def write_large(path: Path, spec: DeviceSpec) -> None:
    """A database of one winner, by the store, whose view then shows many."""
    from tilescout.kernels.registry import template
    from tilescout.tuner import records
    from tilescout.tuner.store.store import Store

    config = space_of(large_problem(1), "triton", spec).default
    key = records.StudyKey(
        problem=large_problem(1),
        device=spec,
        toolchain=records.Toolchain(),
        provenance=records.Provenance.MEASURED,
        policy=records.MeasurementPolicy(),
        space_fingerprint="made-up",
        template_hashes=(("triton", template("gdn_decode", "triton").source_hash()),),
    )
    evaluation = records.Evaluation(
        config=config,
        status=records.TrialStatus.OK,
        provenance=records.Provenance.MEASURED,
        timing=records.Timing(10.0, 10.0, 10.0, 10.0, 10.0),
    )
    with Store.open(path) as store:
        study = store.study(key, seed=0)
        trial = store.add_trial(study.study_id, evaluation)
        store.decide(study.study_id, [trial.evaluation])
    with closing(sqlite3.connect(path)) as connection, connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(dispatch_winners)")]
        connection.execute("CREATE TABLE shown AS SELECT * FROM dispatch_winners")
        row = dict(zip(names, connection.execute("SELECT * FROM shown").fetchone(), strict=True))
        fields = large_problem(1).as_dict()
        more = (
            tuple(
                {
                    **row,
                    "trial_id": batch,
                    "problem": canonical_json({**fields, "batch": batch}),
                }.values()
            )
            for batch in range(2, LARGE + 1)
        )
        marks = ", ".join("?" * len(names))
        connection.executemany(f"INSERT INTO shown VALUES ({marks})", more)
        connection.execute("DROP VIEW dispatch_winners")
        columns = ", ".join(names)
        connection.execute(f"CREATE VIEW dispatch_winners AS SELECT {columns} FROM shown")


def lookups(bench: Workbench) -> Contenders:
    """Hits: an object that was looked up before, an equal new one, fields."""
    tilescout.use_lock(None)  # that of the calls may be for another SKU
    known = bench.paged_problem()
    snapshot, spec, sku = dispatch.current_snapshot(), bench.spec, "h200"
    make = bench.paged_problem
    return {
        "lookup, same problem": lambda: tilescout.lookup(known, gpu=sku),
        "Snapshot.lookup, same problem": lambda: snapshot.lookup(known, spec),
        "lookup, problem built from fields": lambda: tilescout.lookup(make(), gpu=sku),
    }


def small_kernels() -> Contenders:
    """Launches to compare with: torch's own, and a kernel that Tilescout adopted."""
    import triton.language as tl

    # Triton reads a kernel's source, so the kernel must not be made from text.
    def double(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + offsets, 2 * tl.load(x + offsets, mask=offsets < n), mask=offsets < n)

    globals()["tl"] = tl  # names of a kernel are looked up in its module
    jitted = triton.jit(double)
    configs = [triton.Config({"BLOCK": block}) for block in (256, 512)]
    theirs, ours = (triton.autotune(configs=configs, key=["n"])(jitted) for _ in range(2))
    tilescout.adopt(ours)
    x = torch.ones(4096, device="cuda")
    y = torch.empty_like(x)
    return {
        "torch.add(out=)": lambda: torch.add(x, x, out=y),
        "torch.empty_like": lambda: torch.empty_like(x),
        "small kernel, plain Triton": lambda: jitted[(16,)](x, y, 4096, BLOCK=256),
        "small kernel, @triton.autotune": lambda: theirs[(16,)](x, y, 4096),
        "small kernel, adopted by Tilescout": lambda: ours[(16,)](x, y, 4096),
    }


def timed(
    phase: str, contenders: Contenders, rounds: int, wait: Callable[[], object]
) -> list[Measured]:
    """Times every contender in every round, prints and returns microseconds a call."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        for _ in range(3):  # the second call is prepared, the third one served so
            call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in contenders.items():
                wait()
                start = time.perf_counter()
                for _ in range(CALLS_A_ROUND):
                    call()
                times[name].append(1e6 * (time.perf_counter() - start) / CALLS_A_ROUND)
    finally:
        gc.enable()
    rows = [
        Measured(phase, name, statistics.median(found), min(found)) for name, found in times.items()
    ]
    for row in rows:
        print(f"{row.contender:36} {row.median_us:8.2f} us  least {row.least_us:8.2f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
