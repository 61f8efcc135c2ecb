"""A space with the recorded fate of every valid config: what a search is replayed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...errors import UsageError
from ...kernels.base import Config, ParameterValue
from ...search_spaces.listed import listed_space
from ...search_spaces.space import JointSpace
from ..order_statistics import timing_of
from ..records import Evaluation, Provenance, TrialStatus

__all__ = ["RecordedSpace", "failed", "measured", "recorded_space"]

Times = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class RecordedSpace:
    """Every valid config of a space and what became of it on somebody's GPU."""

    label: str
    """File, and the study in it where it holds several."""
    space: JointSpace
    evaluations: Mapping[Config, Evaluation]

    @cached_property
    def times_us(self) -> Times:
        """Times of the configs that worked, ascending."""
        times = [e.time_us for e in self.evaluations.values() if e.time_us is not None]
        return np.sort(np.array(times, dtype=np.float64))

    @property
    def optimum_us(self) -> float:
        """Time of the best config."""
        return float(self.times_us[0])

    @property
    def num_failed(self) -> int:
        """Valid configs without a time."""
        return len(self.evaluations) - len(self.times_us)


def recorded_space(
    label: str,
    evaluations: Sequence[Evaluation],
    values: Mapping[str, Sequence[ParameterValue]] | None = None,
) -> RecordedSpace:
    """The space whose valid set is exactly what was evaluated.

    Args:
        label: names it in outputs and errors.
        evaluations: one a config.
        values: values of each parameter in their order; None for what occurs.

    Raises:
        UsageError: a config comes twice, or none of them has a time.
    """
    by_config: dict[Config, Evaluation] = {}
    for evaluation in evaluations:
        if by_config.setdefault(evaluation.config, evaluation) is not evaluation:
            raise UsageError(f"{label}: config {evaluation.config} is recorded twice")
    if all(evaluation.time_us is None for evaluation in evaluations):
        raise UsageError(
            f"{label}: none of the {len(evaluations)} recorded configs has a time: "
            "there is nothing to search for"
        )
    templates: dict[str, list[Config]] = {}
    for config in by_config:
        templates.setdefault(config.template, []).append(config)
    parts = tuple(listed_space(name, configs, values) for name, configs in templates.items())
    return RecordedSpace(label, JointSpace(parts), by_config)


def measured(config: Config, time_us: float, samples_us: Sequence[float]) -> Evaluation:
    """A config that worked; its time is the recorded objective, whatever the samples say."""
    timing = replace(
        timing_of(samples_us or (time_us,)),
        median_us=time_us,
        samples_us=tuple(samples_us),
        num_samples=len(samples_us),
    )
    return Evaluation(config, TrialStatus.OK, Provenance.PUBLISHED, timing=timing)


def failed(config: Config, status: TrialStatus, reason: str) -> Evaluation:
    """A valid config without a time."""
    return Evaluation(config, status, Provenance.PUBLISHED, reason)
