"""What one block of a launch has to do, from the template's estimate and the binary's facts.

The chain is what a block would take alone; how blocks share the device is in ``launch_cost``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.base import LaunchEstimate
from ..records import BinaryFacts
from .constants import CostConstants
from .matrix_instructions import flops_per_warp
from .occupancy import HARDWARE

__all__ = ["BlockWork"]

_REGISTER_BYTES = 4
_WIDEST_ACCESS_BYTES = 16
_PLAIN_ACCESSES = ("load_global", "store_global")


@dataclass(frozen=True)
class BlockWork:
    """The mean block of one launch."""

    estimate: LaunchEstimate
    facts: BinaryFacts

    @property
    def num_programs(self) -> int:
        """Blocks of the launch."""
        return max(1, self.estimate.num_programs)

    @property
    def bytes_moved(self) -> float:
        """Its share of the device-memory traffic."""
        return self.estimate.bytes_moved / self.num_programs

    @property
    def flops(self) -> float:
        """Its floating-point operations."""
        return self.estimate.flops / self.num_programs

    @property
    def loop_bytes(self) -> int:
        """Bytes that one pass of the streaming loop asks for; 0 where the code does not say."""
        return self.facts.loop_load_bytes * self.facts.threads_per_block

    @property
    def num_passes(self) -> float:
        """Passes of the streaming loop: what its bytes ask for or its matrix instructions.

        Either can be too few: blocks may share bytes through the cache, warps may repeat each
        other's matrix instructions. Bytes that plain loads and stores around the loop can move
        ask for no passes: a kernel may load all it needs before one. (Asynchronous copies ahead of
        a loop are the start of its pipeline.)
        """
        if not self.loop_bytes:
            return 1.0
        by_bytes = self.bytes_moved / self.loop_bytes
        if not self._is_asynchronous and self.bytes_moved <= self._bytes_around_loop:
            by_bytes = 1.0
        by_flops = 0.0
        num_mma = self.facts.instruction_mix.get("mma", 0)
        flops_of_a_pass = num_mma * self._num_warps * flops_per_warp(self.facts.mma_kind)
        if flops_of_a_pass:
            by_flops = self.flops / flops_of_a_pass
        return max(1.0, by_bytes, by_flops)

    @property
    def bytes_taken_in(self) -> float:
        """Bytes that reach its SM, from device memory or from L2."""
        return max(self.bytes_moved, self.num_passes * self.loop_bytes)

    @property
    def bytes_in_flight(self) -> float:
        """The estimate, but no more than there is room for the answers.

        That is shared memory for asynchronous copies, registers for plain loads. A binary without
        device code has neither: then the estimate stands.
        """
        claimed, facts = self.estimate.bytes_in_flight, self.facts
        registers = facts.threads_per_block * facts.registers * _REGISTER_BYTES
        room = facts.smem_bytes if self._is_asynchronous else registers
        return max(1.0, min(claimed, room) if room else claimed)

    @property
    def passes_in_flight(self) -> float:
        """Bytes in flight in passes of the loop; the whole block is one where there is no loop."""
        in_flight = self.bytes_in_flight
        return in_flight / (self.loop_bytes or max(1.0, min(self.bytes_moved, in_flight)))

    @property
    def num_instructions(self) -> float:
        """Warp instructions that its warps issue."""
        repeats = (self.num_passes - 1.0) * self.facts.loop_instructions
        return self._num_warps * (self.facts.num_instructions + repeats)

    def chain_us(self, constants: CostConstants, clock_mhz: float) -> float:
        """Time of the block alone on the device: its dependent steps one after the other.

        Asynchronous copies run beside the instructions of the loop; plain loads make them wait.
        """
        cycle_us = constants.cycles_per_instruction / clock_mhz
        once = max(0, self.facts.num_instructions - self.facts.loop_instructions)
        loop_us = self.num_passes * self.facts.loop_instructions * cycle_us
        load_us = self.bytes_taken_in * constants.stream_latency_us / self.bytes_in_flight
        stream_us = max(loop_us, load_us) if self._is_asynchronous else loop_us + load_us
        return (
            self.estimate.serial_loads * constants.serial_latency_us + once * cycle_us + stream_us
        )

    @property
    def has_atomics(self) -> bool:
        """Whether its blocks meet through atomics."""
        return self.facts.instruction_mix.get("atomic", 0) > 0

    @property
    def _is_asynchronous(self) -> bool:
        return self.facts.instruction_mix.get("async_copy", 0) > 0

    @property
    def _bytes_around_loop(self) -> int:
        """Most that the loads and stores outside the loop can move, each run once."""
        mix = self.facts.instruction_mix
        count = sum(mix.get(name, 0) for name in _PLAIN_ACCESSES)
        return count * _WIDEST_ACCESS_BYTES * self.facts.threads_per_block - self.loop_bytes

    @property
    def _num_warps(self) -> int:
        return max(1, self.facts.threads_per_block // HARDWARE.warp_size)
