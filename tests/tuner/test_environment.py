"""The machine at hand, with the driver and torch played by stand-ins."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tilescout.tuner import environment

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150_110_011_392,
    L2_cache_size=62_914_560,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    uuid="0f0f",
)
L40S = SimpleNamespace(
    **{
        **vars(H200),
        "name": "NVIDIA L40S",
        "minor": 9,
        "major": 8,
        "multi_processor_count": 142,
        "total_memory": 47_697_362_944,
        "L2_cache_size": 100_663_296,
        "shared_memory_per_block_optin": 101_376,
    }
)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plays a working driver; ``driver.properties`` is the GPU, ``driver.pids`` use it."""
    played = SimpleNamespace(properties=H200, others=[], pids=[], count=1)

    def set_nvml(name: str, function: Any) -> None:
        monkeypatch.setattr(pynvml, name, function)

    set_nvml("nvmlInit", lambda: None)
    set_nvml("nvmlShutdown", lambda: None)
    set_nvml("nvmlDeviceGetCount", lambda: played.count)
    set_nvml("nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    set_nvml(
        "nvmlDeviceGetName",
        lambda uuid: {f"GPU-{x.uuid}": x.name for x in (played.properties, *played.others)}[
            uuid
        ].encode(),
    )
    set_nvml("nvmlSystemGetDriverVersion", lambda: "580.65.06")
    set_nvml("nvmlDeviceGetMaxClockInfo", lambda handle, domain: {1: 2520, 2: 9001}[domain])
    set_nvml("nvmlDeviceGetMemoryBusWidth", lambda handle: 384)
    set_nvml(
        "nvmlDeviceGetComputeRunningProcesses",
        lambda handle: [SimpleNamespace(pid=pid) for pid in played.pids],
    )
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda index: played.others[index - 1] if index else played.properties,
    )
    return played


def test_every_gpu_of_a_host_is_itself(driver: Any) -> None:
    driver.others = [SimpleNamespace(**{**vars(L40S), "uuid": "1f1f"})]
    first, second = (environment.current_device(index) for index in (0, 1))
    assert first is not None
    assert second is not None
    assert (first.sku, second.num_sms, second.compute_capability) == ("h200", 142, (8, 9))
    assert environment.current_device() == first


def fail_with(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def init() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", init)


def test_a_known_gpu_is_its_sku_with_the_drivers_figures(driver: Any) -> None:
    device = environment.current_device()
    assert device is not None
    assert device.sku == "h200"
    assert device.memory_bytes == H200.total_memory
    assert device.l2_bytes == H200.L2_cache_size
    assert device.smem_per_block_bytes == H200.shared_memory_per_block_optin
    assert device.bandwidth_gbps == pytest.approx(4800.0, rel=0.02)  # only the catalogue knows
    assert environment.describe()["gpu"] == "h200"
    assert environment.describe()["reason"] == ""


def test_an_unknown_gpu_is_described_by_its_driver(driver: Any) -> None:
    driver.properties = L40S
    device = environment.current_device()
    assert device is not None
    assert device.sku == "l40s"
    assert device.architecture == "ada"
    assert device.compute_capability == (8, 9)
    assert device.num_sms == 142
    assert device.bandwidth_gbps == pytest.approx(864.0, rel=0.01)  # data sheet: 864 GB/s
    assert device.peak_tflops["bfloat16"] == pytest.approx(362.0, rel=0.03)  # data sheet: 362
    assert "derived" in device.sources["peak_tflops"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is installed"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver does not answer: .*Driver"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "the NVIDIA driver does not answer: .*match"),
    ],
)
def test_no_driver_or_a_broken_one_is_a_reason_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    fail_with(monkeypatch, code)
    assert environment.current_device() is None
    described = environment.describe()
    assert described["gpu"] is None
    assert re.match(reason, str(described["reason"]))
    assert described["driver"] == ""
    environment.warn_if_busy()


def test_a_driver_without_a_gpu_is_named(driver: Any) -> None:
    driver.count = 0
    assert environment.current_device() is None
    assert "finds no GPU" in str(environment.describe()["reason"])


def test_torch_without_cuda_is_named(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    assert environment.current_device() is None
    assert "built without CUDA" in str(environment.describe()["reason"])


def test_torch_that_fails_on_the_gpu_is_named(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("CUDA driver version is insufficient\nmore lines")

    monkeypatch.setattr("torch.cuda.get_device_properties", fail)
    assert environment.current_device() is None
    reason = environment.describe()["reason"]
    assert reason == "torch cannot use the GPU: CUDA driver version is insufficient"


def test_the_toolchain_has_the_installed_versions(driver: Any) -> None:
    measured = environment.toolchain(with_driver=True)
    assert measured.triton == importlib.metadata.version("triton")
    assert measured.torch == importlib.metadata.version("torch")
    assert measured.driver == "580.65.06"
    assert environment.toolchain(with_driver=False).driver == ""


def test_the_toolchain_does_not_import_torch() -> None:
    code = (
        "import sys; from tilescout.tuner.environment import toolchain;"
        "print(toolchain(with_driver=False).cuda, 'torch' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    import torch

    assert printed[-1] == "False"
    assert (printed[0] if len(printed) == 2 else "") == (torch.version.cuda or "")


def test_other_processes_on_the_gpu_are_warned_of(
    driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver.pids = [os.getpid(), 4242]
    with caplog.at_level(logging.WARNING):
        environment.warn_if_busy()
    assert "1 other process(es) use the GPU (pid 4242)" in caplog.text


def test_our_own_process_is_no_reason_to_warn(
    driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver.pids = [os.getpid()]
    environment.warn_if_busy()
    assert caplog.text == ""
