"""The protocol of timing one config: estimate, cut if hopeless, warm up, sample until sure.

Inputs are rotated so that each launch finds its data in device memory, not in L2: a serving step
touches gigabytes between two calls of the same kernel. Samples come from many launches each, so
that the clock's resolution and the host's jitter vanish in them. ``docs/measuring.md`` has the
reasons and the figures.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .order_statistics import MIN_SAMPLES, timing_of
from .records import Timing
from .timers import Call, Run, Timer

__all__ = [
    "MeasureSettings",
    "Measurement",
    "count_copies",
    "count_launches",
    "measure",
    "sample_until_enough",
    "warm_up",
]


@dataclass(frozen=True)
class MeasureSettings:
    """How much measuring is enough."""

    cold_l2_factor: float = 4.0
    """Copies of the data together cover the L2 this many times; its replacement is not strict."""
    max_copies: int = 512
    memory_share: float = 0.4
    """Share of the free device memory that copies may take; the reference needs room too."""
    run_target_us: float = 4000.0
    """Duration of one sample: a thousand times the clock's resolution."""
    max_launches: int = 512
    """Most launches in one sample: capturing one costs the host tens of microseconds."""
    pilot_launches: int = 8
    prune_ratio: float = 1.5
    """Cut a config whose estimate exceeds the best so far by this factor."""
    stop_ratio: float = 1.05
    """Stop sampling a config whose whole interval lies above the best by this factor."""
    warmup_us: float = 10_000.0
    min_samples: int = MIN_SAMPLES
    slow_samples: int = 3
    """Enough where the estimate and every one of them lie above ``stop_ratio`` times the best."""
    max_samples: int = 40
    interval_half_width: float = 0.01
    """Enough is known once the interval of the median is this narrow, as a share of it."""
    max_measure_s: float = 1.0
    """Sampling ends here even if the interval is still wide."""
    noise: float = 0.005
    """A finalist must beat the default by more than this."""
    max_rounds: int = 60
    """Most samples of a finalist; a third of this is the average allowance."""
    max_finals_s: float = 20.0


@dataclass(frozen=True)
class Measurement:
    """What timing a config gave."""

    timing: Timing
    is_pruned: bool = False
    """It was cut; the timing is only an estimate."""


# A graph replay has no host overhead, an eager launch has: tens of microseconds.
_EAGER_OVERHEAD_US = 200.0


def measure(
    calls: Sequence[Call],
    timer: Timer,
    settings: MeasureSettings,
    *,
    best_us: float | None = None,
    keep_samples: bool = False,
    num_variants: int = 1,
) -> Measurement:
    """Times a config whose launches are ``calls``, one a copy of the data.

    Args:
        calls: Launches that go round the copies.
        timer: Clock of the device.
        settings: How much is enough.
        best_us: Best time so far, against which a hopeless config is cut.
        keep_samples: Whether the result keeps the raw samples.
        num_variants: Kinds of data that the copies hold in turn; the time is the mean over them.
    """
    limit_us = math.inf if best_us is None else settings.prune_ratio * best_us
    rough_us = statistics.fmean(timer.rough_us(call) for call in calls[:num_variants])
    if rough_us - _EAGER_OVERHEAD_US > limit_us:
        return Measurement(timing_of([rough_us]), is_pruned=True)
    # Compilers load their code at the first launch, which no capture may contain.
    for call in calls[num_variants:]:
        call()
    pilot = timer.prepare(calls, min(len(calls), settings.pilot_launches))
    estimates_us = timer.time_us([pilot, pilot])
    if min(estimates_us) > limit_us:
        return Measurement(timing_of(estimates_us), is_pruned=True)
    run = timer.prepare(calls, count_launches(min(estimates_us), len(calls), settings))
    warm_up(run, timer, min(estimates_us), settings)
    deadline = time.monotonic() + settings.max_measure_s
    samples_us = sample_until_enough(
        lambda count: timer.time_us([run] * count, is_kept=True),
        settings,
        best_us,
        num_first=_first_block(min(estimates_us), settings, best_us),
        is_late=lambda: time.monotonic() >= deadline,
    )
    return Measurement(timing_of(samples_us, keep_samples=keep_samples))


def warm_up(run: Run, timer: Timer, estimate_us: float, settings: MeasureSettings) -> None:
    """Keeps the device busy until its clocks and its caches have settled."""
    run_us = max(estimate_us * run.num_launches, 1.0)
    timer.time_us([run] * max(1, math.ceil(settings.warmup_us / run_us)))


def count_launches(estimate_us: float, num_copies: int, settings: MeasureSettings) -> int:
    """Launches of one sample: whole turns round the copies, so that each finds its data cold."""
    turn_us = max(estimate_us * num_copies, 1e-3)
    turns = round(settings.run_target_us / turn_us)
    return num_copies * max(1, min(turns, settings.max_launches // num_copies))


def count_copies(
    *,
    bytes_moved: int,
    bytes_held: int,
    l2_bytes: int,
    free_bytes: int,
    settings: MeasureSettings,
    num_variants: int = 1,
) -> int:
    """Private copies of the data to rotate: enough to cover the L2 several times, memory allowing.

    Args:
        bytes_moved: What one launch reads and writes.
        bytes_held: What one copy takes in memory.
        l2_bytes: Size of the cache to outrun.
        free_bytes: Device memory that is free.
        settings: Factors and caps.
        num_variants: Kinds of data that copies hold in turn; each kind gets equally many.
    """
    wanted = math.ceil(settings.cold_l2_factor * l2_bytes / max(bytes_moved, 1))
    affordable = int(settings.memory_share * free_bytes / max(bytes_held, 1))
    allowed = min(affordable, settings.max_copies)
    turns = min(math.ceil(max(wanted, 2) / num_variants), allowed // num_variants)
    return num_variants * max(1, turns)


def sample_until_enough(
    draw: Callable[[int], Sequence[float]],
    settings: MeasureSettings,
    best_us: float | None,
    *,
    num_first: int | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Samples of one config: few where they agree or are clearly slow, more where they scatter.

    Args:
        draw: Takes so many samples.
        settings: How much is enough.
        best_us: Best time so far.
        num_first: Samples of the first block; None for ``min_samples``.
        is_late: Asked before every block but the first; sampling ends when it says so.
    """
    samples_us = list(draw(min(num_first or settings.min_samples, settings.max_samples)))
    while not (_is_enough(samples_us, settings, best_us) or is_late()):
        samples_us += draw(min(settings.min_samples, settings.max_samples - len(samples_us)))
    return samples_us


def _first_block(estimate_us: float, settings: MeasureSettings, best_us: float | None) -> int:
    """A few samples will do for what already looks slow; each block costs an untimed replay."""
    looks_slow = best_us is not None and estimate_us > settings.stop_ratio * best_us
    return settings.slow_samples if looks_slow else settings.min_samples


def _is_enough(
    samples_us: Sequence[float], settings: MeasureSettings, best_us: float | None
) -> bool:
    if len(samples_us) >= settings.max_samples:
        return True
    timing = timing_of(samples_us)
    if best_us is not None and timing.ci_low_us > settings.stop_ratio * best_us:
        return True
    if len(samples_us) < settings.min_samples:
        return False
    half_width = (timing.ci_high_us - timing.ci_low_us) / 2
    return half_width <= settings.interval_half_width * timing.median_us
