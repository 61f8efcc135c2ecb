"""The least time a problem can take on a device: peaks of ``configs/gpus`` and nothing else."""

from __future__ import annotations

from ...kernels.base import Problem
from ...kernels.device import DeviceSpec

__all__ = ["memory_us", "peak_flops_per_us", "roofline_us", "share_of_roofline"]

_WIDER = ("bfloat16", "float16", "float32")


def memory_us(bytes_moved: float, device: DeviceSpec) -> float:
    """Time to move that many bytes at the peak bandwidth."""
    return bytes_moved / (device.bandwidth_gbps * 1e3)


def peak_flops_per_us(device: DeviceSpec, dtype: str) -> float:
    """Peak rate for operands of ``dtype``.

    A type that the device has no matrix instruction for is computed in a wider one: then that
    one's rate counts.
    """
    known = (name for name in (dtype, *_WIDER) if name in device.peak_tflops)
    name = next(known, None)
    assert name is not None, f"{device.sku} has no peak rate for any of {dtype}, {_WIDER}"
    return device.peak_tflops[name] * 1e6


def roofline_us(problem: Problem, device: DeviceSpec) -> float:
    """The longer of moving the problem's bytes and doing its operations, each at the peak."""
    compute_us = problem.flops / peak_flops_per_us(device, problem.compute_dtype)
    return max(memory_us(problem.bytes_moved, device), compute_us)


def share_of_roofline(problem: Problem, device: DeviceSpec, time_us: float) -> float:
    """How near ``time_us`` comes to the roofline; 1.0 is at it."""
    return roofline_us(problem, device) / time_us
