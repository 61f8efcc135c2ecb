"""A study under way: its trials, each written down as it ends, and its decision.

The store is the only memory: what an earlier run left is there from the start.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from ...kernels.base import Config
from ...search_spaces.space import JointSpace
from ..evaluators.base import Evaluator
from ..progress import ProgressListener
from ..records import Evaluation, TrialStatus
from ..store import Store
from ..store.records import StudyRecord, TrialRecord, WinnerRecord
from .loop import search
from .samplers import DEFAULT_SAMPLER, make_sampler
from .search_plan import SearchPlan
from .starting_points import StartingPoints
from .stopping import GainRule, Stopping, StoppingRule

__all__ = ["StudyRun"]

_OK = frozenset({TrialStatus.OK})
_RIGHT = frozenset({TrialStatus.OK, TrialStatus.PRUNED})


def _nothing() -> None:
    """What is done meanwhile where there is nothing to do."""


class StudyRun:
    """Trials of one study, stored and new."""

    def __init__(self, store: Store, study: StudyRecord, listener: ProgressListener) -> None:
        """Tells the listener of the trials that are stored."""
        self._store = store
        self._listener = listener
        self.study = study
        self.trials: dict[Config, TrialRecord] = {}
        """In the order in which they ended."""
        self.best_us: float | None = None
        self.num_new = 0
        for record in store.trials(study.study_id):
            self._take(record, is_new=False)

    def keep(self, evaluation: Evaluation) -> None:
        """Writes down a trial that has just ended."""
        self._take(self._store.add_trial(self.study.study_id, evaluation), is_new=True)

    def ok_trials(self, first: int | None = None) -> list[tuple[float, Config]]:
        """Time and config of the trials that were ok, the fastest first, earlier ones in a tie.

        With ``first``, of the so many first trials.
        """
        return self._timed(list(itertools.islice(self.trials, first)), _OK)

    def right_trials(self, space: JointSpace) -> list[tuple[float, Config]]:
        """Like ``ok_trials``, of one space, and with those that were right but cut for their time.

        A cut one may be many times slower than another algorithm and still the start of a search.
        """
        return self._timed(self.inside(space), _RIGHT)

    def inside(self, space: JointSpace) -> list[Config]:
        """The configs of the space that have a trial."""
        return [config for config in self.trials if space.check(config) is None]

    def search(
        self,
        space: JointSpace,
        evaluator: Evaluator,
        points: StartingPoints,
        known: Sequence[Config],
        *,
        num_trials: int,
        deadline: float | None,
        seed: int,
        gain: GainRule | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Searches ``space`` until it has had ``num_trials``, those of ``known`` included.

        ``known`` are configs with a trial here; the other arguments are those of ``run_study``.
        """
        plan = self.plan(space, points, known, num_trials=num_trials, seed=seed)
        self.follow(plan, evaluator, deadline=deadline, gain=gain, clock=clock)

    def plan(
        self,
        space: JointSpace,
        points: StartingPoints,
        known: Sequence[Config],
        *,
        num_trials: int,
        seed: int,
    ) -> SearchPlan:
        """A search that has not begun; the arguments are those of ``search``."""
        sampler = make_sampler(
            DEFAULT_SAMPLER,
            space,
            # A search that goes on must not repeat the random draws it began with.
            seed=seed + len(known),
            num_trials=num_trials,
            first=points.own,
            foreign=points.foreign,
        )
        evaluations = tuple(self.trials[config].evaluation for config in known)
        for evaluation in evaluations:
            sampler.tell(evaluation)
        return SearchPlan(space, sampler, evaluations, num_trials)

    def follow(
        self,
        plan: SearchPlan,
        evaluator: Evaluator,
        *,
        deadline: float | None,
        gain: GainRule | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Searches as planned; a plan serves once."""
        stopping = Stopping(StoppingRule(plan.num_trials, deadline, plan.space.count()), gain)
        for evaluation in plan.known:
            stopping.started()
            stopping.ended(evaluation)
        search(plan, evaluator, stopping, self.keep, clock)

    def evaluate(
        self,
        evaluator: Evaluator,
        configs: Iterable[Config],
        *,
        until: float | None = None,
        num_enough: int = 0,
        meanwhile: Callable[[], None] = _nothing,
    ) -> None:
        """Evaluates those of the configs that have no trial.

        Where so many have ended, the rest is not waited for after ``until``. ``meanwhile`` is
        called once, when as many as may be are in flight.
        """
        waiting = deque(c for c in dict.fromkeys(configs) if c not in self.trials)
        num_in_flight = num_ended = 0
        if not waiting:
            meanwhile()
        while waiting or num_in_flight:
            while waiting and num_in_flight < evaluator.capacity:
                evaluator.submit(waiting.popleft())
                num_in_flight += 1
            meanwhile()
            meanwhile = _nothing
            is_enough = until is not None and num_ended >= num_enough
            evaluation = evaluator.collect(until) if is_enough else evaluator.collect()
            num_in_flight -= 1
            if evaluation is not None:
                num_ended += 1
                self.keep(evaluation)

    def decide(
        self,
        evaluator: Evaluator,
        default: Config,
        num_finalists: int,
        kept: Sequence[Config] = (),
    ) -> WinnerRecord | None:
        """The winner: the stored one where no trial is new, else that of the finals.

        The default and ``kept`` are in the finals whatever their rank, if they worked.
        """
        if not self.num_new:
            winner = self._stored_winner()
            if winner is not None:
                return winner
        finalists = self._finalists((default, *kept), num_finalists)
        if not finalists:
            return None
        finals = evaluator.finals(finalists)
        return self._store.record_finals(self.study.study_id, finals) if finals else None

    def _take(self, record: TrialRecord, *, is_new: bool) -> None:
        """Remembers a trial that is in the store and lets the listener know."""
        evaluation = record.evaluation
        self.trials[evaluation.config] = record
        self.num_new += is_new
        if evaluation.status is TrialStatus.OK and evaluation.time_us is not None:
            known = self.best_us
            self.best_us = evaluation.time_us if known is None else min(known, evaluation.time_us)
        self._listener.trial_ended(record, self.best_us, is_new)

    def _timed(
        self, configs: Iterable[Config], statuses: Collection[TrialStatus]
    ) -> list[tuple[float, Config]]:
        timed = sorted(
            (record.evaluation.time_us, record.number, config)
            for config in configs
            if (record := self.trials[config]).evaluation.status in statuses
            and record.evaluation.time_us is not None
        )
        return [(time_us, config) for time_us, _, config in timed]

    def _finalists(self, seeded: Sequence[Config], num_finalists: int) -> list[Config]:
        """Those that are seeded first, because the first is kept unless beaten, then the best."""
        best = [config for _, config in self.ok_trials()]
        return list(dict.fromkeys([*(c for c in seeded if c in best), *best[:num_finalists]]))

    def _stored_winner(self) -> WinnerRecord | None:
        key = self.study.key
        decided = [
            winner
            for winner in self._store.winners(op=key.problem.op, skus=[key.device.sku])
            if winner.study.study_id == self.study.study_id
        ]
        return max(decided, key=lambda winner: winner.winner_id, default=None)
