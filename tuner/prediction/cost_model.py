"""Predicts the time of a config from what its binary needs and what its launches do.

A roofline-and-occupancy model: docs/prediction.md has the formulas, their sources and what they
cannot see. Good for ranking configs of one problem on one device, not for comparing devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...kernels.base import LaunchEstimate, Problem
from ...kernels.device import DeviceSpec
from ..records import BinaryFacts, TrialStatus
from .constants import CONSTANTS, CostConstants
from .launch_cost import LaunchPrediction, predict_launch
from .occupancy import infeasible_reason

__all__ = ["Prediction", "predict"]


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
        predict_launch(estimate, by_name[estimate.kernel], problem.compute_dtype, device, constants)
        for estimate in estimates
    )
    return Prediction(TrialStatus.OK, launches=launches)
