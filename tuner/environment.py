"""The machine at hand: its GPU as a ``DeviceSpec``, and the versions that shape what runs on it.

Asks NVML first, which needs no CUDA context, and torch only where there is a GPU. A missing GPU is
an answer, not an error; a broken driver is an answer with a reason.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pynvml

from ..kernels.device import DeviceSpec
from .catalog import match_gpu
from .records import Toolchain
from .unknown_gpu import derive_spec

__all__ = ["current_device", "describe", "has_gpu", "toolchain", "warn_if_busy"]

_log = logging.getLogger(__name__)


class _NoGpuError(Exception):
    """There is no usable GPU; the text says why."""


def toolchain(*, with_driver: bool) -> Toolchain:
    """Versions of what compiles and runs kernels here.

    Args:
        with_driver: Whether the NVIDIA driver belongs in it: not for a prediction.
    """
    return Toolchain(
        triton=_version("triton"),
        tilelang=_version("tilelang"),
        torch=_version("torch"),
        cuda=_torch_cuda_version(),
        driver=_driver_version() if with_driver else "",
    )


def current_device(index: int = 0) -> DeviceSpec | None:
    """The GPU that torch calls ``index``, or None; the driver's figures win over the catalogue's.

    Where GPUs differ, so do the winners: a call's are those of the GPU that holds its tensors.
    """
    try:
        return _device(index)
    except _NoGpuError:
        return None


def has_gpu() -> bool:
    """Whether the NVIDIA driver sees a GPU; a quick look, that need not mean torch can use it."""
    with suppress(pynvml.NVMLError), _nvml():
        return bool(pynvml.nvmlDeviceGetCount() > 0)
    return False


def describe() -> dict[str, object]:
    """Everything a bug report needs: GPU, driver, versions, machine; the reason if no GPU."""
    reason = ""
    device: DeviceSpec | None = None
    try:
        device = _device()
    except _NoGpuError as error:
        reason = str(error)
    versions = toolchain(with_driver=True)
    return {
        "gpu": device.sku if device else None,
        "gpu_name": device.name if device else None,
        "reason": reason,
        "compute_capability": device.compute_capability_text if device else None,
        "num_sms": device.num_sms if device else None,
        "memory_bytes": device.memory_bytes if device else None,
        "l2_bytes": device.l2_bytes if device else None,
        **versions.as_dict(),
        "tilescout": _version("tilescout"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def warn_if_busy() -> None:
    """Logs a warning where other processes use the GPU: they would spoil every time measured.

    This process, its parent and its workers do not count.
    """
    with suppress(pynvml.NVMLError, _NoGpuError), _nvml():
        handle = _handle(_torch_properties())
        ours = {os.getpid(), os.getppid(), *(p.pid for p in multiprocessing.active_children())}
        others = [
            process.pid
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if process.pid not in ours
        ]
        if others:
            _log.warning(
                "%d other process(es) use the GPU (pid %s): times will be too long and uneven",
                len(others),
                ", ".join(map(str, others)),
            )


def _device(index: int = 0) -> DeviceSpec:
    try:
        with _nvml():
            if pynvml.nvmlDeviceGetCount() == 0:
                raise _NoGpuError("the NVIDIA driver is there but finds no GPU")
            properties = _torch_properties(index)
            handle = _handle(properties, index)
            name = _text(pynvml.nvmlDeviceGetName(handle))
            return _spec(name, properties, handle)
    except pynvml.NVMLError_LibraryNotFound:
        raise _NoGpuError("no NVIDIA driver is installed (libnvidia-ml.so not found)") from None
    except pynvml.NVMLError as error:
        raise _NoGpuError(f"the NVIDIA driver does not answer: {error}") from None


def _spec(name: str, properties: Any, handle: Any) -> DeviceSpec:
    capability = (properties.major, properties.minor)
    known = match_gpu(
        name,
        compute_capability=capability,
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
    )
    if known is None:
        return derive_spec(name, properties, handle)
    return replace(
        known,
        name=name,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size or known.l2_bytes,
        smem_per_block_bytes=properties.shared_memory_per_block_optin,
        smem_per_sm_bytes=properties.shared_memory_per_multiprocessor,
        registers_per_sm=properties.regs_per_multiprocessor,
        max_threads_per_sm=properties.max_threads_per_multi_processor,
    )


def _torch_properties(index: int = 0) -> Any:
    """Properties of the GPU that torch calls so: it honours ``CUDA_VISIBLE_DEVICES``."""
    import torch

    if torch.version.cuda is None:
        raise _NoGpuError(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build to measure"
        )
    try:
        return torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise _NoGpuError(f"torch cannot use the GPU: {line}") from error


def _handle(properties: Any, index: int = 0) -> Any:
    """NVML's handle of torch's device; the two number GPUs differently."""
    with suppress(pynvml.NVMLError):
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    return pynvml.nvmlDeviceGetHandleByIndex(index)


@contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _driver_version() -> str:
    with suppress(pynvml.NVMLError), _nvml():
        return _text(pynvml.nvmlSystemGetDriverVersion())
    return ""


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def _torch_cuda_version() -> str:
    """The CUDA version torch was built for, read from its version file: importing torch is slow."""
    if "torch" in sys.modules:
        return sys.modules["torch"].version.cuda or ""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return ""
    text = Path(package.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
