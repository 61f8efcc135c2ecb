"""Whose winners serve a call: those of the GPU that holds its tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tilescout.errors import DeviceError, UsageError
from tilescout.kernels.device import DeviceSpec
from tilescout.ops import on_device
from tilescout.tuner import environment
from tilescout.tuner.catalog import gpu


@pytest.fixture(autouse=True)
def mixed_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host whose GPUs are an H200 and a B200, the latter current."""
    found = {0: gpu("h200"), 1: gpu("b200")}

    def current_device(index: int = 0) -> DeviceSpec | None:
        return found.get(index)

    monkeypatch.setattr(environment, "current_device", current_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    on_device._gpu_spec.cache_clear()
    yield
    on_device._gpu_spec.cache_clear()


@pytest.mark.parametrize(
    ("device", "sku"), [("cuda:0", "h200"), ("cuda:1", "b200"), ("cuda", "b200")]
)
def test_the_sku_is_that_of_the_tensors(device: str, sku: str) -> None:
    for _ in range(2):
        assert on_device.device_spec(torch.device(device), "test").sku == sku


def test_a_gpu_that_the_driver_does_not_show_is_named() -> None:
    with pytest.raises(DeviceError, match="cuda:2"):
        on_device.device_spec(torch.device("cuda:2"), "test")


def test_other_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="'meta'"):
        on_device.device_spec(torch.device("meta"), "test")
