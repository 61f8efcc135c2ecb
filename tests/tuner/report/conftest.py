"""A store for each test, and a filled one: H200 measured, B200 predicted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner.records import Provenance
from tilescout.tuner.store import Store


@pytest.fixture
def b200(h200: DeviceSpec) -> DeviceSpec:
    from report_data import b200_like

    return b200_like(h200)


@pytest.fixture
def store(toy: object, tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "first.db") as opened:
        yield opened


@pytest.fixture
def filled(store: Store, h200: DeviceSpec, b200: DeviceSpec) -> Store:
    """Two problems on the H200, measured, and one of them on the B200, predicted."""
    from report_data import SPLIT, WIDE, Searched, add_study, timed, typical_trials
    from toy_op import ToyProblem

    for size in (1 << 20, 1 << 24):
        measured = Searched(ToyProblem(size), h200)
        add_study(store, measured, typical_trials(measured, size / (1 << 20)), [SPLIT])
    predicted = Searched(ToyProblem(1 << 20), b200, Provenance.PREDICTED)
    trials = [*typical_trials(predicted, 0.8)[:4], timed(predicted, WIDE, 8.0)]
    add_study(store, predicted, trials, [WIDE, SPLIT])
    return store
