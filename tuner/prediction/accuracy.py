"""How well predicted times rank the measured ones of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ...kernels import registry
from ...kernels.base import Problem
from ...kernels.device import DeviceSpec
from ..records import Evaluation, TrialStatus
from .constants import CONSTANTS, CostConstants
from .cost_model import predict

__all__ = ["Accuracy", "accuracy", "rank_correlation"]

_TIMED = (TrialStatus.OK, TrialStatus.PRUNED)


@dataclass(frozen=True)
class Accuracy:
    """The model against the measurements of one problem on one device."""

    num_ok: int
    num_pruned: int
    spearman: float
    """Rank correlation over trials that ended ok."""
    spearman_with_pruned: float
    """The same with those that were cut, whose times are rough but clearly slow."""
    best_of_top: float
    """Best measured time among the configs predicted best, over the best measured of all; infinite
    where none of them ended ok."""
    bias: float
    """Median of predicted over measured time of the trials that ended ok."""


def accuracy(
    problem: Problem,
    device: DeviceSpec,
    evaluations: Sequence[Evaluation],
    *,
    num_top: int = 10,
    constants: CostConstants = CONSTANTS,
) -> Accuracy | None:
    """The accuracy over those with a measured time; None where fewer than three ended ok.

    A config that the model refuses ranks last.
    """
    timed = [e for e in evaluations if e.status in _TIMED and e.facts and e.time_us]
    predicted = [_predicted_us(problem, device, e, constants) for e in timed]
    measured = [e.time_us or 0.0 for e in timed]
    is_ok = [e.status is TrialStatus.OK for e in timed]
    ok = [i for i, flag in enumerate(is_ok) if flag]
    if len(ok) < 3:
        return None
    top = sorted(range(len(timed)), key=lambda i: predicted[i])[:num_top]
    best = min(measured[i] for i in ok)
    ratios = sorted(predicted[i] / measured[i] for i in ok)
    return Accuracy(
        num_ok=len(ok),
        num_pruned=len(timed) - len(ok),
        spearman=rank_correlation([predicted[i] for i in ok], [measured[i] for i in ok]),
        spearman_with_pruned=rank_correlation(predicted, measured),
        best_of_top=min((measured[i] for i in top if is_ok[i]), default=float("inf")) / best,
        bias=ratios[len(ratios) // 2],
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's coefficient, ties at their mean rank; 0 where one of the two is constant."""
    x, y = _ranks(first), _ranks(second)
    mean = (len(x) + 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(x, y, strict=True))
    spread = sum((a - mean) ** 2 for a in x) * sum((b - mean) ** 2 for b in y)
    return float(covariance / spread**0.5) if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Rank of each value from 1; equal ones share their mean."""
    ranks = [0.0] * len(values)
    order = sorted(range(len(values)), key=lambda i: values[i])
    position = 0
    for _, group in groupby(order, key=lambda i: values[i]):
        ties = list(group)
        for i in ties:
            ranks[i] = position + (len(ties) + 1) / 2
        position += len(ties)
    return ranks


def _predicted_us(
    problem: Problem, device: DeviceSpec, evaluation: Evaluation, constants: CostConstants
) -> float:
    template = registry.template(problem.op, evaluation.config.template)
    estimates = template.estimate(problem, evaluation.config, device)
    prediction = predict(problem, device, estimates, evaluation.facts, constants)
    return prediction.time_us if prediction.status is TrialStatus.OK else float("inf")
