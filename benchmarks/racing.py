#!/usr/bin/env python3
"""Judges the racing rule on recorded samples: how often it picks well, and from how many samples.

For each recorded space the field is the true top 20 by the median of all samples. A draw gives the
race each config's samples in random order; it picks well where the median of all samples of its
choice is within 0.5% of the best. Also judged: the rule that ends the sampling of a single trial.

    python benchmarks/racing.py recordings/*.json.gz --draws 1000

Files are caches of Kernel Tuner with the raw times of every config; the first launch is dropped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tilescout.tuner.measure import MeasureSettings, sample_until_enough
from tilescout.tuner.racing import RaceRules, race

TOLERANCE = 0.005
NUM_FINALISTS = 20


class Recording:
    """Deals each config's recorded samples in random order."""

    def __init__(self, samples: Sequence[Sequence[float]], rng: random.Random) -> None:
        self._left = [rng.sample(list(s), len(s)) for s in samples]

    def draw(self, contestants: Sequence[int], num_rounds: int) -> list[list[float]]:
        """The next samples of each."""
        return [[self._left[i].pop() for _ in range(num_rounds)] for i in contestants]


@dataclass(frozen=True)
class Row:
    """How the rules did on one space."""

    space: str
    num_samples: int
    """Samples of each config in the recording, the first launch left out."""
    num_ties: int
    """Configs within the tolerance of the best."""
    hit_rate: float
    """Draws in which the choice is within the tolerance of the best."""
    worst_loss: float
    """Largest excess of a choice over the best, as a share."""
    sample_share: float
    """Samples that a race takes on average, as a share of all."""
    settled_rate: float
    trial_samples: float
    """Samples that the rule for single trials takes of one config, on average."""
    trial_error_p90: float
    """90th percentile of the error of the trial's median against that of all samples."""


def top_samples(path: Path, num_configs: int = NUM_FINALISTS) -> list[list[float]]:
    """Samples of the fastest configs of a recorded space, without the first launch."""
    with gzip.open(path, "rt") as file:
        records = json.load(file)["cache"].values()
    complete = [r["times"][1:] for r in records if isinstance(r.get("times"), list)]
    length = max(map(len, complete))
    return sorted((s for s in complete if len(s) == length), key=statistics.median)[:num_configs]


def judge(path: Path, num_draws: int, seed: int = 0) -> Row:
    """Runs the rules on ``num_draws`` orders of the samples of one space."""
    rng = random.Random(seed)
    samples = top_samples(path)
    medians = [statistics.median(s) for s in samples]
    best, length = min(medians), len(samples[0])
    losses, used, num_settled = [], 0, 0
    trial_sizes, trial_errors = [], []
    for _ in range(num_draws):
        places = rng.sample(range(len(samples)), len(samples))
        result = race(
            Recording([samples[i] for i in places], rng), len(samples), RaceRules.up_to(length)
        )
        losses.append(medians[places[result.order[0]]] / best - 1.0)
        used += sum(map(len, result.samples))
        num_settled += result.is_settled
        one = rng.randrange(len(samples))
        size, error = _single_trial(samples[one], best, rng)
        trial_sizes.append(size)
        trial_errors.append(error)
    return Row(
        space=path.name.removesuffix(".json.gz"),
        num_samples=length,
        num_ties=sum(m <= best * (1.0 + TOLERANCE) for m in medians),
        hit_rate=sum(loss <= TOLERANCE for loss in losses) / num_draws,
        worst_loss=max(losses),
        sample_share=used / (num_draws * length * len(samples)),
        settled_rate=num_settled / num_draws,
        trial_samples=statistics.mean(trial_sizes),
        trial_error_p90=sorted(trial_errors)[int(0.9 * (num_draws - 1))],
    )


def _single_trial(samples: Sequence[float], best: float, rng: random.Random) -> tuple[int, float]:
    recording = Recording([samples], rng)
    settings = MeasureSettings(max_samples=len(samples))
    taken = sample_until_enough(lambda n: recording.draw([0], n)[0], settings, best)
    return len(taken), abs(statistics.median(taken) / statistics.median(samples) - 1.0)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| space | samples | ties | hit rate | worst loss | share | settled | trial n | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for path in arguments.files:
        row = judge(path, arguments.draws, arguments.seed)
        rows.append(row)
        print(
            f"| {row.space} | {row.num_samples} | {row.num_ties} | {row.hit_rate:.3f} "
            f"| {row.worst_loss:.1%} | {row.sample_share:.3f} | {row.settled_rate:.2f} "
            f"| {row.trial_samples:.1f} | {row.trial_error_p90:.2%} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
