"""What the driver says of the GPU while it is timed: clock and reasons for a lower one.

``GpuState`` reads; ``ClockWatch`` judges whether a block of samples was disturbed. One reading is
two calls of NVML, made while the device works on the block, so it costs the device nothing.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

__all__ = ["ClockWatch", "GpuState", "nvml_reader"]

_log = logging.getLogger(__name__)

THROTTLE_REASONS = {
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "software thermal slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
}
"""Reasons that make a kernel slower than it is; an idle GPU or fixed clocks are none."""


@dataclass(frozen=True)
class GpuState:
    """One reading."""

    clock_mhz: int
    """Of the SMs."""
    throttled_by: frozenset[str] = frozenset()


class ClockWatch:
    """Judges each reading against those before: a GPU that is always capped is not disturbed."""

    def __init__(
        self,
        read: Callable[[], GpuState | None],
        *,
        tolerance: float = 0.03,
        max_repeats: int = 2,
        num_remembered: int = 32,
        min_known: int = 4,
    ) -> None:
        """Takes the reader.

        Args:
            read: Gives a reading, or None where the driver does not.
            tolerance: Share by which a clock may be off the median of those before.
            max_repeats: Times that one block may be repeated.
            num_remembered: Readings that the median is of.
            min_known: Readings before which none is judged.
        """
        self.max_repeats = max_repeats
        self.num_disturbed = 0
        """Blocks that were found disturbed so far."""
        self._read = read
        self._tolerance = tolerance
        self._min_known = min_known
        self._seen: deque[GpuState] = deque(maxlen=num_remembered)
        self._was_disturbed = False

    def disturbance(self) -> str | None:
        """Reads the state now; None if it is as before, else what disturbs, for people."""
        state = self._read()
        if state is None:
            return None
        reason = self._reason(state) if len(self._seen) >= self._min_known else None
        self._seen.append(state)
        self._was_disturbed = reason is not None
        if reason is not None:
            self.num_disturbed += 1
            _log.debug("a block of samples was disturbed: %s", reason)
        return reason

    def _reason(self, state: GpuState) -> str | None:
        last = self._seen[-1]
        new = state.throttled_by - last.throttled_by
        # Seen twice in a row, it is how the GPU runs this kernel: a heavy one lowers the clock.
        if self._was_disturbed and not new and self._is_near(state.clock_mhz, last.clock_mhz):
            return None
        if new:
            return f"newly throttled by {', '.join(sorted(new))}"
        usual_mhz = statistics.median(seen.clock_mhz for seen in self._seen)
        if self._is_near(state.clock_mhz, usual_mhz):
            return None
        return f"clock of {state.clock_mhz} MHz, {usual_mhz:.0f} MHz before"

    def _is_near(self, clock_mhz: float, other_mhz: float) -> bool:
        return abs(clock_mhz - other_mhz) <= self._tolerance * other_mhz


def nvml_reader(uuid: str) -> Callable[[], GpuState | None]:
    """Reads the GPU of this UUID; gives None for ever once the driver refuses to answer."""
    try:
        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        _log.info("clocks are not watched: %s", error)
        return lambda: None
    is_answering = True

    def read() -> GpuState | None:
        nonlocal is_answering
        if not is_answering:
            return None
        try:
            clock_mhz = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except pynvml.NVMLError as error:
            _log.info("clocks are no longer watched: %s", error)
            is_answering = False
            return None
        reasons = frozenset(name for bit, name in THROTTLE_REASONS.items() if bits & bit)
        return GpuState(clock_mhz, reasons)

    return read
