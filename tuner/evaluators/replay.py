"""Plays a recorded space: a config ends as the recording says, at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ...kernels.base import Config
from ..records import Evaluation, Provenance
from ..replay.recorded import RecordedSpace

__all__ = ["ReplayEvaluator"]


class ReplayEvaluator:
    """Evaluates configs by looking them up; needs no compiler, GPU or process.

    Times are somebody's, so their provenance is published: they belong in no database of winners.
    """

    def __init__(self, recorded: RecordedSpace, *, capacity: int = 1) -> None:
        """``capacity`` configs are in flight at a time and end in the order of submission."""
        self.provenance = Provenance.PUBLISHED
        self.capacity = capacity
        self._evaluations = recorded.evaluations
        self._in_flight: deque[Config] = deque()

    def submit(self, config: Config) -> None:
        """See ``Evaluator``."""
        self._in_flight.append(config)

    def prepare(self, config: Config) -> None:
        """See ``Evaluator``; a recording needs no time."""

    def collect(self, until: float | None = None) -> Evaluation:
        """See ``Evaluator``."""
        return self._evaluate(self._in_flight.popleft())

    def finals(self, configs: Sequence[Config]) -> list[Evaluation]:
        """See ``Evaluator``; a recording has nothing more to say, so the times decide."""
        return sorted(
            (self._evaluate(config) for config in configs),
            key=lambda evaluation: math.inf if evaluation.time_us is None else evaluation.time_us,
        )

    def close(self) -> None:
        """See ``Evaluator``."""
        self._in_flight.clear()

    def _evaluate(self, config: Config) -> Evaluation:
        return replace(self._evaluations[config], provenance=self.provenance)
