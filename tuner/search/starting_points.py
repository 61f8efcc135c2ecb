"""What a search tries before it searches: the default, hand-picked seeds, foreign winners.

A foreign winner can mislead, so there are few of them and they are kept apart: ``ForeignStart``
decides how many of them are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...kernels.base import Config, Problem
from ...search_spaces.space import JointSpace
from ..records import Provenance, StudyKey, TrialStatus
from ..store import Store
from ..store.records import StudyRecord, WinnerRecord

__all__ = [
    "MAX_FOREIGN_WINNERS",
    "StartingPoints",
    "problem_distance",
    "starting_points",
    "winner_distance",
]

MAX_FOREIGN_WINNERS = 8

_SIBLING_OCTAVES = 1.0
"""What another SKU of the same compute capability counts like in octaves of the problem."""
_STRANGER_OCTAVES = 4.0
"""The same for another compute capability."""


@dataclass(frozen=True)
class StartingPoints:
    """Configs to begin with, each once."""

    own: tuple[Config, ...]
    """The defaults of all templates and the seeds."""
    foreign: tuple[Config, ...]
    """Winners from elsewhere that are none of the own, nearest first."""
    near: tuple[Config, ...] = ()
    """The nearest winners, the own among them."""


def starting_points(space: JointSpace, store: Store, study: StudyRecord) -> StartingPoints:
    """Configs to begin with.

    The defaults of all templates and the seeds; beside them the winners of the same operation,
    nearest first, be it another problem on this SKU or a measured one on another SKU; then, as far
    as there is room among the foreign ones, the finalists behind the nearest winners. What another
    problem's space lacks (the norm's tile, where the operation has no norm) is the default's.
    """
    foreign = sorted(
        (
            winner
            for winner in store.winners(op=study.key.problem.op)
            if winner.study.study_id != study.study_id and _counts(winner, study.key)
        ),
        key=lambda winner: (winner_distance(study.key, winner.study.key), -winner.winner_id),
    )
    own = tuple(space.valid_seeds())
    taken: list[Config] = []
    near: list[Config] = []
    for config in map(space.adapted, _configs(foreign, store)):
        if len(taken) == MAX_FOREIGN_WINNERS:
            break
        if config is None or config in near:
            continue
        near.append(config)
        if config not in own:
            taken.append(config)
    return StartingPoints(own, tuple(taken), tuple(near))


def _counts(winner: WinnerRecord, mine: StudyKey) -> bool:
    """Whether the winner says something: a prediction for another SKU does not."""
    theirs = winner.study.key
    return theirs.device.sku == mine.device.sku or theirs.provenance is Provenance.MEASURED


def _configs(winners: Iterable[WinnerRecord], store: Store) -> Iterator[Config]:
    """All winners in order, then their other finalists, winner after winner."""
    ordered = list(winners)
    yield from (winner.trial.evaluation.config for winner in ordered)
    # Behind a winner the best that its study found come close; more would not be taken anyway.
    for winner in ordered[:MAX_FOREIGN_WINNERS]:
        trials = {trial.trial_id: trial for trial in store.trials(winner.study.study_id)}
        for trial_id in winner.finals:
            trial = trials.get(trial_id)
            if trial is not None and trial.evaluation.status is TrialStatus.OK:
                yield trial.evaluation.config


def winner_distance(mine: StudyKey, other: StudyKey) -> tuple[int, float]:
    """How far a winner of ``other`` is from a study of ``mine``: its problem and its SKU.

    Number of static fields that differ, then octaves: those of the problems, and some for the SKU.
    """
    num_static, octaves = problem_distance(mine.problem, other.problem)
    if mine.device.sku != other.device.sku:
        same = mine.device.compute_capability == other.device.compute_capability
        octaves += _SIBLING_OCTAVES if same else _STRANGER_OCTAVES
    return num_static, octaves


def problem_distance(mine: Problem, other: Problem) -> tuple[int, float]:
    """How unlike two problems of an operation are.

    Number of static fields that differ, then the sum of octaves between the dynamic ones.
    """
    a, b = mine.as_dict(), other.as_dict()
    static = [name for name in a if name not in mine.dynamic_fields]
    octaves = sum(abs(math.log2(int(a[name]) / int(b[name]))) for name in mine.dynamic_fields)
    return sum(a[name] != b[name] for name in static), octaves
