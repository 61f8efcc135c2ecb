"""Runs one study: asks, evaluates, persists, tells, and lets the best meet in the finals.

The store is the only memory. A study that was interrupted at any point goes on from its trials;
one that is finished gives its winner again and runs nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from ...kernels.base import Config
from ...search_spaces.space import JointSpace
from ..evaluators.base import Evaluator
from ..progress import ProgressListener
from ..records import Evaluation
from ..store import Store
from ..store.records import StudyRecord, WinnerRecord
from .starting_points import starting_points
from .stopping import GainRule
from .study_run import StudyRun

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
    carried: Sequence[Config] = (),
    kept: Sequence[Config] = (),
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
        carried: evaluated right after the default, be the study new or finished.
        kept: those of them that are compared again in the end, however many were faster.
        clock: seconds, monotonic.
    """
    run = StudyRun(store, study, listener)
    if carried:
        run.evaluate(evaluator, [space.default, *carried])
    run.search(
        space,
        evaluator,
        starting_points(space, store, study),
        list(run.trials),
        num_trials=num_trials,
        deadline=deadline,
        seed=seed,
        gain=gain,
        clock=clock,
    )
    return run.decide(evaluator, space.default, num_finalists, kept)


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
