"""Jobs of one evaluator in the GPU worker: what becomes of each, and how long they held the GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...kernels.base import Config
from .. import worker
from ..gpu_worker import GpuWorker
from ..process_pool import JobCrashedError, JobMemoryError, JobTimeoutError
from ..records import TrialStatus
from ..worker import Outcome, RaceOutcome

__all__ = ["GpuJobs"]

_MAX_REASON = 200

_log = logging.getLogger(__name__)


class GpuJobs:
    """Runs one job at a time; that the worker dies of one is that job's outcome."""

    def __init__(self, gpu: GpuWorker, *, run_timeout_s: float, max_finals_s: float) -> None:
        """Starts nothing.

        Args:
            gpu: Has taken on the task, or will before the first job.
            run_timeout_s: Limit for judging and timing one config.
            max_finals_s: How long a race takes without that.
        """
        self._gpu = gpu
        self._run_timeout_s = run_timeout_s
        self._max_finals_s = max_finals_s
        self.busy_s = 0.0
        """Time that the worker held the GPU: verifying, warming up, timing."""
        self.num_disturbed = 0
        """Blocks of samples that were repeated because the GPU's clock or throttling changed."""
        self.last_end = 0.0
        """When the last job ended, in seconds of ``time.monotonic``; 0 before the first."""

    def make_ready(self) -> None:
        """Starts the worker where it is not running.

        Raises:
            DeviceError: the GPU cannot be used.
        """
        self._gpu.make_ready()

    def run(self, job: Callable[..., Outcome], config: Config, *args: object) -> Outcome:
        """What became of a job on one config.

        Raises:
            DeviceError: the GPU cannot be used, whatever the config.
        """
        self._gpu.make_ready()  # a new process is not the config's cost
        start = time.monotonic()
        try:
            outcome = self._gpu.run(self._run_timeout_s, job, config, *args)
        except JobTimeoutError as error:
            outcome = Outcome(TrialStatus.TIMEOUT, f"running {error}")
        except JobMemoryError as error:
            outcome = Outcome(TrialStatus.OUT_OF_RESOURCES, f"running {error}")
        except JobCrashedError as error:
            outcome = Outcome(TrialStatus.CRASHED, str(error)[:_MAX_REASON])
        else:
            if outcome.is_device_lost:
                self._gpu.discard()
        self.last_end = time.monotonic()
        self._note_disturbed(outcome.num_disturbed, str(config))
        held_s = outcome.measure_s or self.last_end - start
        self.busy_s += held_s
        return replace(outcome, measure_s=held_s)

    def race(self, configs: Sequence[Config]) -> RaceOutcome | None:
        """What became of the finalists, or None where the race brought the worker down."""
        start = time.monotonic()
        try:
            timeout_s = self._max_finals_s + self._run_timeout_s
            result = self._gpu.run(timeout_s, worker.race, list(configs))
        except (JobCrashedError, JobTimeoutError) as error:
            _log.warning("the finals broke down: %s", error)
            return None
        finally:
            self.last_end = time.monotonic()
            self.busy_s += self.last_end - start
        if result.is_device_lost:
            self._gpu.discard()
            return None
        self._note_disturbed(result.num_disturbed, "finals")
        return result

    def _note_disturbed(self, count: int, where: str) -> None:
        if count:
            self.num_disturbed += count
            _log.info(
                "%d block(s) repeated, the GPU's clock or throttling changed: %s", count, where
            )
