"""Which parameters a search's times depend on, by Optuna's importance evaluators."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import fsum
from types import MappingProxyType
from typing import Any

import optuna

from ...kernels.base import Config

__all__ = ["TEMPLATE", "parameter_importance", "preload"]

TEMPLATE = "template"
"""The choice among templates, as one more parameter."""
MAX_TIMES = 1000
"""Of more, this many spread evenly over the times: twice as many take four times as long, and the
leading parameters stay, though shares move by a few hundredths."""
_FEWEST_TIMES = 8
_INACTIVE = "inactive"
_NOTHING: Mapping[str, float] = MappingProxyType({})


def parameter_importance(times: Iterable[tuple[Config, float]]) -> Mapping[str, float]:
    """Each parameter's share, all shares making 1, the largest first.

    PED-ANOVA: a parameter weighs as much as its values among the fastest tenth of the configs
    differ from its values among all. A parameter that is inactive in a config has a value for
    that. Empty for fewer than eight times, or where nothing varies or matters.

    Args:
        times: configs with their times, of one problem, or of several where each is a ratio to
            the best of its problem.
    """
    ranked = sorted(times, key=lambda pair: pair[1])
    if len(ranked) < _FEWEST_TIMES:
        return _NOTHING
    ranked = _thinned(ranked)
    rows = [{TEMPLATE: config.template, **config.as_dict()} for config, _ in ranked]
    values = {name: _values(rows, name) for name in dict.fromkeys(n for row in rows for n in row)}
    varying = {name: found for name, found in values.items() if len(set(found)) > 1}
    if not varying:
        return _NOTHING
    return _evaluated(varying, [time for _, time in ranked])


def preload() -> None:
    """Imports what ``parameter_importance`` otherwise imports on its first call, in a second."""
    importlib.import_module("optuna.importance")


def _thinned(ranked: list[tuple[Config, float]]) -> list[tuple[Config, float]]:
    if len(ranked) <= MAX_TIMES:
        return ranked
    step = (len(ranked) - 1) / (MAX_TIMES - 1)
    return [ranked[round(index * step)] for index in range(MAX_TIMES)]


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    return [str(row.get(name, _INACTIVE)) for row in rows]


def _evaluated(values: Mapping[str, Sequence[str]], times: Sequence[float]) -> Mapping[str, float]:
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(sorted(set(found)))
        for name, found in values.items()
    }
    trials = [
        optuna.trial.create_trial(
            params={name: found[index] for name, found in values.items()},
            distributions=distributions,
            value=time,
        )
        for index, time in enumerate(times)
    ]
    with _silence():
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        study = optuna.create_study()
        study.add_trials(trials)
        weights = evaluator.evaluate(study)
    total = fsum(weights.values())
    # By name among equals, and summed without rounding: Optuna goes through a set of names, whose
    # order is another in every process.
    order = sorted(weights, key=lambda name: (-weights[name], name))
    return {name: weights[name] / total for name in order} if total else _NOTHING


@contextmanager
def _silence() -> Iterator[None]:
    """Optuna neither greets its study nor warns that the evaluator is young."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        logger.setLevel(level)
