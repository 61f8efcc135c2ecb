#!/usr/bin/env python3
"""How well the cost model ranks measured trials, problem by problem. Needs no GPU.

    python benchmarks/prediction.py results.db
    python benchmarks/prediction.py results.db --refit 300

Per study of measured trials: how many there are, Spearman's rank correlation of predicted with
measured time (trials that ended ok; also with those that were cut), and the best measured time
among the ten configs predicted best over the best measured of all. With ``--refit N``, the fitted
constants are searched anew in N steps for each of ``--folds`` parts of the problems, from all other
parts: no problem is judged with constants that saw it. As many folds as problems leave one out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilescout.errors import TilescoutError
from tilescout.kernels.base import Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner.prediction.accuracy import Accuracy, accuracy
from tilescout.tuner.prediction.constants import CONSTANTS, CostConstants
from tilescout.tuner.records import Evaluation, Provenance
from tilescout.tuner.store.store import Store

NUM_TOP = 10
NEAR_BEST = 1.10
# Guesses from before any fit, so that nothing of the problems held back is in the start.
START: dict[str, float] = {
    "memory_efficiency": 0.93,
    "sm_bytes_per_cycle": 64.0,
    "stream_latency_us": 0.8,
    "serial_latency_us": 0.8,
    "launch_us": 2.5,
    "atomic_us": 1.0,
    "cycles_per_instruction": 4.0,
    "issue_efficiency": 0.7,
    "spill_penalty": 0.5,
}


@dataclass(frozen=True)
class Study:
    """The measured trials of one problem."""

    problem: Problem
    device: DeviceSpec
    evaluations: Sequence[Evaluation]

    def thinned(self) -> Study:
        """Every third trial: enough to fit by, in a third of the time."""
        return replace(self, evaluations=self.evaluations[::3])

    def judge(self, constants: CostConstants) -> Accuracy | None:
        """The model with these constants against this study."""
        return accuracy(
            self.problem, self.device, self.evaluations, num_top=NUM_TOP, constants=constants
        )


def read_studies(database: Path, op: str | None) -> list[Study]:
    """All studies of measured trials that can be judged."""
    with Store.open(database, read_only=True) as store:
        studies = [
            Study(
                found.key.problem,
                found.key.device,
                [trial.evaluation for trial in store.trials(found.study_id)],
            )
            for found in store.studies(op=op)
            if found.key.provenance is Provenance.MEASURED
        ]
    return [study for study in studies if study.judge(CONSTANTS) is not None]


def judged(studies: Sequence[Study], constants: CostConstants) -> list[Accuracy]:
    """One accuracy a study."""
    return [found for study in studies if (found := study.judge(constants)) is not None]


def loss(studies: Sequence[Study], constants: CostConstants) -> float:
    """What refitting makes small: bad ranking first, then a bias of the times."""
    found = judged(studies, constants)
    ranking = statistics.fmean(a.spearman + 0.5 * a.spearman_with_pruned for a in found)
    return 0.3 * statistics.fmean(abs(math.log(a.bias)) for a in found) - ranking


def refit(studies: Sequence[Study], num_steps: int, seed: int) -> CostConstants:
    """A random walk from ``START``; a step is kept where the ranking gets better."""
    rng = random.Random(seed)
    best = with_values(START)
    best_loss = loss(studies, best)
    for step in range(num_steps):
        names = rng.sample(list(START), rng.randint(1, 3))
        tried = moved(best, names, rng, spread=0.3 if step < num_steps / 2 else 0.1)
        tried_loss = loss(studies, tried)
        if tried_loss < best_loss:
            best, best_loss = tried, tried_loss
    return best


def moved(
    constants: CostConstants, names: Sequence[str], rng: random.Random, *, spread: float
) -> CostConstants:
    """A copy with some constants multiplied by a random factor."""
    changes = {name: getattr(constants, name) * math.exp(rng.gauss(0.0, spread)) for name in names}
    changed = with_values(changes, constants)
    return replace(changed, memory_efficiency=min(1.0, changed.memory_efficiency))


def with_values(values: Mapping[str, Any], constants: CostConstants = CONSTANTS) -> CostConstants:
    """A copy with these values."""
    return replace(constants, **values)


def held_out(studies: Sequence[Study], num_folds: int, num_steps: int, seed: int) -> list[Accuracy]:
    """Every study judged with constants fitted on the studies of the other folds."""
    found: dict[int, Accuracy] = {}
    for fold in range(num_folds):
        numbers = range(fold, len(studies), num_folds)
        others = [studies[n].thinned() for n in range(len(studies)) if n not in numbers]
        constants = refit(others, num_steps, seed)
        values = {name: round(getattr(constants, name), 3) for name in START}
        print(f"fitted without fold {fold}: {values}", file=sys.stderr)
        found.update(zip(numbers, judged([studies[n] for n in numbers], constants), strict=True))
    return [found[number] for number in sorted(found)]


def print_table(studies: Sequence[Study], found: Sequence[Accuracy]) -> None:
    """One line a problem, then the medians."""
    print("  ok  cut  spearman  with cut  best of top 10  predicted/measured  problem")
    for study, a in zip(studies, found, strict=True):
        print(
            f"{a.num_ok:4d} {a.num_pruned:4d}  {a.spearman:8.3f}  {a.spearman_with_pruned:8.3f}"
            f"  {a.best_of_top:14.3f}  {a.bias:18.2f}  {study.problem} on {study.device.sku}"
        )
    totals = summary(found)
    print(
        f"median Spearman {totals['median_spearman']:.3f} "
        f"(with cut ones {totals['median_spearman_with_pruned']:.3f}); "
        f"within 10% of the best: {totals['share_near_best']:.0%} of {len(found)} problems"
    )


def summary(found: Sequence[Accuracy]) -> dict[str, float]:
    """The figures the model is held to."""
    return {
        "median_spearman": statistics.median(a.spearman for a in found),
        "median_spearman_with_pruned": statistics.median(a.spearman_with_pruned for a in found),
        "share_near_best": sum(a.best_of_top <= NEAR_BEST for a in found) / len(found),
    }


def as_json(studies: Sequence[Study], found: Sequence[Accuracy]) -> str:
    """The same as the table, for programs."""
    rows = [
        {"op": s.problem.op, "problem": s.problem.as_dict(), "gpu": s.device.sku, **asdict(a)}
        for s, a in zip(studies, found, strict=True)
    ]
    return json.dumps({"problems": rows, **summary(found)}, indent=1)


def main() -> int:
    """Exit status of the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("database", type=Path)
    parser.add_argument("--op", help="only studies of this operation")
    parser.add_argument("--refit", type=int, metavar="N", help="hold out: fit in N steps")
    parser.add_argument("--folds", type=int, default=2, help="of the refit; default 2 (halves)")
    parser.add_argument("--seed", type=int, default=0, help="of the refit")
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")
    arguments = parser.parse_args()
    try:
        studies = read_studies(arguments.database, arguments.op)
    except TilescoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    num_needed = max(2, arguments.folds) if arguments.refit else 1
    if len(studies) < num_needed or arguments.folds < 2:
        print(
            f"error: {arguments.database} holds measured trials of {len(studies)} problems and "
            f"{num_needed} are needed (--folds: 2 to that number); tune more on a GPU first",
            file=sys.stderr,
        )
        return 1
    if arguments.refit:
        found = held_out(studies, arguments.folds, arguments.refit, arguments.seed)
    else:
        found = judged(studies, CONSTANTS)
    if arguments.json:
        print(as_json(studies, found))
    else:
        print_table(studies, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
