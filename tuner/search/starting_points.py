"""What a search tries before it searches: the default, hand-picked seeds, foreign winners."""

from __future__ import annotations

import math

from ...kernels.base import Config, Problem
from ...search_spaces.space import JointSpace
from ..store import Store
from ..store.records import StudyRecord

__all__ = ["MAX_FOREIGN_WINNERS", "problem_distance", "starting_points"]

MAX_FOREIGN_WINNERS = 8


def starting_points(space: JointSpace, store: Store, study: StudyRecord) -> list[Config]:
    """Configs to try first, without repeats.

    The defaults of all templates, the seeds, then what won the nearest problems of the same
    operation on the same SKU, as far as it is valid here.
    """
    key = study.key
    foreign = [
        winner
        for winner in store.winners(op=key.problem.op, skus=[key.device.sku])
        if winner.study.study_id != study.study_id
    ]
    foreign.sort(key=lambda w: (problem_distance(key.problem, w.study.key.problem), -w.winner_id))
    winners = dict.fromkeys(
        winner.trial.evaluation.config
        for winner in foreign
        if space.check(winner.trial.evaluation.config) is None
    )
    own = list(space.valid_seeds())
    return own + [c for c in list(winners)[:MAX_FOREIGN_WINNERS] if c not in own]


def problem_distance(mine: Problem, other: Problem) -> tuple[int, float]:
    """How unlike two problems of an operation are.

    Number of static fields that differ, then the sum of octaves between the dynamic ones.
    """
    a, b = mine.as_dict(), other.as_dict()
    static = [name for name in a if name not in mine.dynamic_fields]
    octaves = sum(abs(math.log2(int(a[name]) / int(b[name]))) for name in mine.dynamic_fields)
    return sum(a[name] != b[name] for name in static), octaves
