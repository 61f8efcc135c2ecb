"""The searches a report speaks of: studies of all databases, merged, with their trials.

Reads the stores and chooses what is shown; the figures of a search are ``rows``'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property
from itertools import chain
from typing import TYPE_CHECKING, Literal

from ...errors import UnknownNameError, UnsupportedError, UsageError
from ...kernels.base import Config, Problem
from ...kernels.registry import supported_templates, template
from ...search_spaces.registry import space_of
from ..catalog import workload, workload_names
from ..records import Provenance, StudyKey, TrialStatus
from ..sku_names import resolve_sku_names
from .baselines import Baseline
from .wording import iso_time

if TYPE_CHECKING:
    from ..store import Store
    from ..store.records import StudyRecord, TrialRecord, WinnerRecord

__all__ = [
    "Search",
    "SearchState",
    "is_library",
    "load_searches",
    "ordered_skus",
    "resolve_skus",
    "shown",
    "with_baselines",
]

SearchState = Literal["decided", "undecided", "nothing worked"]


@dataclass(frozen=True)
class Search:
    """One study, its trials in the order they ended and, where it was decided, its winner."""

    study: StudyRecord
    trials: tuple[TrialRecord, ...]
    winner: WinnerRecord | None
    workload: str = ""
    """Where the shipped workloads have this problem: ``workload: label``."""
    baselines: tuple[Baseline, ...] = ()
    """Other libraries on this problem and SKU."""
    part_trials: tuple[TrialRecord, ...] = ()
    """What was tried of its parts alone, for templates that have parts; in no order."""

    @property
    def key(self) -> StudyKey:
        """What the study is about."""
        return self.study.key

    @cached_property
    def digest(self) -> str:
        """Hex identity of the study."""
        return self.key.digest

    @property
    def sku(self) -> str:
        """Short name of the device."""
        return self.key.device.sku

    @property
    def is_predicted(self) -> bool:
        """Whether its times come from the cost model."""
        return self.key.provenance is Provenance.PREDICTED

    @cached_property
    def has_libraries(self) -> bool:
        """Whether it measured kernels of other libraries: beside our winner, no search of ours."""
        op = self.key.problem.op
        return any(is_library(op, name) for name, _ in self.key.template_hashes)

    @cached_property
    def status_counts(self) -> dict[TrialStatus, int]:
        """Number of trials by status, the commonest first, the fixed order among equals."""
        counts = Counter(trial.evaluation.status for trial in self.trials)
        present = [status for status in TrialStatus if counts[status]]
        return {status: counts[status] for status in sorted(present, key=lambda s: -counts[s])}

    @cached_property
    def best(self) -> TrialRecord | None:
        """The winner's trial; before the finals the fastest trial that was ok."""
        if self.winner is not None:
            return self.winner.trial
        timed = [t for t in self.trials if is_ok(t)]
        return min(timed, key=lambda t: t.evaluation.time_us or 0.0, default=None)

    @cached_property
    def ranked(self) -> tuple[TrialRecord, ...]:
        """Trials that were ok: finalists in their final order, then the others by time."""
        finals = self.winner.finals if self.winner is not None else ()
        places = {trial_id: place for place, trial_id in enumerate(finals)}
        return tuple(
            sorted(
                filter(is_ok, self.trials),
                key=lambda t: (places.get(t.trial_id, len(places)), t.evaluation.time_us or 0.0),
            )
        )

    @cached_property
    def by_config(self) -> dict[Config, TrialRecord]:
        """The trials by their configs."""
        return {trial.evaluation.config: trial for trial in self.trials}

    @cached_property
    def default(self) -> TrialRecord | None:
        """The trial of the config that runs untuned; None where that config has no trial here."""
        config = _default_config(self.key)
        return None if config is None else self.by_config.get(config)

    @property
    def language(self) -> str | None:
        """What the best config is written in; None where this installation lacks the template."""
        config = self.best.evaluation.config if self.best is not None else None
        return None if config is None else _language(self.key.problem.op, config.template)

    @cached_property
    def algorithm(self) -> str | None:
        """The best config's parameters that choose among algorithms; None where there is one."""
        return None if self.best is None else _algorithm(self.key, self.best.evaluation.config)

    @property
    def state(self) -> SearchState:
        """``decided`` after the finals, ``undecided`` before them, else ``nothing worked``."""
        if self.winner is not None:
            return "decided"
        return "undecided" if self.best is not None else "nothing worked"

    @property
    def last_change(self) -> datetime:
        """When it was decided, else when its last trial ended, else when it was created."""
        if self.winner is not None:
            return self.winner.decided_at
        return self.trials[-1].created_at if self.trials else self.study.created_at


def is_ok(trial: TrialRecord) -> bool:
    """Whether the trial was verified and has a time."""
    evaluation = trial.evaluation
    return evaluation.status is TrialStatus.OK and evaluation.timing is not None


def resolve_skus(stores: Sequence[Store], gpus: Sequence[str] | None) -> tuple[str, ...] | None:
    """The SKUs of the filter ``gpus`` by their short names; None where there is no filter.

    Raises:
        UsageError: an empty filter.
        UnknownNameError: a name that neither the databases nor ``configs/gpus`` know.
    """
    if gpus is None:
        return None
    if isinstance(gpus, str) or not gpus:
        raise UsageError(
            f"gpus={gpus!r} must be a list of at least one SKU name; leave it out for all SKUs"
        )
    present = {
        study.key.device.sku for store in stores for study in (*store.studies(), *store.baselines())
    }
    return resolve_sku_names(gpus, present)


def load_searches(stores: Sequence[Store], skus: Sequence[str] | None) -> tuple[Search, ...]:
    """All searches of the stores on these SKUs, by problem, then in the order they were made.

    The same study in two databases is shown once: as it was decided last, else with most trials,
    else from the earlier store.
    """
    found: dict[str, Search] = {}
    labels = _workload_labels()
    for store in stores:
        winners = {winner.study.study_id: winner for winner in store.winners(skus=skus)}
        studies, parts = store.studies_with_parts(skus=skus)
        wanted = (*studies, *chain.from_iterable(parts.values()))
        trials = store.trials_by_study([s.study_id for s in wanted], with_samples=False)
        for study in studies:
            own_parts = parts.get(study.key.digest, ()) if parts else ()
            of_parts = (trials[part.study_id] for part in own_parts)
            search = Search(
                study,
                tuple(trials[study.study_id]),
                winners.get(study.study_id),
                labels.get(study.key.problem, ""),
                part_trials=tuple(chain.from_iterable(of_parts)),
            )
            known = found.get(search.digest)
            if known is None or _completeness(search) > _completeness(known):
                found[search.digest] = search
    return tuple(sorted(found.values(), key=_order))


def with_baselines(searches: Iterable[Search], baselines: Iterable[Baseline]) -> tuple[Search, ...]:
    """The searches, each with the baselines of its problem and SKU."""
    others: dict[tuple[Problem, str], list[Baseline]] = {}
    for baseline in baselines:
        others.setdefault((baseline.key.problem, baseline.sku), []).append(baseline)
    return tuple(
        replace(search, baselines=tuple(others.get((search.key.problem, search.sku), ())))
        for search in searches
    )


def _workload_labels() -> dict[Problem, str]:
    labels: dict[Problem, list[str]] = {}
    for name in workload_names():
        for labelled in workload(name).problems:
            labels.setdefault(labelled.problem, []).append(f"{name}: {labelled.label}")
    return {problem: "; ".join(found) for problem, found in labels.items()}


def _default_config(key: StudyKey) -> Config | None:
    """What runs untuned; None where this installation has no template for the problem."""
    try:
        first = supported_templates(key.problem, key.device)[0]
        return space_of(key.problem, first.name, key.device).default
    except (UnknownNameError, UnsupportedError):
        return None


@cache
def is_library(op: str, name: str) -> bool:
    """Whether the template is another library's kernel, as far as this installation knows it."""
    try:
        return template(op, name).is_external
    except UnknownNameError:
        return False


@cache
def _language(op: str, name: str) -> str | None:
    try:
        return template(op, name).backend
    except UnknownNameError:
        return None


def _algorithm(key: StudyKey, config: Config) -> str | None:
    if _language(key.problem.op, config.template) is None:
        return None
    parameters = space_of(key.problem, config.template, key.device).parameters
    if not any(parameter.part for parameter in parameters):
        return None
    shared = {parameter.name for parameter in parameters if not parameter.part}
    return " ".join(f"{name}={value}" for name, value in config.values if name in shared)


def _completeness(search: Search) -> tuple[bool, str, int]:
    decided = search.winner is not None
    return decided, iso_time(search.last_change) if decided else "", len(search.trials)


def _order(search: Search) -> tuple[object, ...]:
    problem = search.key.problem
    values = tuple((str(type(v)), v) for v in problem.as_dict().values())
    return problem.op, values, search.sku, search.key.provenance, iso_time(search.study.created_at)


def shown(searches: Iterable[Search]) -> tuple[Search, ...]:
    """The search that speaks for each problem, SKU, provenance and policy: the last decided.

    Ours before one of libraries. Where none is decided, the one that changed last. The others
    stay in the list of searches.
    """
    chosen: dict[tuple[object, ...], Search] = {}
    for search in searches:
        key = search.key
        place = (key.problem, search.sku, key.provenance, key.policy)
        if place not in chosen or _currency(search) >= _currency(chosen[place]):
            chosen[place] = search
    return tuple(chosen.values())


def _currency(search: Search) -> tuple[bool, bool, str]:
    is_decided = search.winner is not None
    return not search.has_libraries, is_decided, iso_time(search.last_change)


def ordered_skus(
    searches: Iterable[Search],
    requested: Sequence[str] | None,
    baselines: Iterable[Baseline] = (),
) -> tuple[str, ...]:
    """The SKUs of a report, the first being the one the others are compared with.

    As requested; else those with measurements of ours first, then by bandwidth.
    """
    if requested is not None:
        return tuple(requested)
    ranks: dict[str, tuple[bool, float, str]] = {}
    keys = [(not search.is_predicted, search.key) for search in searches]
    keys += [(False, baseline.key) for baseline in baselines]
    for is_measured_here, key in keys:
        sku = key.device.sku
        rank = (not is_measured_here, key.device.bandwidth_gbps, sku)
        ranks[sku] = min(rank, ranks.get(sku, rank))
    return tuple(sorted(ranks, key=lambda sku: ranks[sku]))
