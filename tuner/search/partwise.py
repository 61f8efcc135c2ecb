"""Runs a search; where templates have parts, each part is searched with trials of its own.

The algorithms of a template (values of the parameters that belong to no part) compete by the
measured time of the whole operation. What is tried of a part is kept in a study of its own, whose
key names algorithm and part; the study of the operation has only trials of the whole.
docs/search.md says how trials are divided.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from ...kernels.base import Config
from ...search_spaces.parts import (
    Algorithm,
    has_parts,
    other_algorithms,
    seeded_algorithms,
)
from ...search_spaces.space import JointSpace
from ..progress import ProgressListener
from ..store import Store
from ..store.records import StudyRecord, WinnerRecord
from .allotment import TimeAllotment, divide, num_rounds
from .driver import run_study
from .rivals import Evaluators, PartwiseRival, Rival, SearchContext, WholeRival, part_sizes
from .starting_points import starting_points
from .stopping import GainRule
from .study_run import StudyRun

__all__ = ["expected_trials", "run_search"]

_TRIALS_PER_RIVAL = 8
"""One rival takes part for so many trials: more of them would all be searched too little."""
_NUM_COMBINED = 4
"""Combinations with a runner-up of a part, measured as a whole at the end."""


def run_search(
    *,
    space: JointSpace,
    evaluators: Evaluators,
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

    The arguments are those of ``run_study``, but for ``evaluators``; ``num_trials`` counts the
    trials of parts, too. Without parts in any space it is ``run_study``.
    """
    if not any(map(has_parts, space.spaces)):
        with closing(evaluators(study, None)) as evaluator:
            return run_study(
                space=space,
                evaluator=evaluator,
                store=store,
                study=study,
                num_trials=num_trials,
                deadline=deadline,
                seed=seed,
                num_finalists=num_finalists,
                listener=listener,
                gain=gain,
                carried=carried,
                kept=kept,
                clock=clock,
            )
    run = StudyRun(store, study, listener)
    points = starting_points(space, store, study)
    num_known = len(run.trials) + sum(part.num_trials for part in store.part_studies(study))
    # A search that has had its trials stays as it is, whatever won elsewhere since.
    near = points.near[: max(1, _num_rivals(num_trials) // 2)] if num_known < num_trials else ()
    space = _beginning_with(space, near)
    with closing(evaluators(study, None)) as evaluator:
        context = SearchContext(
            run=run,
            evaluator=evaluator,
            evaluators=evaluators,
            store=store,
            points=points,
            listener=listener,
            seed=seed,
            num_trials=num_trials,
            gain=gain,
            clock=clock,
        )
        rivals = _rivals(space, context)
        _compete(rivals, context, deadline, [space.default, *carried])
        return run.decide(evaluator, space.default, num_finalists, kept)


def _beginning_with(space: JointSpace, near: Sequence[Config]) -> JointSpace:
    """The space with what won on near problems before the seeds of templates that have parts.

    An algorithm that no seed of this problem belongs to competes where it won on a near one, and a
    seed that won there does not wait for the others. One that misleads costs the trial that shows
    it: only the faster half of the rivals goes on.
    """
    return JointSpace(
        tuple(
            replace(part, seeds=(*(c for c in near if c.template == part.template), *part.seeds))
            if has_parts(part)
            else part
            for part in space.spaces
        )
    )


def expected_trials(space: JointSpace, num_trials: int) -> int:
    """How many trials a search will have at most: where its spaces are small, fewer than asked."""
    if not any(map(has_parts, space.spaces)):
        return min(num_trials, space.count())
    found = _contents(space, num_trials, seed=0)
    size = _num_kept_back(len(found))
    for rival in found:
        if isinstance(rival, JointSpace):
            size += rival.count()
        else:
            size += sum(part_sizes(rival).values())
        if size >= num_trials:
            return num_trials
    return size


def _contents(space: JointSpace, num_trials: int, seed: int) -> list[JointSpace | Algorithm]:
    """What competes: the default's first, then by seeds; of too many a random sample.

    As one are searched all templates without parts together, and an algorithm of a single part.
    """
    places = {config: place for place, config in enumerate(space.valid_seeds())}
    plain = tuple(part for part in space.spaces if not has_parts(part))
    with_parts = [part for part in space.spaces if has_parts(part)]
    found: list[tuple[int, JointSpace | Algorithm]] = []
    if plain:
        own = JointSpace(plain)
        found.append((min(places[config] for config in own.valid_seeds()), own))
    for part in with_parts:
        seeded = seeded_algorithms(part)
        found += [(places[rival.space.default], _rival_of(rival)) for rival in seeded]
    taken = [rival for _, rival in sorted(found, key=lambda entry: entry[0])]
    rng = random.Random(seed)
    others = [other_algorithms(part, rng) for part in with_parts]
    rest = map(_rival_of, _taking_turns(others))
    number = _num_rivals(num_trials)
    return [*taken[:number], *itertools.islice(rest, max(0, number - len(taken)))]


def _num_rivals(num_trials: int) -> int:
    return max(1, num_trials // _TRIALS_PER_RIVAL)


def _rival_of(algorithm: Algorithm) -> JointSpace | Algorithm:
    return algorithm if len(algorithm.part_names) > 1 else JointSpace((algorithm.space,))


def _taking_turns(sources: Iterable[Iterator[Algorithm]]) -> Iterator[Algorithm]:
    turns = itertools.zip_longest(*sources)
    return (algorithm for turn in turns for algorithm in turn if algorithm is not None)


def _rivals(space: JointSpace, context: SearchContext) -> list[Rival]:
    """What competes, ready to begin."""
    return [
        WholeRival(context, rival)
        if isinstance(rival, JointSpace)
        else PartwiseRival(context, rival)
        for rival in _contents(space, context.num_trials, context.seed)
    ]


def _compete(
    rivals: Sequence[Rival],
    context: SearchContext,
    deadline: float | None,
    given: Sequence[Config],
) -> None:
    """Searches all rivals, then round after round the better half of them.

    The configs ``given`` come first of all.
    """
    left = context.num_trials - _num_kept_back(len(rivals))
    allotment = TimeAllotment(deadline, context.num_trials, context.clock)
    _begin(rivals, context, allotment, given, left)
    left -= sum(rival.num_failed_firsts for rival in rivals)
    searched = [rival for rival in rivals if rival.is_alive and rival.room]
    late = [rival for rival in rivals if not rival.has_begun]
    while searched and left > 0 and not allotment.is_over:
        quotas = _quotas(searched, left)
        left -= sum(quotas)
        # What compiles for one is ready when those before it have been measured.
        for rival, quota in zip(searched, quotas, strict=True):
            rival.plan(quota)
        for rival, quota in zip(searched, quotas, strict=True):
            rival.advance(quota, allotment.until(quota + 1))
        began = _begun_late(late, context)
        late = [rival for rival in late if not rival.has_begun]
        # One that has been tried in full stands as it is and takes nobody's place.
        searched = _fastest(rival for rival in (*searched, *began) if rival.room)
        alive = [rival for rival in rivals if rival.is_alive]
        searched = searched[: _half(len(searched))] or _fastest(r for r in alive if r.room)[:1]
    if not allotment.is_over:
        for rival in _fastest(rival for rival in rivals if rival.is_alive)[:1]:
            rival.combine(_NUM_COMBINED)


def _begin(
    rivals: Sequence[Rival],
    context: SearchContext,
    allotment: TimeAllotment,
    given: Sequence[Config],
    left: int,
) -> None:
    """Measures what is given and a first whole config of each; where one does not work, the next.

    Meanwhile the parts are looked through, and what they will try first begins to compile. When
    their share of the time is over and half of them have been measured, the others are not waited
    for: a compiler may take longer than there is time, and goes on meanwhile.
    """
    until = allotment.until(len(rivals))
    firsts = [config for rival in rivals if (config := rival.first(0)) is not None]
    context.prepare([*given, *firsts])
    if given[1:]:
        context.run.evaluate(context.evaluator, given)
    context.measure(
        [*given[:1], *firsts],
        until=until,
        num_enough=_half(len(firsts)),
        meanwhile=lambda: _plan(rivals, left),
    )
    waiting, place = list(rivals), 0
    while not allotment.is_over:
        place += 1
        waiting = [r for r in waiting if r.has_begun and not r.is_alive and r.first(place)]
        if not waiting:
            return
        following = [config for rival in waiting if (config := rival.first(place)) is not None]
        context.measure(following, until=until, num_enough=_half(len(following)))


def _plan(rivals: Sequence[Rival], left: int) -> None:
    """Lets compile what the first round begins with, if the first configs work."""
    searched = [rival for rival in rivals if rival.room]
    for rival, quota in zip(searched, _quotas(searched, left), strict=True):
        rival.plan(quota)


def _begun_late(late: Sequence[Rival], context: SearchContext) -> list[Rival]:
    """Those that have been compiled meanwhile and work."""
    firsts = [config for rival in late if (config := rival.first(0)) is not None]
    if firsts:
        context.measure(firsts, until=context.clock())
    return [rival for rival in late if rival.is_alive]


def _quotas(searched: Sequence[Rival], left: int) -> list[int]:
    """Trials of each in the next round."""
    if not searched or left <= 0:
        return [0] * len(searched)
    share = left // num_rounds(len(searched))
    return divide(share, [1.0] * len(searched), [rival.room for rival in searched])


def _fastest(rivals: Iterable[Rival]) -> list[Rival]:
    return sorted(rivals, key=lambda rival: (not rival.has_gone_on, rival.best_us))


def _half(number: int) -> int:
    return -(-number // 2)


def _num_kept_back(num_rivals: int) -> int:
    """Trials of the whole operation: a first one of each rival, one a round, combinations."""
    total = num_rivals + _NUM_COMBINED
    while num_rivals > 1:
        total += num_rivals
        num_rivals = _half(num_rivals)
    return total + num_rivals
