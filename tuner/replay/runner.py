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

__all__ = ["replay_run", "score_sampler"]


def replay_run(
    recorded: RecordedSpace,
    *,
    sampler: str,
    num_trials: int,
    seed: int,
    can_stop: bool = False,
    first: Sequence[Config] = (),
) -> list[float]:
    """Microseconds of the evaluations of one run in order; infinite where a config failed.

    Args:
        recorded: the space, with the fate of every config.
        sampler: name of the sampler.
        num_trials: distinct evaluations, or fewer where the space has no more.
        seed: seed of the run.
        can_stop: whether the run may end by itself before ``num_trials``.
        first: tried before anything else.

    Raises:
        UnknownNameError: no such sampler.
    """
    times_us: list[float] = []

    def ended(evaluation: Evaluation) -> None:
        times_us.append(math.inf if evaluation.time_us is None else evaluation.time_us)

    search(
        make_sampler(sampler, recorded.space, seed=seed, num_trials=num_trials, first=first),
        ReplayEvaluator(recorded),
        Stopping(
            StoppingRule(num_trials, None, recorded.space.count()),
            GainRule() if can_stop else None,
        ),
        ended,
    )
    return times_us


def score_sampler(
    recorded: RecordedSpace,
    *,
    sampler: str,
    num_trials: int,
    num_seeds: int,
    can_stop: bool = False,
) -> Score:
    """The score of runs with seeds 0 to ``num_seeds - 1``; arguments as of ``replay_run``."""
    runs = [
        replay_run(recorded, sampler=sampler, num_trials=num_trials, seed=seed, can_stop=can_stop)
        for seed in range(num_seeds)
    ]
    return score_runs(recorded, runs, num_trials)
