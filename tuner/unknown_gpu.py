"""A ``DeviceSpec`` for a GPU that ``configs/gpus`` does not know, from what the driver says.

Sizes come from the driver. Peak rates are derived from the clock and from what one SM of that
architecture does in a cycle, so they are close but not a product's data sheet; ``sources`` says so.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from ..kernels.device import DeviceSpec

__all__ = ["derive_spec"]


@dataclass(frozen=True)
class _Architecture:
    name: str
    max_blocks_per_sm: int
    mma_flops_per_cycle: int
    """Dense 16-bit matrix operations of one SM with fp32 accumulation; a multiply-add is two."""


# CUDA C++ programming guide, "Technical Specifications per Compute Capability", and the
# architecture white papers (A100, GA102, AD102, H100, Blackwell).
_ARCHITECTURES = {
    (8, 0): _Architecture("ampere", 32, 2048),
    (8, 6): _Architecture("ampere", 16, 512),
    (8, 9): _Architecture("ada", 24, 1024),
    (9, 0): _Architecture("hopper", 32, 4096),
    (10, 0): _Architecture("blackwell", 32, 8192),
    (10, 3): _Architecture("blackwell", 32, 8192),
    (12, 0): _Architecture("blackwell", 24, 1024),
    (12, 1): _Architecture("blackwell", 24, 1024),
}
_CAUTIOUS = _Architecture("unknown", 16, 512)
_FP32_FLOPS_PER_CYCLE = 256
_DERIVED = "derived from the driver's clock and SM count"
_DRIVER = "driver"


def derive_spec(name: str, properties: Any, handle: Any) -> DeviceSpec:
    """The device as the driver describes it.

    Args:
        name: Product name that the driver prints.
        properties: ``torch.cuda.get_device_properties``.
        handle: NVML's handle of the device.
    """
    capability = (properties.major, properties.minor)
    architecture = _ARCHITECTURES.get(capability, _CAUTIOUS)
    num_sms = properties.multi_processor_count
    clock_mhz = float(_max_clock(handle, pynvml.NVML_CLOCK_SM, 1000))
    bus_bytes = _bus_width(handle) / 8
    # Data moves on both edges of the memory clock.
    bandwidth = 2 * _max_clock(handle, pynvml.NVML_CLOCK_MEM, 1000) * 1e6 * bus_bytes / 1e9
    cycles = num_sms * clock_mhz * 1e6
    mma_tflops = cycles * architecture.mma_flops_per_cycle / 1e12
    return DeviceSpec(
        sku=_slug(name),
        name=name,
        architecture=architecture.name,
        compute_capability=capability,
        num_sms=num_sms,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        smem_per_block_bytes=properties.shared_memory_per_block_optin,
        smem_per_sm_bytes=properties.shared_memory_per_multiprocessor,
        registers_per_sm=properties.regs_per_multiprocessor,
        max_threads_per_sm=properties.max_threads_per_multi_processor,
        max_blocks_per_sm=architecture.max_blocks_per_sm,
        bandwidth_gbps=bandwidth,
        peak_tflops={
            "bfloat16": mma_tflops,
            "float16": mma_tflops,
            "float32": cycles * _FP32_FLOPS_PER_CYCLE / 1e12,
        },
        clock_mhz=clock_mhz,
        sources={
            **dict.fromkeys(("num_sms", "memory_bytes", "l2_bytes", "clock_mhz"), _DRIVER),
            "bandwidth_gbps": "driver's memory clock and bus width",
            "max_blocks_per_sm": "CUDA C++ programming guide",
            "peak_tflops": _DERIVED,
        },
    )


def _max_clock(handle: Any, domain: int, otherwise: int) -> int:
    with suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetMaxClockInfo(handle, domain))
    return otherwise


def _bus_width(handle: Any) -> int:
    with suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetMemoryBusWidth(handle))
    return 256


def _slug(name: str) -> str:
    """``NVIDIA L40S`` -> ``l40s``: a name for the command line and the database."""
    words = name.lower().removeprefix("nvidia").split()
    return re.sub(r"[^a-z0-9]+", "", "".join(words)) or "unknown"
