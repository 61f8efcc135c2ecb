"""What competes in a study whose templates have parts: algorithms, and spaces without parts.

Each rival searches in its own way and is judged by its best measured whole operation.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...kernels.base import Config, Problem
from ...search_spaces.parts import Algorithm, PartScope, part_space
from ...search_spaces.space import JointSpace
from ..evaluators.base import Evaluator
from ..progress import ProgressListener
from ..store import Store
from ..store.records import StudyRecord, TrialRecord, WinnerRecord
from .allotment import TimeAllotment, divide
from .starting_points import StartingPoints
from .stopping import GainRule
from .study_run import StudyRun

__all__ = ["Evaluators", "PartwiseRival", "Rival", "SearchContext", "WholeRival"]

_MAX_BASES = 4
"""Configs of an algorithm that are tried until one works as a whole."""
_NUM_BEST = 3
"""Of each part, how many of the fastest enter combinations."""
_WORTH_COMBINING = 1.05
"""Combinations are measured whose times add up to at most this factor above the least sum."""


class Evaluators(Protocol):
    """Makes evaluators of the operation (without a scope) or of one part, for a study."""

    def __call__(self, study: StudyRecord, scope: PartScope | None) -> Evaluator:
        """The caller closes it."""


@dataclass
class SearchContext:
    """What the rivals of one study share."""

    run: StudyRun
    """Trials of the whole operation."""
    evaluator: Evaluator
    evaluators: Evaluators
    store: Store
    points: StartingPoints
    listener: ProgressListener
    seed: int
    num_trials: int
    gain: GainRule | None
    clock: Callable[[], float]
    part_runs: list[StudyRun] = field(default_factory=list)

    def num_left(self) -> int:
        """Trials that may still be run, those of parts counted."""
        return self.num_trials - sum(len(run.trials) for run in (self.run, *self.part_runs))

    def measure(self, configs: Sequence[Config]) -> None:
        """Evaluates whole configs that have no trial, as far as trials are left."""
        new = [config for config in configs if config not in self.run.trials]
        self.run.evaluate(self.evaluator, new[: max(0, self.num_left())])

    def part_run(self, part: str, *, is_new: bool) -> StudyRun | None:
        """The study of a part; None where there is none and ``is_new`` does not ask for one."""
        key = replace(self.run.study.key, part=part)
        if not is_new and self.store.find_study(key) is None:
            return None
        study = self.store.study(key, seed=self.seed)
        run = StudyRun(self.store, study, _PartListener(self.listener, self.run))
        self.part_runs.append(run)
        return run


class Rival(Protocol):
    """One way to do the operation, and the search for its best config."""

    space: JointSpace
    """Its valid configs."""

    @property
    def room(self) -> int:
        """How many trials it can still take."""

    @property
    def is_alive(self) -> bool:
        """Whether a search makes sense."""

    @property
    def best_us(self) -> float:
        """Time of its best whole operation; infinite where none worked."""

    @property
    def has_gone_on(self) -> bool:
        """Whether an earlier run gave it more than it has got so far in this one.

        Then it was not dropped, whatever the finals have made of times that were close.
        """

    def begin(self) -> None:
        """Measures a first whole config."""

    def advance(self, num_trials: int, deadline: float | None) -> None:
        """Searches on with so many trials, then measures its best as a whole."""

    def combine(self, num_trials: int) -> None:
        """Measures a few more whole configs that may be better than their parts tell."""


class WholeRival:
    """A space that is searched as one: templates without parts, or an algorithm of one part."""

    def __init__(self, context: SearchContext, space: JointSpace) -> None:
        self.space = space
        self.is_alive = True
        self._context = context
        self._target = 1

    @property
    def room(self) -> int:
        """See ``Rival``."""
        return self.space.count() - self._target

    @property
    def best_us(self) -> float:
        """See ``Rival``."""
        return _best_us(self._context.run, self.space)

    @property
    def has_gone_on(self) -> bool:
        """See ``Rival``."""
        return len(self._context.run.inside(self.space)) > self._target

    def begin(self) -> None:
        """See ``Rival``."""
        self._context.measure([self.space.default])

    def advance(self, num_trials: int, deadline: float | None) -> None:
        """See ``Rival``."""
        self._target += num_trials
        context = self._context
        known = context.run.inside(self.space)
        if len(known) >= self._target:
            return
        foreign = (c for c in context.points.foreign if self.space.check(c) is None)
        context.run.search(
            self.space,
            context.evaluator,
            StartingPoints(self.space.valid_seeds(), tuple(foreign)),
            known,
            num_trials=self._target,
            deadline=deadline,
            seed=context.seed,
            gain=context.gain,
            clock=context.clock,
        )

    def combine(self, num_trials: int) -> None:
        """Has no parts to combine."""


class PartwiseRival:
    """An algorithm whose parts are searched one by one, the others held at a config that works."""

    def __init__(self, context: SearchContext, algorithm: Algorithm) -> None:
        self.space = JointSpace((algorithm.space,))
        self._algorithm = algorithm
        self._context = context
        self._sizes = part_sizes(algorithm)
        self._targets = dict.fromkeys(self._sizes, 0)
        self._runs: dict[str, StudyRun] = {}

    @property
    def room(self) -> int:
        """See ``Rival``."""
        return sum(self._sizes.values()) - sum(self._targets.values())

    @property
    def is_alive(self) -> bool:
        """Whether a config of it works as a whole: beside it, parts can be judged."""
        return self.best_us < math.inf

    @property
    def best_us(self) -> float:
        """See ``Rival``."""
        return _best_us(self._context.run, self.space)

    @property
    def has_gone_on(self) -> bool:
        """See ``Rival``."""
        return any(len(run.trials) > self._targets[part] for part, run in self._runs.items())

    def begin(self) -> None:
        """Measures its configs, the default and seeds first, until one works."""
        for part in self._sizes:
            run = self._context.part_run(self._study_part(part), is_new=False)
            if run is not None:
                self._runs[part] = run
        rng = random.Random(self._context.seed)
        drawn = (self.space.spaces[0].sample(rng) for _ in range(_MAX_BASES))
        first = dict.fromkeys((*self.space.valid_seeds(), *drawn))
        for config in itertools.islice(first, _MAX_BASES):
            self._context.measure([config])
            if self.is_alive:
                break

    def advance(self, num_trials: int, deadline: float | None) -> None:
        """See ``Rival``."""
        parts = list(self._sizes)
        weights = [math.log2(1 + self._sizes[part]) for part in parts]
        room = [self._sizes[part] - self._targets[part] for part in parts]
        time_left = TimeAllotment(deadline, num_trials + 1, self._context.clock)
        base = self._base()
        for part, num in zip(parts, divide(num_trials, weights, room), strict=True):
            self._targets[part] += num
            until = time_left.until(num)
            if num and not time_left.is_over:
                self._search(part, base, until)
        self._context.measure([config for _, config in itertools.islice(self._combined(), 1)])

    def combine(self, num_trials: int) -> None:
        """See ``Rival``."""
        sums = list(self._combined())
        worthy = [config for total, config in sums if total <= _WORTH_COMBINING * sums[0][0]]
        self._context.measure(worthy[: num_trials + 1])

    def _base(self) -> Config:
        return self._context.run.right_trials(self.space)[0][1]

    def _study_part(self, part: str) -> str:
        return f"{self._algorithm}: {part}"

    def _search(self, part: str, base: Config, deadline: float | None) -> None:
        context = self._context
        scope = PartScope.of(self._algorithm, part, base)
        space = JointSpace((part_space(self._algorithm, scope),))
        run = self._runs.get(part)
        if run is None:
            run = context.part_run(self._study_part(part), is_new=True)
            assert run is not None
            self._runs[part] = run
        known = run.inside(space)
        if len(known) >= self._targets[part]:
            return
        foreign = [c for c in context.points.foreign if self.space.check(c) is None]
        points = StartingPoints(space.valid_seeds(), tuple(map(scope.of_whole, foreign)))
        with closing(context.evaluators(run.study, scope)) as evaluator:
            run.search(
                space,
                evaluator,
                points,
                known,
                num_trials=self._targets[part],
                deadline=deadline,
                seed=context.seed,
                gain=context.gain,
                clock=context.clock,
            )

    def _combined(self) -> Iterator[tuple[float, Config]]:
        """Valid whole configs from the best of each part with the sum of their times, least first.

        Parts without a trial that worked are held as they are.
        """
        best = {part: run.ok_trials()[:_NUM_BEST] for part, run in self._runs.items()}
        best = {part: timed for part, timed in best.items() if timed}
        if not best:
            return
        base = self._base()
        choices = itertools.product(*best.values())
        for chosen in sorted(choices, key=lambda chosen: sum(time_us for time_us, _ in chosen)):
            config = base
            for part, (_, values) in zip(best, chosen, strict=True):
                config = PartScope.of(self._algorithm, part, config).whole(values)
            if self.space.check(config) is None:
                yield sum(time_us for time_us, _ in chosen), config


def part_sizes(algorithm: Algorithm) -> dict[str, int]:
    """Number of configs of each part that leaves a choice."""
    default = algorithm.space.default
    sizes = {
        part: part_space(algorithm, PartScope.of(algorithm, part, default)).count()
        for part in algorithm.part_names
    }
    return {part: size for part, size in sizes.items() if size > 1}


def _best_us(run: StudyRun, space: JointSpace) -> float:
    return next((time_us for time_us, _ in run.right_trials(space)), math.inf)


class _PartListener:
    """Passes on the trials of parts; the best time that is told is the whole operation's."""

    def __init__(self, listener: ProgressListener, whole: StudyRun) -> None:
        self._listener = listener
        self._whole = whole

    def study_started(self, label: str, sku: str, problem: Problem, total: int) -> None:
        """A part is no study that a run tells of."""

    def trial_ended(self, record: TrialRecord, best_us: float | None, is_new: bool) -> None:
        """See ``ProgressListener``."""
        del best_us
        self._listener.trial_ended(record, self._whole.best_us, is_new)

    def study_ended(self, winner: WinnerRecord | None) -> None:
        """See ``study_started``."""
