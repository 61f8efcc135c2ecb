"""Plays searches over a recorded space: same space, sampler and seed, same run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...kernels.base import Config
from ..evaluators.replay import ReplayEvaluator
from ..records import Evaluation
from ..search.loop import search
from ..search.samplers import make_sampler
from ..search.stopping import GainRule, Stopping, StoppingRule
from .recorded import RecordedSpace
from .scoring import Score, score_runs

__all__ = ["replay_evaluations", "replay_times", "score_sampler"]


def replay_evaluations(
    recorded: RecordedSpace,
    *,
    sampler: str,
    num_trials: int,
    seed: int,
    can_stop: bool = False,
    first: Sequence[Config] = (),
    foreign: Sequence[Config] = (),
) -> list[Evaluation]:
    """The evaluations of one run, in order.

    Args:
        recorded: the space, with the fate of every config.
        sampler: name of the sampler.
        num_trials: distinct evaluations, or fewer where the space has no more.
        seed: seed of the run.
        can_stop: whether the run may end by itself before ``num_trials``.
        first: tried before anything else.
        foreign: winners of elsewhere, nearest first; see ``ForeignStart``.

    Raises:
        UnknownNameError: no such sampler.
    """
    evaluations: list[Evaluation] = []
    search(
        make_sampler(
            sampler,
            recorded.space,
            seed=seed,
            num_trials=num_trials,
            first=first,
            foreign=foreign,
        ),
        ReplayEvaluator(recorded),
        Stopping(
            StoppingRule(num_trials, None, recorded.space.count()),
            GainRule() if can_stop else None,
        ),
        evaluations.append,
    )
    return evaluations


def replay_times(evaluations: Sequence[Evaluation]) -> list[float]:
    """Their times in microseconds; infinite where a config failed."""
    return [math.inf if e.time_us is None else e.time_us for e in evaluations]


def score_sampler(
    recorded: RecordedSpace,
    *,
    sampler: str,
    num_trials: int,
    num_seeds: int,
    can_stop: bool = False,
) -> Score:
    """The score of runs with seeds 0 to ``num_seeds - 1``; see ``replay_evaluations``."""
    runs = [
        replay_evaluations(
            recorded, sampler=sampler, num_trials=num_trials, seed=seed, can_stop=can_stop
        )
        for seed in range(num_seeds)
    ]
    return score_runs(recorded, [replay_times(run) for run in runs], num_trials)
