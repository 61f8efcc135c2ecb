"""What competes in a study whose templates have parts: algorithms, and spaces without parts.

Each rival searches in its own way and is judged by its best measured whole operation.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from ...kernels.base import Config, Problem
from ...search_spaces.parts import Algorithm, PartScope, part_space
from ...search_spaces.space import JointSpace
from ..evaluators.base import Evaluator
from ..progress import ProgressListener
from ..store import Store
from ..store.records import StudyRecord, TrialRecord, WinnerRecord
from .allotment import TimeAllotment, divide
from .search_plan import SearchPlan
from .starting_points import StartingPoints
from .stopping import GainRule
from .study_run import StudyRun

__all__ = ["Evaluators", "PartwiseRival", "Rival", "SearchContext", "WholeRival"]

_NUM_DRAWN_BASES = 3
"""Configs of an algorithm that are drawn where none of its seeds works as a whole."""
_NUM_BEST = 3
"""Of each part, how many of the fastest enter combinations."""
_LEAST_SHARE = 0.05
"""Of the time of the whole operation, that a part counts with at least."""
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

    def measure(
        self,
        configs: Sequence[Config],
        *,
        until: float | None = None,
        num_enough: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Evaluates whole configs that have no trial, as far as trials are left.

        The further arguments are those of ``StudyRun.evaluate``.
        """
        new = [config for config in configs if config not in self.run.trials]
        self.run.evaluate(
            self.evaluator,
            new[: max(0, self.num_left())],
            until=until,
            num_enough=num_enough,
            meanwhile=meanwhile,
        )

    def is_tried(self, config: Config) -> bool:
        """Whether the whole config has a trial."""
        return config in self.run.trials

    def prepare(self, configs: Iterable[Config]) -> None:
        """Lets whole configs compile that may be evaluated later."""
        for config in configs:
            if config not in self.run.trials:
                self.evaluator.prepare(config)

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
    def has_begun(self) -> bool:
        """Whether its first whole config has been tried."""

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

    @property
    def num_failed_firsts(self) -> int:
        """Configs that were tried to begin with before one worked."""

    def first(self, place: int) -> Config | None:
        """The config to begin with, or at later places where those before it do not work."""

    def plan(self, num_trials: int) -> None:
        """Lets compile what ``advance`` with so many trials will begin with, as far as is known."""

    def advance(self, num_trials: int, deadline: float | None) -> None:
        """Searches on with so many trials, then measures its best as a whole."""

    def combine(self, num_trials: int) -> None:
        """Measures a few more whole configs that may be better than their parts tell."""


class WholeRival:
    """A space that is searched as one: templates without parts, or an algorithm of one part."""

    def __init__(self, context: SearchContext, space: JointSpace) -> None:
        self.space = space
        self._context = context
        self._target = 1
        self._planned: SearchPlan | None = None

    @property
    def room(self) -> int:
        """See ``Rival``."""
        return self.space.count() - self._target

    @property
    def has_begun(self) -> bool:
        """See ``Rival``."""
        return self._context.is_tried(self.space.default)

    @property
    def is_alive(self) -> bool:
        """See ``Rival``: nothing has to work before others are tried."""
        return self.has_begun

    @property
    def best_us(self) -> float:
        """See ``Rival``."""
        return _best_us(self._context.run, self.space)

    @property
    def has_gone_on(self) -> bool:
        """See ``Rival``."""
        return len(self._context.run.inside(self.space)) > self._target

    @property
    def num_failed_firsts(self) -> int:
        """See ``Rival``: there is one."""
        return 0

    def first(self, place: int) -> Config | None:
        """See ``Rival``."""
        return None if place else self.space.default

    def plan(self, num_trials: int) -> None:
        """See ``Rival``."""
        self._planned = self._plan(self._target + num_trials)
        if self._planned is not None:
            self._context.prepare(self._planned.begins_with(self._context.evaluator.capacity))

    def advance(self, num_trials: int, deadline: float | None) -> None:
        """See ``Rival``."""
        self._target += num_trials
        context = self._context
        plan, self._planned = self._planned, None
        known = [context.run.trials[c].evaluation for c in context.run.inside(self.space)]
        if plan is None or plan.num_trials != self._target or list(plan.known) != known:
            plan = self._plan(self._target)
        if plan is not None:
            context.run.follow(
                plan, context.evaluator, deadline=deadline, gain=context.gain, clock=context.clock
            )

    def _plan(self, target: int) -> SearchPlan | None:
        """The search for so many trials in all; None where they have been run."""
        context = self._context
        known = context.run.inside(self.space)
        if len(known) >= target:
            return None
        foreign = (c for c in context.points.foreign if self.space.check(c) is None)
        mine = {self.space.default, *context.points.own}
        own = tuple(config for config in self.space.valid_seeds() if config in mine)
        points = StartingPoints(own, tuple(foreign))
        seed = context.seed
        return context.run.plan(self.space, points, known, num_trials=target, seed=seed)

    def combine(self, num_trials: int) -> None:
        """Has no parts to combine."""


class PartwiseRival:
    """An algorithm whose parts are searched one by one, the others held at a config that works."""

    def __init__(self, context: SearchContext, algorithm: Algorithm) -> None:
        self.space = JointSpace((algorithm.space,))
        self._algorithm = algorithm
        self._context = context
        rng = random.Random(context.seed)
        drawn = (algorithm.space.sample(rng) for _ in range(_NUM_DRAWN_BASES))
        self._more_firsts = _without_repeats(itertools.chain(algorithm.space.valid_seeds(), drawn))
        self._firsts: list[Config] = []
        self._spaces: dict[tuple[str, Config], JointSpace] = {}
        self._planned: dict[str, tuple[PartScope, SearchPlan]] = {}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Looks through all parts, which takes a while."""
        return part_sizes(self._algorithm, self._space)

    @cached_property
    def _targets(self) -> dict[str, int]:
        """Trials in all that each part was given."""
        return dict.fromkeys(self._sizes, 0)

    @cached_property
    def _runs(self) -> dict[str, StudyRun]:
        """The studies of the parts; what an earlier run left counts from the start."""
        context = self._context
        found = {p: context.part_run(self._study_part(p), is_new=False) for p in self._sizes}
        return {part: run for part, run in found.items() if run is not None}

    @property
    def room(self) -> int:
        """See ``Rival``."""
        return sum(self._sizes.values()) - sum(self._targets.values())

    @property
    def has_begun(self) -> bool:
        """See ``Rival``."""
        return self._context.is_tried(self.space.default)

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

    @property
    def num_failed_firsts(self) -> int:
        """See ``Rival``."""
        return max(0, sum(map(self._context.is_tried, self._firsts)) - 1)

    def first(self, place: int) -> Config | None:
        """See ``Rival``: the default and seeds, then random ones."""
        while len(self._firsts) <= place:
            config = next(self._more_firsts, None)
            if config is None:
                return None
            self._firsts.append(config)
        return self._firsts[place]

    def plan(self, num_trials: int) -> None:
        """See ``Rival``: a first config that is still to be measured is taken to work."""
        base = self._base()
        capacity = self._context.evaluator.capacity
        self._planned = {}
        for part, target in self._shared_out(num_trials).items():
            found = self._plan(part, base, target)
            if found is None:
                continue
            self._planned[part] = found
            scope, plan = found
            self._context.prepare(map(scope.whole, plan.begins_with(capacity)))

    def advance(self, num_trials: int, deadline: float | None) -> None:
        """See ``Rival``."""
        time_left = TimeAllotment(deadline, num_trials + 1, self._context.clock)
        base = self._base()
        targets, planned = self._shared_out(num_trials), self._planned
        self._planned = {}
        for part, target in targets.items():
            num = target - self._targets[part]
            self._targets[part] = target
            until = time_left.until(num)
            if time_left.is_over:
                continue
            found = planned.get(part)
            if found is None or found[0].base != base or found[1].num_trials != target:
                found = self._plan(part, base, target)
            if found is not None:
                self._search(*found, until)
        self._context.measure([config for _, config in itertools.islice(self._combined(), 1)])

    def _shared_out(self, num_trials: int) -> dict[str, int]:
        """Trials in all of each part that gets more of them."""
        parts = list(self._sizes)
        weights = self._weights()
        room = [self._sizes[part] - self._targets[part] for part in parts]
        shares = zip(parts, divide(num_trials, weights, room), strict=True)
        return {part: self._targets[part] + num for part, num in shares if num}

    def _weights(self) -> list[float]:
        """How trials are divided between parts: by choice, and by time once each has been timed.

        A part that takes a hundredth of the whole cannot make it faster by more than that. Times
        are those of trials that parts were given before, so that a search that goes on divides as
        it did.
        """
        runs = ((part, self._runs.get(part), self._targets[part]) for part in self._sizes)
        timed = {part: run.ok_trials(target) for part, run, target in runs if run is not None}
        best = {part: trials[0][0] for part, trials in timed.items() if trials}
        total = sum(best.values())
        is_timed = len(best) == len(self._sizes)
        return [
            math.log2(1 + size) * (max(best[part] / total, _LEAST_SHARE) if is_timed else 1.0)
            for part, size in self._sizes.items()
        ]

    def combine(self, num_trials: int) -> None:
        """See ``Rival``."""
        sums = list(self._combined())
        worthy = [config for total, config in sums if total <= _WORTH_COMBINING * sums[0][0]]
        self._context.measure(worthy[: num_trials + 1])

    def _base(self) -> Config:
        """The best config that works; before any does, the one that is tried first."""
        known = self._context.run.right_trials(self.space)
        return known[0][1] if known else self.space.default

    def _study_part(self, part: str) -> str:
        return f"{self._algorithm}: {part}"

    def _space(self, scope: PartScope) -> JointSpace:
        """The configs of a part; looked through once beside the same config."""
        key = scope.part, scope.base
        found = self._spaces.get(key)
        if found is None:
            found = self._spaces[key] = JointSpace((part_space(self._algorithm, scope),))
        return found

    def _run(self, part: str) -> StudyRun:
        """The study of the part, begun if it has to be."""
        run = self._runs.get(part)
        if run is None:
            run = self._context.part_run(self._study_part(part), is_new=True)
            assert run is not None
            self._runs[part] = run
        return run

    def _plan(self, part: str, base: Config, target: int) -> tuple[PartScope, SearchPlan] | None:
        """The search of a part for so many trials in all; None where they have been run."""
        context = self._context
        scope = PartScope.of(self._algorithm, part, base)
        space, run = self._space(scope), self._run(part)
        known = run.inside(space)
        if len(known) >= target:
            return None
        foreign = [c for c in context.points.foreign if self.space.check(c) is None]
        # What won on near problems stands among the seeds, and is tried as foreign winners are.
        mine = {space.default, *map(scope.of_whole, context.points.own)}
        own = tuple(config for config in space.valid_seeds() if config in mine)
        points = StartingPoints(own, tuple(map(scope.of_whole, foreign)))
        return scope, run.plan(space, points, known, num_trials=target, seed=context.seed)

    def _search(self, scope: PartScope, plan: SearchPlan, deadline: float | None) -> None:
        context, run = self._context, self._run(scope.part)
        with closing(context.evaluators(run.study, scope)) as evaluator:
            run.follow(plan, evaluator, deadline=deadline, gain=context.gain, clock=context.clock)

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


def part_sizes(
    algorithm: Algorithm, space_of: Callable[[PartScope], JointSpace] | None = None
) -> dict[str, int]:
    """Number of configs of each part that leaves a choice, beside the algorithm's default."""
    default = algorithm.space.default
    make = space_of or (lambda scope: JointSpace((part_space(algorithm, scope),)))
    scopes = (PartScope.of(algorithm, part, default) for part in algorithm.part_names)
    sizes = {scope.part: make(scope).count() for scope in scopes}
    return {part: size for part, size in sizes.items() if size > 1}


def _without_repeats(configs: Iterable[Config]) -> Iterator[Config]:
    seen: set[Config] = set()
    for config in configs:
        if config not in seen:
            seen.add(config)
            yield config


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
