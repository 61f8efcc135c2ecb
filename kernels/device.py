"""What a template, a search space and the cost model may know of a GPU.

A ``DeviceSpec`` is passed in, never queried at import. ``tuner.catalog`` reads the known SKUs from
``configs/gpus``; ``tuner.environment`` matches the GPU at hand to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DeviceSpec"]


@dataclass(frozen=True)
class DeviceSpec:
    """One SKU: a GPU product as it performs, not just an architecture."""

    sku: str
    """Short name used on the command line and in the database, e.g. ``h200``."""
    name: str
    """The product name as the driver prints it, for people only."""
    architecture: str
    """Lower case, as in ``configs/gpus``: ``hopper``, ``blackwell``; ``unknown`` where it is."""
    compute_capability: tuple[int, int]
    """(major, minor), e.g. (9, 0)."""
    num_sms: int
    memory_bytes: int
    l2_bytes: int
    smem_per_block_bytes: int
    """Largest shared memory one block may ask for (opt-in limit)."""
    smem_per_sm_bytes: int
    registers_per_sm: int
    """32-bit registers of one SM."""
    max_threads_per_sm: int
    max_blocks_per_sm: int
    bandwidth_gbps: float
    """Peak device-memory bandwidth, 1e9 bytes per second."""
    peak_tflops: Mapping[str, float] = field(hash=False)
    """Dense peak rate by operand dtype (``bfloat16``, ``float8_e4m3fn``, ``float4_e2m1fn_x2``,
    ``float32``), 1e12 floating-point operations per second."""
    clock_mhz: float
    """Boost clock of the SMs."""
    aliases: tuple[str, ...] = ()
    """Other spellings found in drivers and published tables, lower case."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Field name -> where its figure comes from."""

    @property
    def arch(self) -> int:
        """Compute capability as compilers write it: 90, 100, 103, 120."""
        major, minor = self.compute_capability
        return 10 * major + minor

    @property
    def compute_capability_text(self) -> str:
        """``9.0``, the form used in the database."""
        return f"{self.compute_capability[0]}.{self.compute_capability[1]}"
