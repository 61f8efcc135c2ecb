"""The default sampler: a random start, then batches of three kinds.

A batch holds what the forest likes, neighbours of the best, and a random config.

Works on Optuna's terms alone: what it knows of a search is the trials in the Optuna study, so it
goes on from trials that anyone else put there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from ...kernels.base import Config
from ...search_spaces.space import JointSpace
from .candidates import Candidates
from .forest import Forest, ForestSettings, Vector
from .terms import FAILED_VALUE, FOREIGN, OptunaTerms

__all__ = ["PortfolioSampler", "PortfolioSettings"]

_STATES = (TrialState.COMPLETE, TrialState.RUNNING)
_NUM_DRAWN = 16
"""Random configs that are drawn to find an untried one before all are looked through."""
_NUM_CENTRES = 5
"""Best trials whose neighbours are candidates where a space is too large to score it all."""


@dataclass(frozen=True)
class PortfolioSettings:
    """How a search divides its trials; chosen on recorded spaces, see docs/search.md."""

    start_share: float = 0.1
    """Share of the trials for the start."""
    start_limits: tuple[int, int] = (6, 20)
    """Fewest and most trials of the start."""
    batch_size: int = 10
    """Trials from one fit."""
    num_polish: int = 3
    """Of a batch, neighbours of the best config."""
    num_random: int = 1
    """Of a batch, random configs: they get a search out of a basin that the forest is fond of."""
    forest: ForestSettings = field(default_factory=ForestSettings)


@dataclass(frozen=True)
class _History:
    """The trials of a study: what ended with its logarithm of time, what is under way, the rest."""

    ended: tuple[Config, ...]
    log_times: Vector
    """Infinite where a trial failed."""
    in_flight: tuple[Config, ...]
    foreign: tuple[Config, ...]
    """Foreign winners, tried but not learnt from: a good one can lie in a poor basin."""

    @property
    def tried(self) -> set[Config]:
        return {*self.ended, *self.in_flight, *self.foreign}

    def best(self, n: int) -> list[Config]:
        """The fastest ones that worked."""
        order = np.argsort(self.log_times, kind="stable")[:n]
        return [self.ended[row] for row in order if np.isfinite(self.log_times[row])]


class PortfolioSampler(BaseSampler):
    """Proposes whole configs, in batches; never one that the study has."""

    def __init__(
        self,
        space: JointSpace,
        *,
        seed: int,
        num_trials: int,
        settings: PortfolioSettings | None = None,
    ) -> None:
        """``num_trials`` is how long the search may become: the start is a share of it."""
        self._settings = settings or PortfolioSettings()
        low, high = self._settings.start_limits
        self._start = min(high, max(low, round(self._settings.start_share * num_trials)))
        self._rng = random.Random(seed)
        self._terms = OptunaTerms(space)
        self._candidates = Candidates(space, self._rng)
        self._queue: deque[Config] = deque()
        self._num_fresh = 0
        self._fallback = RandomSampler(seed)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All parameters of all templates; a proposal has those of one template."""
        return {**self._terms.all_distributions}

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """The next config of the batch; empty where no config is left."""
        if not self._queue:
            self._queue.extend(self._propose(self._history(study, trial)))
        return {**self._terms.params(self._queue.popleft())} if self._queue else {}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """A random value, for parameters that the space does not have."""
        return self._fallback.sample_independent(study, trial, param_name, param_distribution)

    def _history(self, study: optuna.Study, new: FrozenTrial) -> _History:
        trials = [
            trial
            for trial in study.get_trials(deepcopy=False, states=_STATES)
            if trial.number != new.number
        ]
        own = [trial for trial in trials if not trial.user_attrs.get(FOREIGN)]
        foreign = [trial for trial in trials if trial.user_attrs.get(FOREIGN)]
        ended = [trial for trial in own if trial.state is TrialState.COMPLETE]
        running = [trial for trial in own if trial.state is TrialState.RUNNING]
        values = np.array([trial.value for trial in ended], dtype=np.float64)
        values[values >= FAILED_VALUE] = np.inf
        return _History(
            self._configs(ended), values, self._configs(running), self._configs(foreign)
        )

    def _configs(self, trials: Sequence[FrozenTrial]) -> tuple[Config, ...]:
        return tuple(self._terms.config(trial.params) for trial in trials)

    def _propose(self, history: _History) -> list[Config]:
        num_tried = len(history.ended) + len(history.in_flight)
        # Foreign winners do not count, and however many seeds came first, half is fresh.
        lacks_fresh = self._num_fresh < self._start // 2 and num_tried < 2 * self._start
        if num_tried < self._start or lacks_fresh:
            self._num_fresh += 1
            return self._fresh(history.tried)
        if not history.best(1):
            return self._fresh(history.tried)
        return self._batch(history)

    def _fresh(self, tried: set[Config]) -> list[Config]:
        """One untried config at random."""
        for config in self._candidates.draw(_NUM_DRAWN):
            if config not in tried:
                return [config]
        left, _ = self._candidates.untried(tried, ())
        return [self._rng.choice(left)] if left else []

    def _batch(self, history: _History) -> list[Config]:
        """Neighbours of the best, random configs and the forest's choice, without repeats."""
        tried = history.tried
        configs, rows = self._candidates.untried(tried, history.best(_NUM_CENTRES))
        if not configs:
            return []
        settings = self._settings
        forest = Forest(
            self._candidates.rows(history.ended),
            history.log_times,
            settings.forest,
            self._rng.getrandbits(31),
        )
        scores = forest.scores(rows) + 1e-6 * self._noise(len(configs))
        chosen = self._near_best(history, configs, scores)
        chosen += self._rng.sample(range(len(configs)), min(settings.num_random, len(configs)))
        scores[chosen] = -np.inf
        others = [*(configs[row] for row in chosen), *history.in_flight]
        num_left = settings.batch_size - len(chosen)
        chosen += forest.batch(rows, scores, self._candidates.rows(others), num_left)
        return [configs[row] for row in dict.fromkeys(chosen)]

    def _near_best(self, history: _History, configs: Sequence[Config], scores: Vector) -> list[int]:
        """The most promising neighbours of the best."""
        row_of = {config: row for row, config in enumerate(configs)}
        near = self._candidates.near(history.tried, history.best(1))
        rows = [row_of[config] for config in near if config in row_of]
        return sorted(rows, key=lambda row: -scores[row])[: self._settings.num_polish]

    def _noise(self, n: int) -> Vector:
        """Breaks ties between equal scores."""
        return np.random.default_rng(self._rng.getrandbits(32)).random(n)
