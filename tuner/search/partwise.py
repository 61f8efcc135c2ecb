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
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from ...kernels.base import Config
from ...search_spaces.parts import Algorithm, algorithms, has_parts
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
                clock=clock,
            )
    run = StudyRun(store, study, listener)
    with closing(evaluators(study, None)) as evaluator:
        context = SearchContext(
            run=run,
            evaluator=evaluator,
            evaluators=evaluators,
            store=store,
            points=starting_points(space, store, study),
            listener=listener,
            seed=seed,
            num_trials=num_trials,
            gain=gain,
            clock=clock,
        )
        context.measure([space.default])
        run.evaluate(evaluator, carried)
        _compete(_rivals(space, context), context, deadline)
        return run.decide(evaluator, space.default, num_finalists)


def expected_trials(space: JointSpace, num_trials: int) -> int:
    """How many trials a search will have at most: where its spaces are small, fewer than asked."""
    if not any(map(has_parts, space.spaces)):
        return min(num_trials, space.count())
    contents = _Contents.of(space)
    size = _num_kept_back(len(contents.whole) + len(contents.partwise))
    sizes = itertools.chain(
        (whole.count() for whole in contents.whole),
        (sum(part_sizes(algorithm).values()) for algorithm in contents.partwise),
    )
    for more in sizes:
        size += more
        if size >= num_trials:
            return num_trials
    return size


@dataclass(frozen=True)
class _Contents:
    """A joint space taken apart."""

    whole: tuple[JointSpace, ...]
    """What is searched as one: all templates without parts, each algorithm of a single part."""
    partwise: tuple[Algorithm, ...]

    @classmethod
    def of(cls, space: JointSpace) -> _Contents:
        plain = tuple(part for part in space.spaces if not has_parts(part))
        whole = [JointSpace(plain)] if plain else []
        partwise: list[Algorithm] = []
        for part in space.spaces:
            for algorithm in algorithms(part) if has_parts(part) else ():
                if len(algorithm.part_names) < 2:
                    whole.append(JointSpace((algorithm.space,)))
                else:
                    partwise.append(algorithm)
        return cls(tuple(whole), tuple(partwise))


def _rivals(space: JointSpace, context: SearchContext) -> list[Rival]:
    """What competes: the default's first, then by seeds; of too many a random sample."""
    contents = _Contents.of(space)
    found: list[JointSpace | Algorithm] = [*contents.whole, *contents.partwise]
    seeds = space.valid_seeds()

    def place(rival: JointSpace | Algorithm) -> int:
        own = rival.space if isinstance(rival, Algorithm) else rival
        mine = [i for i, config in enumerate(seeds) if own.check(config) is None]
        return mine[0] if mine else len(seeds)

    found.sort(key=place)
    seeded = [rival for rival in found if place(rival) < len(seeds)]
    others = found[len(seeded) :]
    random.Random(context.seed).shuffle(others)
    taken = (seeded + others)[: max(1, context.num_trials // _TRIALS_PER_RIVAL)]
    return [
        PartwiseRival(context, rival)
        if isinstance(rival, Algorithm)
        else WholeRival(context, rival)
        for rival in taken
    ]


def _compete(rivals: Sequence[Rival], context: SearchContext, deadline: float | None) -> None:
    """Searches all rivals, then round after round the better half of them."""
    left = context.num_trials - _num_kept_back(len(rivals))
    allotment = TimeAllotment(deadline, context.num_trials, context.clock)
    for i, rival in enumerate(rivals):
        if i and allotment.is_over:
            break
        rival.begin()
        allotment.until(1)
    alive = [rival for rival in rivals if rival.is_alive]
    searched = [rival for rival in alive if rival.room]
    while searched and left > 0 and not allotment.is_over:
        share = left // num_rounds(len(searched))
        quotas = divide(share, [1.0] * len(searched), [rival.room for rival in searched])
        left -= sum(quotas)
        for rival, quota in zip(searched, quotas, strict=True):
            rival.advance(quota, allotment.until(quota + 1))
        # One that has been tried in full stands as it is and takes nobody's place.
        searched = _fastest(rival for rival in searched if rival.room)
        searched = searched[: _half(len(searched))] or _fastest(r for r in alive if r.room)[:1]
    if not allotment.is_over:
        for rival in _fastest(alive)[:1]:
            rival.combine(_NUM_COMBINED)


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
