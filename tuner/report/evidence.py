"""What stands behind a winner: the best configs with their intervals, accuracy, parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...kernels.base import Config
from ..records import Provenance, Timing, TrialStatus
from ..search.importance import parameter_importance
from .rows import Origin, group_origin, groups, is_settled, num_samples, origin
from .searches import Search, is_ok
from .second_process import Pending, SecondProcess
from .wording import config_texts

__all__ = [
    "AccuracyRow",
    "BestConfigRow",
    "ImportanceRow",
    "Weighing",
    "accuracy_row",
    "best_config_rows",
    "importance_rows",
    "started_weighings",
]

NUM_BEST = 10
"""How many of the best configs of a search are told."""


@dataclass(frozen=True, kw_only=True)
class BestConfigRow(Origin):
    """One of the best configs of a search."""

    op: str
    problem: str
    rank: int
    """From 1: finalists in their final order, then the others by time."""
    is_finalist: bool
    time_us: float
    over_best: float
    """Its time over that of rank 1."""
    ci_low_us: float | None
    ci_high_us: float | None
    num_samples: int
    is_settled: bool | None
    """Whether its interval lies above that of the rank before; None where one has none."""
    template: str
    config_id: str
    config: str


@dataclass(frozen=True, kw_only=True)
class AccuracyRow(Origin):
    """How right the kernels of a search were, against the reference."""

    op: str
    problem: str
    num_right: int
    """Trials whose outputs were compared and right."""
    num_incorrect: int
    num_unrepeatable: int
    template: str | None
    max_abs_error: float | None
    """Of the best config."""
    relative_rms_error: float | None
    largest_abs_error: float | None
    """Of all configs that were right."""
    largest_relative_rms_error: float | None


@dataclass(frozen=True, kw_only=True)
class ImportanceRow(Origin):
    """How much the times of an operation on a SKU depend on one parameter."""

    op: str
    parameter: str
    share: float
    """All parameters together make 1."""
    num_searches: int
    num_times: int
    """Times behind the shares."""


def best_config_rows(search: Search) -> Iterator[BestConfigRow]:
    """The best ten configs that were ok, fastest first."""
    about, problem = origin(search), str(search.key.problem)
    finals = search.winner.finals if search.winner is not None else ()
    before: Timing | None = None
    for rank, trial in enumerate(search.ranked[:NUM_BEST], start=1):
        timing, config = trial.evaluation.timing, trial.evaluation.config
        assert timing is not None
        if rank == 1:
            first_us = timing.median_us
        has_spread = num_samples(timing) > 0
        config_id, values = config_texts(config)
        yield BestConfigRow(
            **about,
            op=search.key.problem.op,
            problem=problem,
            rank=rank,
            is_finalist=trial.trial_id in finals,
            time_us=timing.median_us,
            over_best=timing.median_us / first_us,
            ci_low_us=timing.ci_low_us if has_spread else None,
            ci_high_us=timing.ci_high_us if has_spread else None,
            num_samples=num_samples(timing),
            is_settled=is_settled(before, timing) if before is not None else None,
            template=config.template,
            config_id=config_id,
            config=values,
        )
        before = timing


def accuracy_row(search: Search) -> AccuracyRow | None:
    """The evidence of a search that ran its kernels; None where nothing was run."""
    if search.key.provenance is not Provenance.MEASURED:
        return None
    right = [
        trial.evaluation
        for trial in search.trials
        if is_ok(trial) and trial.evaluation.relative_rms_error is not None
    ]
    best = search.best.evaluation if search.best is not None else None
    counts = search.status_counts
    return AccuracyRow(
        **origin(search),
        op=search.key.problem.op,
        problem=str(search.key.problem),
        num_right=len(right),
        num_incorrect=counts.get(TrialStatus.INCORRECT, 0),
        num_unrepeatable=counts.get(TrialStatus.UNREPEATABLE, 0),
        template=best.config.template if best else None,
        max_abs_error=best.max_abs_error if best else None,
        relative_rms_error=best.relative_rms_error if best else None,
        largest_abs_error=max((e.max_abs_error or 0.0 for e in right), default=None),
        largest_relative_rms_error=max((e.relative_rms_error or 0.0 for e in right), default=None),
    )


@dataclass(frozen=True)
class Weighing:
    """The searches of an operation on a SKU, and the shares that are worked out of their times."""

    group: Sequence[Search]
    num_times: int
    shares: Pending[Mapping[str, float]]


def started_weighings(searches: Iterable[Search], second: SecondProcess) -> list[Weighing]:
    """Begins to weigh the parameters, one group an operation, SKU, provenance and policy."""
    started = []
    for group in groups(searches):
        relative = [pair for search in group for pair in _relative_times(search)]
        started.append(Weighing(group, len(relative), second.submit(_shares, relative)))
    return started


def importance_rows(weighings: Iterable[Weighing]) -> Iterator[ImportanceRow]:
    """One row a parameter of each group, the most important first."""
    for weighing in weighings:
        about = group_origin(weighing.group)
        for parameter, share in weighing.shares.result().items():
            yield ImportanceRow(
                **about,
                op=weighing.group[0].key.problem.op,
                parameter=parameter,
                share=share,
                num_searches=len(weighing.group),
                num_times=weighing.num_times,
            )


def _shares(times: Sequence[tuple[Config, float]]) -> Mapping[str, float]:
    return dict(parameter_importance(times))


def _relative_times(search: Search) -> Iterator[tuple[Config, float]]:
    """Each config's time over the best of its search: problems of all sizes count alike."""
    times_us = [trial.evaluation.time_us for trial in search.trials]
    fastest_us = min(filter(None, times_us), default=None)
    for trial, time_us in zip(search.trials, times_us, strict=True):
        if time_us and fastest_us:
            yield trial.evaluation.config, time_us / fastest_us
