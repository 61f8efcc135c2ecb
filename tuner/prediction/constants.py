"""What the cost model assumes of every device; docs/prediction.md has the source of each value.

Times and rates that differ from one SKU to the next are not here but in ``configs/gpus``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONSTANTS", "CostConstants"]


@dataclass(frozen=True)
class CostConstants:
    """Constants of the cost model.

    Those marked (fitted): to 3685 timed trials of paged decode, measured on an NVIDIA H200 on
    2026-11-30 (``results.db``), then rounded. ``benchmarks/prediction.py results.db --refit 300``
    fits them anew on one half of the problems and judges on the other.
    """

    memory_efficiency: float = 0.97
    """Share of the peak bandwidth that streaming reaches with nothing else in its way (fitted)."""
    sm_bytes_per_cycle: float = 36.0
    """Bytes one SM can take in from L2 in a cycle (fitted)."""
    stream_latency_us: float = 1.6
    """From a request to its data in a streaming loop that loads the memory, address included
    (fitted)."""
    serial_latency_us: float = 0.3
    """One dependent round trip outside the stream; in part it hides behind other work (fitted)."""
    launch_us: float = 1.2
    """From one kernel to the next inside a CUDA graph: launch, ramp-up and drain (fitted)."""
    atomic_us: float = 5.0
    """What a kernel with atomics pays for blocks that meet: fence, arrival, and the work that the
    last one does alone (fitted)."""
    cycles_per_instruction: float = 3.0
    """Between two instructions of one warp that has the scheduler to itself (fitted)."""
    issue_efficiency: float = 0.45
    """Share of the SM's issue slots that full occupancy uses (fitted)."""
    idle_share: float = 0.5
    """With one pass in flight on an SM, the share of the shorter of stream and chain that does not
    hide behind the longer (chosen: half)."""
    warp_mma_share: float = 0.6
    """Share of the peak rate that warp-level matrix instructions reach on devices that have
    group-level ones (Hopper, Blackwell data centre)."""
    matrix_efficiency: float = 0.8
    """Share of the peak rate that a good loop of the best matrix instructions keeps up."""
    overlap_exponent: float = 4.0
    """Resources that are needed for t1, t2, ... take (t1**p + t2**p + ...)**(1/p) together: near
    the longest, but two that come close disturb each other."""
    max_spill_bytes: int = 256
    """Stack bytes a thread from which a config is refused."""
    spill_penalty: float = 0.7
    """Relative time that spilling just under the limit costs; less in proportion (fitted)."""


CONSTANTS = CostConstants()
