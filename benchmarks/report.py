"""How long a report of many trials takes, and how large its page gets.

Copies the measured searches of a database, with other lengths and times moved by up to 30%, until
there are enough trials, and writes the report of the copies. No GPU involved.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tilescout.tuner.records import Evaluation, Provenance, StudyKey, Timing, TrialStatus
from tilescout.tuner.report import write_report
from tilescout.tuner.store import Store

Recorded = tuple[StudyKey, list[Evaluation]]


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", default="results.db", help="database with measured searches")
    parser.add_argument("--trials", type=int, default=100_000, help="how many to report")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "many.db") as store:
        num_trials = fill(store, recorded(given.db), given.trials, random.Random(given.seed))
        started, started_cpu = time.perf_counter(), _cpu_s()
        paths = write_report([store], Path(folder) / "report")
        wall_s = time.perf_counter() - started
        own_s, second_s = (now - then for now, then in zip(_cpu_s(), started_cpu, strict=True))
        page_mb = paths.index.stat().st_size / 1e6
    print(
        f"{num_trials:,} trials: {wall_s:.1f} s (CPU: {own_s:.1f} s, beside it {second_s:.1f} s in "
        f"the second process), page {page_mb:.2f} MB"
    )


def _cpu_s() -> tuple[float, float]:
    """CPU seconds so far of this process and of those it has waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, others = (found.ru_utime + found.ru_stime for found in usage)
    return own, others


def recorded(location: str) -> list[Recorded]:
    """The measured searches of a database."""
    with Store.open(location, read_only=True) as store:
        studies = [s for s in store.studies() if s.key.provenance is Provenance.MEASURED]
        trials = store.trials_by_study([study.study_id for study in studies])
    return [(s.key, [t.evaluation for t in trials[s.study_id]]) for s in studies]


def fill(store: Store, searches: list[Recorded], num_wanted: int, rng: random.Random) -> int:
    """Adds searches until the store has that many trials; returns how many it has."""
    num_trials = 0
    for key, evaluations in copies(searches):
        moved = [_moved(evaluation, rng) for evaluation in evaluations]
        study = store.study(key, seed=0)
        store.add_trials(study.study_id, moved)
        right = [e for e in moved if e.status is TrialStatus.OK]
        store.decide(study.study_id, sorted(right, key=lambda e: e.time_us or 0.0)[:5])
        num_trials += len(moved)
        if num_trials >= num_wanted:
            break
    return num_trials


def copies(searches: list[Recorded]) -> Iterator[Recorded]:
    """The searches again and again, of problems that differ in their nearest dynamic field."""
    usable = [s for s in searches if any(e.status is TrialStatus.OK for e in s[1])]
    if not usable:
        raise SystemExit("the database has no measured search to copy: name another with --db")
    turn = 0
    while True:
        for key, evaluations in usable:
            values = key.problem.as_dict()
            name = key.problem.dynamic_fields[0]
            values[name] = int(values[name]) + turn
            yield replace(key, problem=type(key.problem).from_dict(values)), evaluations
        turn += 1


def _moved(evaluation: Evaluation, rng: random.Random) -> Evaluation:
    timing = evaluation.timing
    if timing is None:
        return evaluation
    factor = rng.uniform(1.0, 1.3)
    moved = Timing(
        median_us=factor * timing.median_us,
        p10_us=factor * timing.p10_us,
        p90_us=factor * timing.p90_us,
        ci_low_us=factor * timing.ci_low_us,
        ci_high_us=factor * timing.ci_high_us,
        num_samples=timing.num_samples,
    )
    return replace(evaluation, timing=moved)


if __name__ == "__main__":
    main()
