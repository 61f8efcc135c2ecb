"""How large and how slow: a night of tuning must stay small enough to commit."""

from __future__ import annotations

import math
import random
import sqlite3
import statistics
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import store_cases as cases
from tilescout.kernels.base import Config, ParameterValue
from tilescout.tuner.paths import shipped_database_path
from tilescout.tuner.records import BinaryFacts, Evaluation, Provenance, Timing, TrialStatus
from tilescout.tuner.store import Store

pytestmark = pytest.mark.usefixtures("toy")

LARGEST_BYTES_A_TRIAL = 215
NUM_STUDIES = 16
TRIALS_PER_STUDY = 320
NUM_TRIALS = NUM_STUDIES * TRIALS_PER_STUDY
FINALISTS = 9
FINAL_SAMPLES = 60
# Drawn with repeats from this many, 0.6 of a trial's configs are new ones, as in results.db.
NUM_CONFIGS = round(0.89 * NUM_TRIALS)
NUM_BINARIES = round(0.25 * NUM_TRIALS)
CHOICES: dict[str, tuple[ParameterValue, ...]] = {
    "split_rule": ("none", "count", "balanced"),
    "block_m": (1, 2, 4, 8, 16),
    "block_n": (16, 32, 64, 128, 256),
    "kv_eviction": ("evict_normal", "evict_first", "evict_last"),
    "num_stages": (1, 2, 3, 4, 5, 6),
    "num_warps": (1, 2, 4, 8),
    "prefetch_pages": (False, True),
    "swap_ab": (False, True),
    "num_splits": (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    "merge": ("kernel", "atomic"),
}
INSTRUCTION_CLASSES = [
    "async_copy",
    "barrier",
    "branch",
    "convert",
    "float",
    "integer",
    "load_constant",
    "load_global",
    "load_shared",
    "mma",
    "shuffle",
    "special",
    "store_global",
    "store_shared",
]


def config(index: int) -> Config:
    """A different config for every index up to ``NUM_CONFIGS``."""
    values: dict[str, ParameterValue] = {}
    # Spread over the whole space, so that every parameter varies.
    rest = index * (math.prod(map(len, CHOICES.values())) // NUM_CONFIGS)
    for name, choices in CHOICES.items():
        rest, place = divmod(rest, len(choices))
        values[name] = choices[place]
    return Config.of("triton", values)


def binary(index: int) -> BinaryFacts:
    """A different binary for every index."""
    rng = random.Random(index)
    mix = {name: rng.choice((9, 20, 60, 300)) + rng.randrange(9) for name in INSTRUCTION_CLASSES}
    return BinaryFacts(
        kernel="paged_decode_kernel",
        threads_per_block=rng.choice((32, 64, 128, 256)),
        registers=rng.randrange(30, 256),
        spill_bytes=0,
        smem_bytes=16 * rng.randrange(200, 14000),
        tmem_columns=0,
        num_instructions=700 + index,
        mma_kind="HMMA.16816.F32.BF16",
        instruction_mix=mix,
        loop_instructions=rng.randrange(100, 400),
        loop_load_bytes=4 * rng.randrange(16, 64),
    )


def trial(rng: random.Random, index: int) -> Evaluation:
    """One of a mix like that of the trials in results.db."""
    fate = rng.random()
    if fate < 0.01:
        needed = 1024 * rng.randrange(228, 300)
        return Evaluation(
            config(index),
            TrialStatus.OUT_OF_RESOURCES,
            Provenance.MEASURED,
            f"OutOfResources: out of resource: shared memory, Required: {needed}, Hardware limit: "
            "232448. Reducing block sizes or `num_stages` may help.",
            compile_s=3 * rng.random(),
        )
    is_pruned = fate < 0.29
    median_us = 10 ** rng.uniform(0.9, 3.5)
    merge = (cases.facts("merge_kernel", 30 + index % 9),) if index % 2 else ()
    return Evaluation(
        config(index),
        TrialStatus.PRUNED if is_pruned else TrialStatus.OK,
        Provenance.MEASURED,
        f"cut: {1.5 + rng.expovariate(0.5):.2f} times the best time so far" if is_pruned else "",
        timing=Timing(
            median_us,
            median_us * rng.uniform(0.97, 1),
            median_us * rng.uniform(1, 1.03),
            median_us * rng.uniform(0.99, 1),
            median_us * rng.uniform(1, 1.01),
            num_samples=2 if is_pruned else 6,
        ),
        facts=(binary(index % NUM_BINARIES), *merge),
        max_abs_error=rng.random() * 1e-2,
        relative_rms_error=rng.random() * 1e-3,
        compile_s=3 * rng.random(),
        measure_s=0.2 * rng.random(),
    )


def as_final(rng: random.Random, evaluation: Evaluation) -> Evaluation:
    """The trial measured again; its samples compress as badly as measured ones."""
    assert evaluation.timing is not None
    median_us = evaluation.timing.median_us
    samples = tuple(median_us * rng.gauss(1, 0.003) for _ in range(FINAL_SAMPLES))
    return replace(evaluation, timing=replace(evaluation.timing, samples_us=samples))


def num_rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_fifty_thousand_trials_take_less_than_twelve_megabytes(tmp_path: Path) -> None:
    """Measured on a tenth of them; what is there without trials counts once."""
    path = tmp_path / "results.db"
    rng = random.Random(0)
    with Store.open(path) as store:
        store.prepare_for_shipping()
        empty_bytes = path.stat().st_size
        for size in range(1, NUM_STUDIES + 1):
            study_id = store.study(cases.study_key(size), seed=size).study_id
            indices = rng.sample(range(NUM_CONFIGS), TRIALS_PER_STUDY)
            trials = [trial(rng, index) for index in indices]
            store.add_trials(study_id, trials)
            right = [found for found in trials if found.status is TrialStatus.OK]
            store.decide(study_id, [as_final(rng, found) for found in right[:FINALISTS]])
        store.prepare_for_shipping()
        winners = store.winners()
    assert num_rows(path, "trials") == NUM_TRIALS
    assert num_rows(path, "configs") == pytest.approx(0.6 * NUM_TRIALS, rel=0.03)
    assert num_rows(path, "binaries") == pytest.approx(0.25 * NUM_TRIALS, rel=0.03)
    assert all(len(w.trial.evaluation.timing.samples_us) == FINAL_SAMPLES for w in winners)
    bytes_a_trial = (path.stat().st_size - empty_bytes) / NUM_TRIALS
    assert bytes_a_trial <= LARGEST_BYTES_A_TRIAL
    assert empty_bytes + 50_000 * bytes_a_trial < 12e6


def test_the_shipped_trials_are_as_small() -> None:
    path = shipped_database_path()
    assert path.stat().st_size <= LARGEST_BYTES_A_TRIAL * num_rows(path, "trials")


def test_adding_and_reading_are_quick(tmp_path: Path) -> None:
    rng = random.Random(0)
    with Store.open(tmp_path / "results.db") as store:
        study_id = store.study(cases.study_key(), seed=0).study_id
        store.add_trials(study_id, [trial(rng, i) for i in range(1900)])
        taken_s = []
        for index in range(1900, 2000):
            added = trial(rng, index)
            start = time.perf_counter()
            store.add_trial(study_id, added)
            taken_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        trials = store.trials(study_id)
        read_s = time.perf_counter() - start
    assert len(trials) == 2000
    # Ten times the usual figures, as other tests may keep the cores busy.
    assert statistics.median(taken_s) < 0.02
    assert read_s < 3
