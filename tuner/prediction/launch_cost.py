"""The time of one launch: how its blocks share the device, wave after wave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...kernels.base import LaunchEstimate
from ...kernels.device import DeviceSpec
from ..records import BinaryFacts
from .block_work import BlockWork
from .constants import CostConstants
from .matrix_instructions import matrix_flops_per_us
from .occupancy import HARDWARE, Occupancy, occupancy
from .roofline import memory_us

__all__ = ["Bound", "LaunchPrediction", "predict_launch"]

Bound = Literal["memory", "intake", "matrix", "issue", "latency"]


@dataclass(frozen=True)
class LaunchPrediction:
    """One launch: its time and what it is made of."""

    kernel: str
    time_us: float
    occupancy: Occupancy
    num_waves: float
    """Blocks over the blocks that fit on the device at once."""
    bound: Bound
    """What a full wave waits for: device memory, bytes into the SMs, matrix units, issue slots, or
    the chain of dependent steps in a block (``latency``)."""


def predict_launch(
    estimate: LaunchEstimate,
    facts: BinaryFacts,
    compute_dtype: str,
    device: DeviceSpec,
    constants: CostConstants,
) -> LaunchPrediction:
    """Full waves, the last partial one, what the longest block adds, spills, atomics, launch."""
    work = BlockWork(estimate, facts)
    fit = occupancy(facts, device)
    slots = fit.blocks_per_sm * device.num_sms
    flops_per_us = matrix_flops_per_us(facts.mma_kind, compute_dtype, device, constants)
    waves = _Waves(work, device, constants, flops_per_us)
    num_full, rest = divmod(work.num_programs, slots)
    widest = min(work.num_programs, slots)
    wave_us = waves.time_us(widest)
    stream_us = num_full * wave_us + (waves.time_us(rest) if rest else 0.0)
    stream_us += (max(1.0, estimate.longest_share) - 1.0) * wave_us
    spilling = constants.spill_penalty * facts.spill_bytes / constants.max_spill_bytes
    meeting_us = constants.atomic_us if work.has_atomics else 0.0
    return LaunchPrediction(
        kernel=estimate.kernel,
        time_us=constants.launch_us + stream_us * (1.0 + spilling) + meeting_us,
        occupancy=fit,
        num_waves=work.num_programs / slots,
        bound=waves.bound(widest),
    )


@dataclass(frozen=True)
class _Waves:
    """Blocks side by side on a device."""

    work: BlockWork
    device: DeviceSpec
    constants: CostConstants
    flops_per_us: float

    def time_us(self, num_blocks: int) -> float:
        """Time of that many blocks that start together.

        The longer of stream and chain, and of the shorter what does not hide: the more passes are
        in flight on an SM, the less of it.
        """
        stream_us = self._together_us(self._resources_us(num_blocks))
        chain_us = self._chain_us()
        in_flight = self.work.passes_in_flight * max(1.0, num_blocks / self.device.num_sms)
        exposed = self.constants.idle_share / max(1.0, in_flight)
        return max(stream_us, chain_us) + exposed * min(stream_us, chain_us)

    def bound(self, num_blocks: int) -> Bound:
        """The longest of all."""
        bounds = {**self._resources_us(num_blocks), "latency": self._chain_us()}
        return max(bounds, key=lambda name: bounds[name])

    def _chain_us(self) -> float:
        return self.work.chain_us(self.constants, self.device.clock_mhz)

    def _resources_us(self, num_blocks: int) -> dict[Bound, float]:
        """What each resource alone would take; resources of an SM count on the fullest one."""
        work, device, constants = self.work, self.device, self.constants
        on_an_sm = -(-num_blocks // device.num_sms)
        bytes_per_us = constants.sm_bytes_per_cycle * device.clock_mhz
        slots_per_us = HARDWARE.issue_slots_per_sm * device.clock_mhz
        return {
            "memory": memory_us(num_blocks * work.bytes_moved, device)
            / constants.memory_efficiency,
            "intake": on_an_sm * work.bytes_taken_in / bytes_per_us,
            "matrix": on_an_sm * work.flops * device.num_sms / self.flops_per_us,
            "issue": on_an_sm * work.num_instructions / (constants.issue_efficiency * slots_per_us),
        }

    def _together_us(self, resources: dict[Bound, float]) -> float:
        """The longest, lengthened by those that come near it."""
        exponent = self.constants.overlap_exponent
        longest = max(resources.values())
        if longest == 0.0:
            return 0.0
        total: float = sum((time / longest) ** exponent for time in resources.values())
        return longest * float(total ** (1.0 / exponent))
