"""Where the tensors of a call lie: the SKU to look up, the CUDA context to launch in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from ..errors import DeviceError, UsageError
from ..kernels.device import DeviceSpec

__all__ = ["device_spec", "dtype_name", "on_device"]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which ``device`` is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def device_spec(device: torch.device, function: str) -> DeviceSpec:
    """The SKU that a call of ``function`` on tensors of ``device`` runs on.

    Raises:
        UsageError: the tensors are on the CPU and Triton's interpreter is off.
        DeviceError: the driver does not show the GPU.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return _gpu_spec(index)
    import triton

    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return _interpreter_spec()
    raise UsageError(
        f"{function} got tensors on {str(device)!r}: it runs on an NVIDIA GPU; move them with "
        ".cuda(), or set TRITON_INTERPRET=1 before the first import to debug on the CPU"
    )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@cache
def _gpu_spec(index: int) -> DeviceSpec:
    from ..tuner.environment import current_device

    spec = current_device(index)
    if spec is None:
        raise DeviceError(f"torch has cuda:{index} but the NVIDIA driver (NVML) shows no such GPU")
    return spec


@cache
def _interpreter_spec() -> DeviceSpec:
    """Any SKU will do: the interpreter has no limits, and look-ups need one."""
    from ..tuner.catalog import gpu, gpu_names

    return gpu(gpu_names()[0])
