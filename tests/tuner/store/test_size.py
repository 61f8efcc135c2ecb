"""How large and how slow: a night of tuning must stay small enough to commit."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import pytest
import store_cases as cases
from tilescout.tuner.records import TrialStatus
from tilescout.tuner.store import Store

pytestmark = pytest.mark.usefixtures("toy")

NUM_STUDIES = 100
TRIALS_PER_STUDY = 500
FINALISTS = 5


@pytest.mark.slow
def test_fifty_thousand_trials_take_less_than_twelve_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    rng = random.Random(0)
    with Store.open(path) as store:
        for size in range(1, NUM_STUDIES + 1):
            study_id = store.study(cases.study_key(size), seed=size).study_id
            indices = rng.sample(range(5760), TRIALS_PER_STUDY)
            trials = [cases.synthetic_trial(rng, index) for index in indices]
            store.add_trials(study_id, trials)
            right = [trial for trial in trials if trial.status is TrialStatus.OK]
            store.decide(study_id, [cases.as_final(rng, trial) for trial in right[:FINALISTS]])
        store.prepare_for_shipping()
        assert sum(s.num_trials for s in store.studies()) == NUM_STUDIES * TRIALS_PER_STUDY
        assert all(len(w.trial.evaluation.timing.samples_us) == 300 for w in store.winners())
    num_bytes = path.stat().st_size
    assert num_bytes < 12e6
    assert num_bytes / (NUM_STUDIES * TRIALS_PER_STUDY) <= 220


def test_adding_and_reading_are_quick(tmp_path: Path) -> None:
    rng = random.Random(0)
    with Store.open(tmp_path / "results.db") as store:
        study_id = store.study(cases.study_key(), seed=0).study_id
        store.add_trials(study_id, [cases.synthetic_trial(rng, i) for i in range(4900)])
        taken_s = []
        for index in range(4900, 5000):
            trial = cases.synthetic_trial(rng, index)
            start = time.perf_counter()
            store.add_trial(study_id, trial)
            taken_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        trials = store.trials(study_id)
        read_s = time.perf_counter() - start
    assert len(trials) == 5000
    # Ten times the usual figures, as other tests may keep the cores busy.
    assert statistics.median(taken_s) < 0.02
    assert read_s < 3
