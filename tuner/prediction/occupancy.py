"""How many blocks of a kernel fit on an SM, or why none does.

The limits are those of the CUDA C++ Programming Guide (table of technical specifications per
compute capability) and of NVIDIA's occupancy calculator; they hold for compute capability 9.0,
10.x and 12.x alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.device import DeviceSpec
from ..records import BinaryFacts

__all__ = ["HARDWARE", "HardwareLimits", "Occupancy", "infeasible_reason", "occupancy"]


@dataclass(frozen=True)
class HardwareLimits:
    """What all supported architectures share and no SKU file repeats."""

    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_registers_per_thread: int = 255
    register_unit: int = 256
    """Registers are handed out to a warp in this granularity."""
    register_files_per_sm: int = 4
    """A warp lives on one quarter of the SM and must find its registers there."""
    smem_unit_bytes: int = 128
    smem_reserved_bytes: int = 1024
    """Shared memory the system keeps of every block."""
    tmem_columns_per_sm: int = 512
    issue_slots_per_sm: int = 4
    """Warp instructions an SM can issue in one cycle: one a scheduler."""
    group_mma_majors: tuple[int, ...] = (9, 10)
    """Compute capabilities with matrix instructions of a warp group or of the SM (wgmma, tcgen05)
    beside those of a warp."""


HARDWARE = HardwareLimits()


@dataclass(frozen=True)
class Occupancy:
    """Blocks of one kernel side by side on an SM."""

    blocks_per_sm: int
    limit: str
    """The resource that runs out first: registers, shared memory, tensor memory, threads or
    blocks."""


def infeasible_reason(facts: BinaryFacts, device: DeviceSpec) -> str | None:
    """None if a block of the kernel fits on an SM of the device, else what it exceeds."""
    limits = HARDWARE
    if facts.smem_bytes > device.smem_per_block_bytes:
        return (
            f"{facts.kernel} needs {facts.smem_bytes} bytes of shared memory a block, "
            f"{device.sku} has {device.smem_per_block_bytes}"
        )
    if facts.tmem_columns > limits.tmem_columns_per_sm:
        return (
            f"{facts.kernel} needs {facts.tmem_columns} columns of tensor memory, an SM has "
            f"{limits.tmem_columns_per_sm}"
        )
    if facts.threads_per_block > limits.max_threads_per_block:
        return (
            f"{facts.kernel} has {facts.threads_per_block} threads a block, more than "
            f"{limits.max_threads_per_block}"
        )
    if facts.registers > limits.max_registers_per_thread or _by_registers(facts, device) == 0:
        return (
            f"{facts.kernel} needs {facts.registers} registers for each of "
            f"{facts.threads_per_block} threads, an SM has {device.registers_per_sm}"
        )
    return None


def occupancy(facts: BinaryFacts, device: DeviceSpec) -> Occupancy:
    """The blocks that fit and what limits them; the kernel must be feasible."""
    limits = {
        "blocks": device.max_blocks_per_sm,
        "threads": device.max_threads_per_sm // (_num_warps(facts) * HARDWARE.warp_size),
        "registers": _by_registers(facts, device),
        "shared memory": device.smem_per_sm_bytes // _block_smem(facts),
    }
    if facts.tmem_columns:
        limits["tensor memory"] = HARDWARE.tmem_columns_per_sm // facts.tmem_columns
    name = min(limits, key=lambda resource: limits[resource])
    return Occupancy(max(1, limits[name]), name)


def _num_warps(facts: BinaryFacts) -> int:
    return max(1, -(-facts.threads_per_block // HARDWARE.warp_size))


def _by_registers(facts: BinaryFacts, device: DeviceSpec) -> int:
    unit = HARDWARE.register_unit
    per_warp = max(unit, -(-facts.registers * HARDWARE.warp_size // unit) * unit)
    per_file = device.registers_per_sm // HARDWARE.register_files_per_sm // per_warp
    return per_file * HARDWARE.register_files_per_sm // _num_warps(facts)


def _block_smem(facts: BinaryFacts) -> int:
    unit = HARDWARE.smem_unit_bytes
    return -(-facts.smem_bytes // unit) * unit + HARDWARE.smem_reserved_bytes
