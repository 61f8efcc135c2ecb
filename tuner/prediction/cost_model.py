"""Predicts the time of a config from what its binary needs and what its launches do.

A roofline-and-occupancy model: docs/prediction.md has the formulas, their sources and what they
cannot see. Good for ranking configs of one problem on one device, not for comparing devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...kernels.base import LaunchEstimate, Problem
from ...kernels.device import DeviceSpec
from ..records import BinaryFacts, TrialStatus
from .occupancy import HARDWARE, Occupancy, infeasible_reason, occupancy
from .roofline import memory_us, peak_flops_per_us

__all__ = ["CONSTANTS", "Bound", "CostConstants", "LaunchPrediction", "Prediction", "predict"]

Bound = Literal["memory", "latency", "matrix", "issue"]


@dataclass(frozen=True)
class CostConstants:
    """What the model assumes of every device; docs/prediction.md says where each comes from."""

    memory_efficiency: float = 0.93
    """Share of the peak bandwidth that a long streaming read reaches."""
    memory_latency_us: float = 0.8
    """From a request to its data while the memory is busy."""
    launch_us: float = 2.5
    """From one kernel to the next inside a CUDA graph: launch, ramp-up and drain."""
    warp_mma_share: float = 0.6
    """Share of the peak rate that warp-level matrix instructions reach on devices that have
    group-level ones (Hopper, Blackwell data centre)."""
    matrix_efficiency: float = 0.8
    """Share of the peak rate that a good loop of the best matrix instructions keeps up."""
    issue_efficiency: float = 0.7
    """Share of the SM's issue slots a kernel can use."""
    overlap_exponent: float = 4.0
    """Resources that are needed for t1, t2, ... take (t1**p + t2**p + ...)**(1/p) together: near
    the longest, but two that come close disturb each other."""
    max_spill_bytes: int = 256
    """Stack bytes a thread from which a config is refused."""
    spill_penalty: float = 0.5
    """Relative time that spilling just under the limit costs; less in proportion."""


CONSTANTS = CostConstants()


@dataclass(frozen=True)
class LaunchPrediction:
    """One launch: its time and what it is made of."""

    kernel: str
    time_us: float
    occupancy: Occupancy
    num_waves: float
    """Blocks over the blocks that fit on the device at once."""
    bound: Bound
    """What a full wave waits for."""


@dataclass(frozen=True)
class Prediction:
    """What the model makes of a config: a time, or the reason why it cannot or should not run."""

    status: TrialStatus
    """ok, out_of_resources or invalid."""
    reason: str = ""
    launches: tuple[LaunchPrediction, ...] = ()

    @property
    def time_us(self) -> float:
        """Time of all launches, one after the other."""
        return sum(launch.time_us for launch in self.launches)


def predict(
    problem: Problem,
    device: DeviceSpec,
    estimates: Sequence[LaunchEstimate],
    facts: Sequence[BinaryFacts],
    constants: CostConstants = CONSTANTS,
) -> Prediction:
    """The prediction for a config that launches ``estimates`` with kernels that have ``facts``."""
    for kernel in facts:
        reason = infeasible_reason(kernel, device)
        if reason is not None:
            return Prediction(TrialStatus.OUT_OF_RESOURCES, reason)
        if kernel.spill_bytes > constants.max_spill_bytes:
            return Prediction(
                TrialStatus.INVALID,
                f"{kernel.kernel} spills {kernel.spill_bytes} bytes a thread, more than "
                f"{constants.max_spill_bytes}",
            )
    by_name = {kernel.kernel: kernel for kernel in facts}
    launches = tuple(
        _Launch(problem, device, estimate, by_name[estimate.kernel], constants).predict()
        for estimate in estimates
    )
    return Prediction(TrialStatus.OK, launches=launches)


@dataclass(frozen=True)
class _Launch:
    """One launch of one kernel on one device."""

    problem: Problem
    device: DeviceSpec
    estimate: LaunchEstimate
    facts: BinaryFacts
    constants: CostConstants

    def predict(self) -> LaunchPrediction:
        """Full waves, the last partial one, what the longest block adds, latency and launch."""
        constants, estimate = self.constants, self.estimate
        fit = occupancy(self.facts, self.device)
        slots = fit.blocks_per_sm * self.device.num_sms
        full_waves, rest = divmod(self._num_programs, slots)
        bounds = self._bounds_us(min(self._num_programs, slots))
        wave_us = self._overlapped_us(bounds)
        stream_us = full_waves * wave_us
        if rest:
            stream_us += self._overlapped_us(self._bounds_us(rest))
        stream_us += (max(1.0, estimate.longest_share) - 1.0) * wave_us
        spill = self.facts.spill_bytes / constants.max_spill_bytes
        stream_us *= 1.0 + constants.spill_penalty * spill
        latency_us = estimate.serial_loads * constants.memory_latency_us
        return LaunchPrediction(
            kernel=estimate.kernel,
            time_us=constants.launch_us + latency_us + stream_us,
            occupancy=fit,
            num_waves=self._num_programs / slots,
            bound=max(bounds, key=lambda name: bounds[name]),
        )

    @property
    def _num_programs(self) -> int:
        return max(1, self.estimate.num_programs)

    def _bounds_us(self, num_blocks: int) -> dict[Bound, float]:
        """What each resource alone would take for ``num_blocks`` blocks side by side."""
        constants, estimate, device = self.constants, self.estimate, self.device
        share = num_blocks / self._num_programs
        busy_share = min(num_blocks, device.num_sms) / device.num_sms
        wave_bytes = share * estimate.bytes_moved
        in_flight = num_blocks * max(1, estimate.bytes_in_flight)
        slots_per_us = HARDWARE.issue_slots_per_sm * device.num_sms * device.clock_mhz
        return {
            "memory": memory_us(wave_bytes, device) / constants.memory_efficiency,
            "latency": wave_bytes * constants.memory_latency_us / in_flight,
            "matrix": share * estimate.flops / (self._flops_per_us() * busy_share),
            "issue": num_blocks
            * self._instructions()
            / (constants.issue_efficiency * slots_per_us * busy_share),
        }

    def _overlapped_us(self, bounds: dict[Bound, float]) -> float:
        """The longest bound, lengthened by those that come near it."""
        exponent = self.constants.overlap_exponent
        longest = max(bounds.values())
        if longest == 0.0:
            return 0.0
        total: float = sum((bound / longest) ** exponent for bound in bounds.values())
        return longest * float(total ** (1.0 / exponent))

    def _flops_per_us(self) -> float:
        """The rate of the matrix instructions that the binary really has."""
        kind, constants = self.facts.mma_kind, self.constants
        if kind == "none":
            return constants.matrix_efficiency * peak_flops_per_us(self.device, "float32")
        peak = constants.matrix_efficiency * peak_flops_per_us(
            self.device, self.problem.compute_dtype
        )
        opcode = kind.partition(".")[0]
        is_group_mma = opcode.startswith("UTC") or opcode.endswith("GMMA")
        has_group_mma = self.device.compute_capability[0] in HARDWARE.group_mma_majors
        return peak if is_group_mma or not has_group_mma else peak * constants.warp_mma_share

    def _instructions(self) -> float:
        """Warp instructions of one block: the streaming loop as often as its bytes ask for."""
        facts = self.facts
        num_warps = max(1, facts.threads_per_block // HARDWARE.warp_size)
        passes = 1.0
        if facts.loop_load_bytes:
            block_bytes = self.estimate.bytes_moved / self._num_programs
            passes = block_bytes / (facts.loop_load_bytes * facts.threads_per_block)
        repeats = max(0.0, passes - 1.0)
        return num_warps * (facts.num_instructions + repeats * facts.loop_instructions)
