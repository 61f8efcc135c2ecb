#!/usr/bin/env python3
"""Samplers side by side on recorded spaces: ours, Optuna's, Kernel Tuner's; and warm starts.

    python benchmarks/search.py recorded/*.json.gz --json search.json
    python benchmarks/search.py --transfer A4000.json.gz W7800.json.gz

Every run counts distinct valid configs, failed ones included, and ends after --trials of them;
runs of equal number have equal seeds. ``kt:NAME`` is a strategy of Kernel Tuner, simulated on
the same file (``pip install ".[benchmarks]"``); it is given the recorded configs as its
restrictions, so that it too proposes valid ones only. Time is the processor time of a whole run,
which is model time: evaluations are look-ups.

--transfer compares a cold start with one that is given, as foreign winners, the best configs of a
search of the same seed on the first file's GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tilescout.errors import TilescoutError
from tilescout.kernels.base import Config
from tilescout.tuner.replay.reading import read_recorded
from tilescout.tuner.replay.recorded import RecordedSpace
from tilescout.tuner.replay.runner import replay_evaluations, replay_times
from tilescout.tuner.replay.scoring import Score, score_runs
from tilescout.tuner.search.starting_points import MAX_FOREIGN_WINNERS

PREFIX = "kt:"
SAMPLERS = "portfolio,kt:genetic_algorithm,tpe,random"
TRANSFER_COUNTS = (20, 50, 100)


@dataclass(frozen=True)
class Row:
    """One sampler on one space."""

    file: str
    sampler: str
    score: Score
    cpu_s: float
    """Processor time of a run, median."""


def kernel_tuner_run(
    data: dict[str, Any], cache: Path, strategy: str, trials: int, seed: int
) -> list[float]:
    """Times in microseconds of the distinct configs that the strategy evaluates, in order."""
    import kernel_tuner

    names = data["tune_params_keys"]

    def key(values: dict[str, Any]) -> str:
        return ",".join(str(values[name]) for name in names)

    # A lambda it would take apart and compile anew, without what surrounds it.
    def is_recorded(values: dict[str, Any]) -> bool:
        return key(values) in data["cache"]

    random.seed(seed)
    np.random.seed(seed)  # Kernel Tuner draws from both
    # It prints its progress; the answer is what it returns.
    with contextlib.redirect_stdout(io.StringIO()):
        results, _ = kernel_tuner.tune_kernel(
            data["kernel_name"],
            "__global__ void kernel() {}",
            data["problem_size"],
            [],
            data["tune_params"],
            restrictions=is_recorded,
            cache=str(cache),
            simulation_mode=True,
            strategy=strategy,
            strategy_options={"max_fevals": trials},
            lang="CUDA",
            quiet=True,
        )
    times: dict[str, float] = {}
    for result in results:
        value = result["time"]
        is_time = isinstance(value, float)
        times.setdefault(key(result), value * 1000.0 if is_time else math.inf)
    return list(times.values())[:trials]


def kernel_tuner_runs(
    file: str, strategy: str, trials: int, seeds: range
) -> tuple[list[list[float]], list[float]]:
    """One run a seed, and the processor time of each."""
    content = Path(file).read_bytes()
    data = json.loads(gzip.decompress(content) if file.endswith(".gz") else content)
    runs, times = [], []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache.json"
        cache.write_text(json.dumps(data))
        for seed in seeds:
            started = time.process_time()
            runs.append(kernel_tuner_run(data, cache, strategy, trials, seed))
            times.append(time.process_time() - started)
    return runs, times


def our_runs(
    space: RecordedSpace, sampler: str, trials: int, seeds: range, can_stop: bool
) -> tuple[list[list[float]], list[float]]:
    """One run a seed, and the processor time of each."""
    runs, times = [], []
    for seed in seeds:
        started = time.process_time()
        run = replay_evaluations(
            space, sampler=sampler, num_trials=trials, seed=seed, can_stop=can_stop
        )
        runs.append(replay_times(run))
        times.append(time.process_time() - started)
    return runs, times


def compare(files: Sequence[str], samplers: Sequence[str], args: argparse.Namespace) -> list[Row]:
    """Every sampler on every space, told as each is done."""
    rows: list[Row] = []
    print("| space | sampler | @25 | @50 | @100 | @200 | within 10% | P_t | evaluations | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for file in files:
        (space,) = read_recorded(file)
        for sampler in samplers:
            if sampler.startswith(PREFIX):
                strategy = sampler.removeprefix(PREFIX)
                runs, times = kernel_tuner_runs(file, strategy, args.trials, seeds_of(args))
            else:
                runs, times = our_runs(space, sampler, args.trials, seeds_of(args), args.stop)
            score = score_runs(space, runs, args.trials)
            rows.append(Row(name_of(file), sampler, score, statistics.median(times)))
            print(line(rows[-1]), flush=True)
    return rows


def seeds_of(args: argparse.Namespace) -> range:
    """The seeds of the runs."""
    return range(args.first_seed, args.first_seed + args.seeds)


def name_of(file: str) -> str:
    """File name without its endings."""
    return Path(file).name.removesuffix(".gz").removesuffix(".json")


def line(row: Row) -> str:
    """The row in Markdown."""
    ratios = [f"{r:.3f}" if r is not None else "-" for r in row.score.median_ratio.values()]
    num_within = round(row.score.runs_within_10_pct * row.score.num_runs)
    cells = [
        row.file,
        row.sampler,
        *ratios,
        f"{num_within}/{row.score.num_runs}",
        f"{row.score.p_t:.2f}",
        f"{row.score.median_evaluations:g}",
        f"{row.cpu_s:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def behind(rows: Sequence[Row], sampler: str, rival: str) -> list[str]:
    """Where the sampler's median ratio is more than 0.02 above the rival's."""
    scores = {(row.file, row.sampler): row.score for row in rows}
    found = []
    for (file, name), score in scores.items():
        other = scores.get((file, rival))
        if name != sampler or other is None:
            continue
        for count in (100, 200):
            mine, theirs = score.median_ratio[count], other.median_ratio[count]
            if mine is not None and theirs is not None and mine > theirs + 0.02:
                found.append(f"{file} @{count}: {mine:.3f} against {theirs:.3f}")
    return found


def transfer(source_file: str, target_file: str, args: argparse.Namespace) -> None:
    """Cold and warm starts on the target; the source's own search finds what is carried over."""
    (source,), (target,) = read_recorded(source_file), read_recorded(target_file)
    curves: dict[str, list[list[float]]] = {"cold": [], "warm": []}
    for seed in seeds_of(args):
        for start, foreign in (("cold", []), ("warm", winners(source, target, args, seed))):
            run = replay_evaluations(
                target, sampler="portfolio", num_trials=args.trials, seed=seed, foreign=foreign
            )
            best = np.minimum.accumulate(replay_times(run)) / target.optimum_us
            curves[start].append(
                [float(best[min(count, len(best)) - 1]) for count in TRANSFER_COUNTS]
            )
    for start, found in curves.items():
        medians = [
            f"@{c} {m:.3f}" for c, m in zip(TRANSFER_COUNTS, np.median(found, axis=0), strict=True)
        ]
        within = (
            f"within 10% @{TRANSFER_COUNTS[-1]} {sum(r[-1] <= 1.1 for r in found)}/{len(found)}"
        )
        name = f"{name_of(source_file)} -> {name_of(target_file)} {start}"
        print(f"{name}: {'  '.join(medians)}  {within}")


def winners(
    source: RecordedSpace, target: RecordedSpace, args: argparse.Namespace, seed: int
) -> list[Config]:
    """The best that a search on the source found, as far as valid on the target."""
    found = replay_evaluations(source, sampler="portfolio", num_trials=args.trials, seed=seed)
    ranked = sorted(found, key=lambda e: math.inf if e.time_us is None else e.time_us)
    valid = [e.config for e in ranked if e.config in target.evaluations]
    return valid[:MAX_FOREIGN_WINNERS]


def main() -> None:
    """Reads the arguments and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="recorded spaces")
    parser.add_argument("--transfer", nargs=2, metavar=("SOURCE", "TARGET"))
    parser.add_argument("--samplers", default=SAMPLERS)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="let our runs end by themselves")
    parser.add_argument("--json", type=Path, help="also write every score here")
    args = parser.parse_args()
    if not args.files and not args.transfer:
        parser.error("give recorded spaces or --transfer")
    try:
        if args.transfer:
            source, target = args.transfer
            transfer(source, target, args)
        rows = compare(args.files, args.samplers.split(","), args) if args.files else []
    except TilescoutError as error:
        sys.exit(f"search.py: {error}")
    for entry in behind(rows, "portfolio", "kt:genetic_algorithm"):
        print(f"portfolio is behind kt:genetic_algorithm on {entry}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
