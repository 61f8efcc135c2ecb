"""Proposes configs: the interface, and Optuna's tree-structured Parzen estimator behind it.

The template is the study's first parameter and each template's own parameters hang under it, so
that one search decides language, algorithm and tile. The Optuna study lives in memory and is
rebuilt from stored trials by telling them again.
"""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Sequence
from typing import Protocol, cast

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, Trial, TrialState

from ...kernels.base import Config, ParameterValue
from ...search_spaces.parameters import Parameter
from ...search_spaces.space import JointSpace
from ..records import Evaluation
from .nearest import UntriedConfigs

__all__ = ["Sampler", "TpeSampler"]

_TEMPLATE = "template"
_FAILED_VALUE = math.log(1e12)
"""Objective of a trial without a time: slower than anything that runs, so that it is avoided."""


class Sampler(Protocol):
    """Decides what to try next; never returns a config twice, nor one it was told of."""

    def ask(self, n: int) -> list[Config]:
        """Up to ``n`` configs to try; fewer once the space is used up."""

    def tell(self, evaluation: Evaluation) -> None:
        """Takes in how a config ended, whether this sampler asked for it or an earlier run did."""


class TpeSampler:
    """Seeds first, then a multivariate TPE on the logarithm of the time."""

    def __init__(self, space: JointSpace, *, seed: int, first: Sequence[Config] = ()) -> None:
        """``first`` are tried before anything else, in this order."""
        self._space = space
        self._untried = UntriedConfigs(space)
        self._queue = [config for config in dict.fromkeys(first) if config in self._untried]
        self._rng = random.Random(seed)
        self._study = _new_study(seed)
        self._open: dict[Config, Trial] = {}
        self._templates = CategoricalDistribution([part.template for part in space.spaces])

    def ask(self, n: int) -> list[Config]:
        """See ``Sampler``."""
        configs: list[Config] = []
        while len(configs) < n:
            config = self._next()
            if config is None:
                break
            self._untried.remove(config)
            configs.append(config)
        return configs

    def tell(self, evaluation: Evaluation) -> None:
        """See ``Sampler``."""
        config = evaluation.config
        self._untried.remove(config)
        value = math.log(evaluation.time_us) if evaluation.time_us else _FAILED_VALUE
        trial = self._open.pop(config, None)
        if trial is not None and self._params(config) == trial.params:
            self._study.tell(trial, value)
            return
        if trial is not None:  # the proposal was moved: only what ran is worth learning from
            self._study.tell(trial, state=TrialState.FAIL)
        if self._space.check(config) is None:
            self._study.add_trial(self._finished(config, value))

    def _next(self) -> Config | None:
        while self._queue:
            first = self._queue.pop(0)
            if first in self._untried:
                return first
        if not len(self._untried):
            return None
        trial = self._study.ask()
        config = self._untried.nearest(self._suggest(trial), self._rng)
        assert config is not None
        self._open[config] = trial
        return config

    def _suggest(self, trial: Trial) -> Config:
        """What Optuna proposes; constraints are not applied."""
        template = str(trial.suggest_categorical(_TEMPLATE, self._templates.choices))
        space = self._space.of(template)
        values: dict[str, ParameterValue] = {}
        for parameter in space.parameters:
            if parameter in space.active_parameters(values):
                name = _name(template, parameter)
                values[parameter.name] = _suggest_value(trial, name, parameter)
        return Config.of(template, values)

    def _params(self, config: Config) -> dict[str, ParameterValue]:
        """The config in Optuna's terms: ordered parameters by the index of their value."""
        params: dict[str, ParameterValue] = {_TEMPLATE: config.template}
        for parameter in self._active(config):
            value = config[parameter.name]
            params[_name(config.template, parameter)] = (
                parameter.values.index(value) if parameter.is_ordered else value
            )
        return params

    def _finished(self, config: Config, value: float) -> FrozenTrial:
        distributions: dict[str, BaseDistribution] = {_TEMPLATE: self._templates}
        for parameter in self._active(config):
            distributions[_name(config.template, parameter)] = _distribution(parameter)
        return optuna.trial.create_trial(
            params={**self._params(config)}, distributions=distributions, value=value
        )

    def _active(self, config: Config) -> tuple[Parameter, ...]:
        return self._space.of(config.template).active_parameters(config.as_dict())


def _name(template: str, parameter: Parameter) -> str:
    return f"{template}.{parameter.name}"


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.is_ordered:
        return IntDistribution(0, len(parameter.values) - 1)
    return CategoricalDistribution(parameter.values)


def _suggest_value(trial: Trial, name: str, parameter: Parameter) -> ParameterValue:
    if parameter.is_ordered:
        return parameter.values[trial.suggest_int(name, 0, len(parameter.values) - 1)]
    chosen = trial.suggest_categorical(name, parameter.values)
    return parameter.values[parameter.values.index(cast("ParameterValue", chosen))]


def _new_study(seed: int) -> optuna.Study:
    """A study in memory that says nothing of itself."""
    with warnings.catch_warnings():
        # ``group`` is what fits a model to each template's own parameters; still experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=True
        )
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return optuna.create_study(sampler=sampler, direction="minimize")
    finally:
        logger.setLevel(level)
