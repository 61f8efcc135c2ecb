"""Proposes configs: the interface, and any of Optuna's samplers behind it by ask and tell.

The Optuna study lives in memory, holds every trial as it really ran, and is rebuilt from stored
trials by telling them again.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import optuna
from optuna.distributions import IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState, create_trial

from ...kernels.base import Config, ParameterValue
from ...search_spaces.space import JointSpace
from ..records import Evaluation
from .foreign import ForeignStart
from .nearest import UntriedConfigs
from .terms import FAILED_VALUE, FOREIGN, TEMPLATE, OptunaTerms

__all__ = ["OptunaSampler", "Sampler"]


class Sampler(Protocol):
    """Decides what to try next; never returns a config twice, nor one it was told of."""

    def ask(self, n: int) -> list[Config]:
        """Up to ``n`` configs to try; fewer once the space is used up."""

    def tell(self, evaluation: Evaluation) -> None:
        """Takes in how a config ended, whether this sampler asked for it or an earlier run did."""


class OptunaSampler:
    """What is to come first, then what Optuna's sampler proposes, moved off what was tried."""

    def __init__(
        self,
        space: JointSpace,
        sampler: BaseSampler,
        *,
        seed: int,
        first: Sequence[Config] = (),
        foreign: Sequence[Config] = (),
    ) -> None:
        """``first`` are tried before anything else, ``foreign`` as ``ForeignStart`` says."""
        self._space = space
        self._terms = OptunaTerms(space)
        self._untried = UntriedConfigs(space)
        self._queue = deque(c for c in dict.fromkeys(first) if c in self._untried)
        self._first = frozenset(first)
        self._foreign = ForeignStart([c for c in foreign if c not in self._first])
        self._rng = random.Random(seed)
        self.study = _silent_study(sampler)
        """Every trial, the logarithm of its time as the objective."""
        self._open: dict[Config, int] = {}

    def ask(self, n: int) -> list[Config]:
        """See ``Sampler``."""
        configs: list[Config] = []
        while len(configs) < n:
            config = self._next()
            if config is None:
                break
            configs.append(config)
        return configs

    def tell(self, evaluation: Evaluation) -> None:
        """See ``Sampler``."""
        config = evaluation.config
        self._untried.remove(config)
        if config not in self._first:
            self._foreign.ended(evaluation)
        value = math.log(evaluation.time_us) if evaluation.time_us else FAILED_VALUE
        number = self._open.pop(config, None)
        if number is not None:
            self.study.tell(number, value)
        elif self._space.check(config) is None:
            self._add(config, value)

    def _next(self) -> Config | None:
        while self._queue:
            first = self._queue.popleft()
            if first in self._untried:
                return self._opened(first)
        if not len(self._untried):
            return None
        foreign = self._foreign.next(self._untried.__contains__)
        if foreign is not None:
            return self._opened(foreign)
        trial = self.study.ask()
        proposal = self._suggest(trial)
        config = self._untried.nearest(proposal, self._rng)
        if config is not None and self._terms.params(config) == trial.params:
            self._untried.remove(config)
            self._open[config] = trial.number
            return config
        # The proposal was moved: only what runs is worth learning from.
        self.study.tell(trial, state=TrialState.FAIL)
        return None if config is None else self._opened(config)

    def _opened(self, config: Config) -> Config:
        self._untried.remove(config)
        self._open[config] = self._add(config, None)
        return config

    def _add(self, config: Config, value: float | None) -> int:
        """Puts a trial into the study, under way where it has no value; returns its number."""
        trial = create_trial(
            state=TrialState.RUNNING if value is None else TrialState.COMPLETE,
            params={**self._terms.params(config)},
            distributions={**self._terms.distributions(config)},
            value=value,
            user_attrs={FOREIGN: config in self._foreign},
        )
        self.study.add_trial(trial)
        return self.study.get_trials(deepcopy=False)[-1].number

    def _suggest(self, trial: Trial) -> Config:
        """What Optuna proposes; constraints are not applied."""
        whole = self._terms.config(trial.relative_params) if trial.relative_params else None
        if whole is not None and self._space.check(whole) is None:
            for name in self._terms.params(whole):
                self._value(trial, name)
            return whole
        template = str(self._value(trial, TEMPLATE))
        space = self._space.of(template)
        values: dict[str, ParameterValue] = {}
        for parameter in space.parameters:
            if parameter in space.active_parameters({**values, parameter.name: ""}):
                param = self._value(trial, self._terms.name(template, parameter))
                values[parameter.name] = self._terms.value(parameter, param)
        return Config.of(template, values)

    def _value(self, trial: Trial, name: str) -> object:
        distribution = self._terms.all_distributions[name]
        if isinstance(distribution, IntDistribution):
            return trial.suggest_int(name, distribution.low, distribution.high)
        return trial.suggest_categorical(name, distribution.choices)


def _silent_study(sampler: BaseSampler) -> optuna.Study:
    """A study in memory that says nothing of itself."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return optuna.create_study(sampler=sampler, direction="minimize")
    finally:
        logger.setLevel(level)
