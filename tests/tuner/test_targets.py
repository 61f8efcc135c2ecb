"""Which SKUs a run is for: with a GPU, without one, named or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tilescout.errors import DeviceError, UnknownNameError, UsageError
from tilescout.tuner import catalog
from tilescout.tuner.records import Provenance
from tilescout.tuner.targets import DEFAULT_SKUS, resolve_targets

MEASURED, PREDICTED = Provenance.MEASURED, Provenance.PREDICTED


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("tilescout.tuner.environment.current_device", lambda: None)
    monkeypatch.setattr(
        "tilescout.tuner.environment.describe", lambda: {"reason": "no NVIDIA driver"}
    )


@pytest.fixture
def at_hand(monkeypatch):
    device = replace(catalog.gpu("h200"), memory_bytes=150_000_000_000)
    monkeypatch.setattr("tilescout.tuner.environment.current_device", lambda: device)
    return device


def resolved(gpus, mode):
    return [(target.device.sku, target.provenance) for target in resolve_targets(gpus, mode)]


@pytest.mark.parametrize(
    ("gpus", "mode", "expected"),
    [
        (None, "auto", [("h200", MEASURED)]),
        (["auto"], "auto", [("h200", MEASURED)]),
        (["b200"], "auto", [("b200", PREDICTED)]),
        (["b200", "H200", "NVIDIA H200"], "auto", [("b200", PREDICTED), ("h200", MEASURED)]),
        (None, "measure", [("h200", MEASURED)]),
        (["h200"], "measure", [("h200", MEASURED)]),
        (None, "predict", [(sku, PREDICTED) for sku in DEFAULT_SKUS]),
        (["h200"], "predict", [("h200", PREDICTED)]),
    ],
)
def test_with_a_gpu(at_hand, gpus, mode, expected):
    assert resolved(gpus, mode) == expected


def test_figures_of_the_driver_win(at_hand):
    (target,) = resolve_targets(["h200"], "auto")
    assert target.device is at_hand
    (target,) = resolve_targets(["h200"], "predict")
    assert target.device is catalog.gpu("h200")


@pytest.mark.parametrize(
    ("gpus", "mode", "skus"),
    [
        (None, "auto", DEFAULT_SKUS),
        (["auto"], "predict", DEFAULT_SKUS),
        (["rtx5090"], "auto", ("rtx5090",)),
    ],
)
def test_without_a_gpu_all_is_predicted(no_gpu, gpus, mode, skus):
    assert resolved(gpus, mode) == [(sku, PREDICTED) for sku in skus]


def test_measuring_without_a_gpu_says_why_and_what_to_do(no_gpu):
    with pytest.raises(DeviceError, match=r"no NVIDIA driver.*'predict'"):
        resolve_targets(None, "measure")


def test_measuring_another_sku_is_refused(at_hand):
    with pytest.raises(UsageError, match=r"gpus=b200,gb200 cannot be measured.*h200"):
        resolve_targets(["b200", "h200", "gb200"], "measure")


@pytest.mark.parametrize(
    ("gpus", "mode", "error", "words"),
    [
        (["h2000"], "auto", UnknownNameError, r"unknown GPU 'h2000'.*h200"),
        (["auto", "h200"], "auto", UnknownNameError, "unknown GPU 'auto'"),
        ([], "auto", UsageError, "names no SKU"),
        (None, "guess", UsageError, "mode='guess' must be one of auto, measure, predict"),
    ],
)
def test_bad_input(no_gpu, gpus, mode, error, words):
    with pytest.raises(error, match=words):
        resolve_targets(gpus, mode)
