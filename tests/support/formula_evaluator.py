"""An evaluator without processes: times from a formula, failures by config, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilescout.kernels.base import Config
from tilescout.tuner.records import Evaluation, Provenance, Timing, TrialStatus
from toy_op import toy_time_us


def timing(time_us: float) -> Timing:
    return Timing(time_us, time_us, time_us, time_us, time_us, (time_us,), 1)


class FormulaEvaluator:
    """Evaluates by ``toy_time_us``; ``fate`` may turn a config into a failure."""

    def __init__(
        self,
        *,
        provenance: Provenance = Provenance.MEASURED,
        capacity: int = 2,
        fate: Callable[[Config], tuple[TrialStatus, str] | None] = lambda config: None,
        interrupt_after: int | None = None,
    ) -> None:
        self.provenance = provenance
        self.capacity = capacity
        self.evaluated: list[Config] = []
        self.finalists: list[Config] = []
        self.most_in_flight = 0
        self._fate = fate
        self._in_flight: list[Config] = []
        self._interrupt_after = interrupt_after

    def submit(self, config: Config) -> None:
        self._in_flight.append(config)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))

    def prepare(self, config: Config) -> None:
        """Nothing takes time."""

    def collect(self, until: float | None = None) -> Evaluation:
        if len(self.evaluated) == self._interrupt_after:
            raise KeyboardInterrupt
        config = self._in_flight.pop(0)
        self.evaluated.append(config)
        return self.evaluate(config)

    def evaluate(self, config: Config) -> Evaluation:
        fate = self._fate(config)
        if fate is not None:
            return Evaluation(config, fate[0], self.provenance, fate[1])
        return Evaluation(
            config, TrialStatus.OK, self.provenance, timing=timing(toy_time_us(config))
        )

    def finals(self, configs: Sequence[Config]) -> list[Evaluation]:
        self.finalists = list(configs)
        return sorted((self.evaluate(c) for c in configs), key=lambda e: e.time_us or float("inf"))

    def close(self) -> None:
        self._in_flight.clear()


class RecordingListener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str, int]] = []
        self.trials: list[tuple[int, float | None, bool]] = []
        self.winners: list[object] = []

    def study_started(self, label, sku, problem, total) -> None:
        self.started.append((label, sku, total))

    def trial_ended(self, record, best_us, is_new) -> None:
        self.trials.append((record.number, best_us, is_new))

    def study_ended(self, winner) -> None:
        self.winners.append(winner)
