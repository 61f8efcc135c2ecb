"""Runs one study: asks, evaluates, persists, tells, and lets the best meet in the finals.

The store is the only memory. A study that was interrupted at any point goes on from its trials;
one that is finished gives its winner again and runs nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...kernels.base import Config
from ...search_spaces.space import JointSpace
from ..evaluators.base import Evaluator
from ..progress import ProgressListener
from ..records import Evaluation, TrialStatus
from ..store import Store
from ..store.records import StudyRecord, TrialRecord, WinnerRecord
from .loop import search
from .samplers import DEFAULT_SAMPLER, make_sampler
from .starting_points import starting_points
from .stopping import GainRule, Stopping, StoppingRule

__all__ = ["failure_summary", "run_study"]


def run_study(
    *,
    space: JointSpace,
    evaluator: Evaluator,
    store: Store,
    study: StudyRecord,
    num_trials: int,
    deadline: float | None,
    seed: int,
    num_finalists: int,
    listener: ProgressListener,
    gain: GainRule | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> WinnerRecord | None:
    """The winner of the study, or None where no config worked.

    Args:
        space: what may be tried.
        evaluator: evaluates on the study's device; stays open.
        store: holds the study's earlier trials and takes each new one as it ends.
        study: the search to begin or to go on with.
        num_trials: trials in all, those in the store included.
        deadline: time of ``clock`` after which no trial starts; None for no limit.
        seed: equal seeds and equal stored trials propose equal configs.
        num_finalists: how many of the best are compared again, beside the default.
        listener: hears of every trial, stored ones first.
        gain: ends the search before ``num_trials`` where more is unlikely to help; None never does.
        clock: seconds, monotonic.
    """
    stored = store.trials(study.study_id)
    points = starting_points(space, store, study)
    sampler = make_sampler(
        DEFAULT_SAMPLER,
        space,
        # A search that goes on must not repeat the random draws it began with.
        seed=seed + len(stored),
        num_trials=num_trials,
        first=points.own,
        foreign=points.foreign,
    )
    stopping = Stopping(StoppingRule(num_trials, deadline, space.count()), gain)
    run = _Run(evaluator, store, study, listener)
    for record in stored:
        run.take(record, is_new=False)
        sampler.tell(record.evaluation)
        stopping.started()
        stopping.ended(record.evaluation)
    search(sampler, evaluator, stopping, run.keep, clock)
    if len(run.trials) == len(stored):
        winner = _stored_winner(store, study)
        if winner is not None:
            return winner
    return _decide(run, space.default, num_finalists)


@dataclass
class _Run:
    """A study under way."""

    evaluator: Evaluator
    store: Store
    study: StudyRecord
    listener: ProgressListener
    trials: dict[Config, TrialRecord] = field(default_factory=dict)
    best_us: float | None = None

    def take(self, record: TrialRecord, *, is_new: bool) -> None:
        """Remembers a trial that is in the store and lets the listener know."""
        evaluation = record.evaluation
        self.trials[evaluation.config] = record
        if evaluation.status is TrialStatus.OK and evaluation.time_us is not None:
            known = self.best_us
            self.best_us = evaluation.time_us if known is None else min(known, evaluation.time_us)
        self.listener.trial_ended(record, self.best_us, is_new)

    def keep(self, evaluation: Evaluation) -> None:
        """Writes down a trial that has just ended."""
        self.take(self.store.add_trial(self.study.study_id, evaluation), is_new=True)


def _decide(run: _Run, default: Config, num_finalists: int) -> WinnerRecord | None:
    """The winner of the finals, written with them; None if no config got through."""
    finalists = _finalists(run.trials, default, num_finalists)
    if not finalists:
        return None
    finals = run.evaluator.finals(finalists)
    return run.store.record_finals(run.study.study_id, finals) if finals else None


def _finalists(
    trials: dict[Config, TrialRecord], default: Config, num_finalists: int
) -> list[Config]:
    """The default first, because it is kept unless beaten, then the best in order."""
    timed = sorted(
        (record.evaluation.time_us, record.number, config)
        for config, record in trials.items()
        if record.evaluation.status is TrialStatus.OK and record.evaluation.time_us is not None
    )
    best = [config for _, _, config in timed]
    chosen = best[:num_finalists]
    return [default, *(c for c in chosen if c != default)] if default in best else chosen


def _stored_winner(store: Store, study: StudyRecord) -> WinnerRecord | None:
    key = study.key
    decided = [
        winner
        for winner in store.winners(op=key.problem.op, skus=[key.device.sku])
        if winner.study.study_id == study.study_id
    ]
    return max(decided, key=lambda winner: winner.winner_id, default=None)


def failure_summary(evaluations: Sequence[Evaluation]) -> str:
    """Why a study has no winner: trials by status and the commonest reason."""
    if not evaluations:
        return "no trial was run: raise the number of trials or the time budget"
    counts = Counter(evaluation.status.value for evaluation in evaluations)
    listing = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    reasons = Counter(e.reason for e in evaluations if e.reason)
    text = f"none of {len(evaluations)} configs worked ({listing})"
    if reasons:
        reason, number = reasons.most_common(1)[0]
        text += f"; commonest reason ({number}): {reason}"
    return text
