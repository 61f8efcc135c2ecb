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
from .sampler import Sampler, TpeSampler
from .starting_points import starting_points
from .stopping import StoppingRule

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
        clock: seconds, monotonic.
    """
    stored = store.trials(study.study_id)
    sampler = TpeSampler(
        space,
        # A search that goes on must not repeat the random draws it began with.
        seed=seed + len(stored),
        first=starting_points(space, store, study),
    )
    rule = StoppingRule(num_trials, deadline, space.count())
    run = _Run(sampler, evaluator, store, study, listener)
    for record in stored:
        run.take(record, is_new=False)
    num_new = run.search(rule, clock)
    if not num_new:
        winner = _stored_winner(store, study)
        if winner is not None:
            return winner
    return _decide(run, space.default, num_finalists)


@dataclass
class _Run:
    """A study under way."""

    sampler: Sampler
    evaluator: Evaluator
    store: Store
    study: StudyRecord
    listener: ProgressListener
    trials: dict[Config, TrialRecord] = field(default_factory=dict)
    best_us: float | None = None

    def take(self, record: TrialRecord, *, is_new: bool) -> None:
        """Lets sampler and listener know of a trial that is in the store."""
        evaluation = record.evaluation
        self.trials[evaluation.config] = record
        if evaluation.status is TrialStatus.OK and evaluation.time_us is not None:
            known = self.best_us
            self.best_us = evaluation.time_us if known is None else min(known, evaluation.time_us)
        self.sampler.tell(evaluation)
        self.listener.trial_ended(record, self.best_us, is_new)

    def search(self, rule: StoppingRule, clock: Callable[[], float]) -> int:
        """Runs trials until the rule ends it; returns how many."""
        num_new = num_in_flight = 0
        while True:
            while num_in_flight < self.evaluator.capacity:
                if rule.reason(len(self.trials) + num_in_flight, clock()) is not None:
                    break
                configs = self.sampler.ask(1)
                if not configs:
                    break
                self.evaluator.submit(configs[0])
                num_in_flight += 1
            if not num_in_flight:
                return num_new
            evaluation = self.evaluator.collect()
            num_in_flight -= 1
            record = self.store.add_trial(self.study.study_id, evaluation)
            self.take(record, is_new=True)
            num_new += 1


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
