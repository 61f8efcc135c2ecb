"""One row a search, a trial, a kernel of a winner, a way to fail: how the searches went.

What they found is ``rows``'.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from ..records import TrialStatus
from .rows import Origin, counts_text, group_origin, groups, origin
from .searches import Search, is_ok
from .wording import config_texts, iso_time

__all__ = [
    "BinaryRow",
    "FailureRow",
    "ProgressRow",
    "SearchRow",
    "binary_rows",
    "failure_rows",
    "progress_columns",
    "search_row",
]

NUM_REASONS = 3
"""How many reasons are told for each status in the failures."""


@dataclass(frozen=True, kw_only=True)
class BinaryRow(Origin):
    """What the binary of one kernel of a winner says of itself."""

    op: str
    problem: str
    template: str
    config_id: str
    kernel: str
    threads_per_block: int
    registers: int
    spill_bytes: int
    smem_bytes: int
    tmem_columns: int
    mma_kind: str
    num_instructions: int
    instruction_mix: str


@dataclass(frozen=True, kw_only=True)
class FailureRow(Origin):
    """How many trials, of parts too, ended in one way on one SKU, and why."""

    op: str
    status: str
    num_trials: int
    share_of_trials: float
    num_problems: int
    reasons: str
    """The commonest reasons with their counts."""


@dataclass(frozen=True, kw_only=True)
class SearchRow(Origin):
    """One study: how the search went, and whether it is the one shown for its problem."""

    op: str
    problem: str
    state: str
    is_shown: bool
    created: str
    seed: int
    num_trials: int
    trials_by_status: str
    num_part_trials: int
    """Trials of parts alone, beside those of the whole operation."""
    compile_s: float
    """Of all trials, those of parts included; so is the next."""
    measure_s: float
    space_fingerprint: str
    template_hashes: str
    study_digest: str


@dataclass(frozen=True, kw_only=True)
class ProgressRow(Origin):
    """One trial and the best time up to it."""

    op: str
    problem: str
    study_digest: str
    number: int
    status: str
    time_us: float | None
    best_us: float | None
    gpu_s: float
    """Seconds that the GPU was held for the trials up to this one, those of parts included."""
    config_id: str
    template: str
    config: str


def binary_rows(search: Search) -> Iterator[BinaryRow]:
    """One row a kernel of the best config."""
    if search.best is None:
        return
    evaluation = search.best.evaluation
    for facts in evaluation.facts:
        mix = sorted(facts.instruction_mix.items(), key=lambda item: (-item[1], item[0]))
        yield BinaryRow(
            **origin(search),
            op=search.key.problem.op,
            problem=str(search.key.problem),
            template=evaluation.config.template,
            config_id=evaluation.config.config_id,
            kernel=facts.kernel,
            threads_per_block=facts.threads_per_block,
            registers=facts.registers,
            spill_bytes=facts.spill_bytes,
            smem_bytes=facts.smem_bytes,
            tmem_columns=facts.tmem_columns,
            mma_kind=facts.mma_kind,
            num_instructions=facts.num_instructions,
            instruction_mix=", ".join(f"{name} {count}" for name, count in mix),
        )


def search_row(search: Search, *, is_shown: bool) -> SearchRow:
    """How the search went."""
    key, tried = search.key, [*search.trials, *search.part_trials]
    evaluations = [trial.evaluation for trial in tried]
    return SearchRow(
        **origin(search),
        op=key.problem.op,
        problem=str(key.problem),
        state=search.state,
        is_shown=is_shown,
        created=iso_time(search.study.created_at),
        seed=search.study.seed,
        num_trials=len(search.trials),
        trials_by_status=counts_text(search.status_counts),
        num_part_trials=len(search.part_trials),
        compile_s=sum(e.compile_s for e in evaluations),
        measure_s=sum(e.measure_s for e in evaluations),
        space_fingerprint=key.space_fingerprint,
        template_hashes=", ".join(f"{name} {source}" for name, source in key.template_hashes),
        study_digest=search.digest,
    )


def progress_columns(searches: Iterable[Search]) -> Mapping[str, list[Any]]:
    """The fields of ``ProgressRow`` with a value for each trial, in the order they ended.

    Columns and not rows: nothing else in a report has as many.
    """
    columns: dict[str, list[Any]] = {field.name: [] for field in fields(ProgressRow)}
    for search in searches:
        for name, values in _progress(search).items():
            columns[name] += values
    return columns


def _progress(search: Search) -> dict[str, list[Any]]:
    key, trials = search.key, search.trials
    evaluations = [trial.evaluation for trial in trials]
    times_us = [evaluation.time_us for evaluation in evaluations]
    right_us = [us if is_ok(t) else None for t, us in zip(trials, times_us, strict=True)]
    texts = [config_texts(evaluation.config) for evaluation in evaluations]
    alike = {
        **origin(search),
        "op": key.problem.op,
        "problem": str(key.problem),
        "study_digest": search.digest,
    }
    return {
        **{name: [value] * len(trials) for name, value in alike.items()},
        "date": [iso_time(trial.created_at) for trial in trials],
        "number": [trial.number for trial in trials],
        "status": [evaluation.status.value for evaluation in evaluations],
        "time_us": times_us,
        "best_us": list(accumulate(right_us, _faster)),
        "gpu_s": _gpu_seconds(search),
        "config_id": [config_id for config_id, _ in texts],
        "template": [evaluation.config.template for evaluation in evaluations],
        "config": [values for _, values in texts],
    }


def _gpu_seconds(search: Search) -> list[float]:
    """For each trial the seconds up to it, those of parts that ended before it included."""
    own = accumulate(trial.evaluation.measure_s for trial in search.trials)
    if not search.part_trials:
        return list(own)
    parts = sorted(search.part_trials, key=lambda trial: trial.created_at)
    ended = [trial.created_at for trial in parts]
    sums = [0.0, *accumulate(trial.evaluation.measure_s for trial in parts)]
    return [
        seconds + sums[bisect_right(ended, trial.created_at)]
        for seconds, trial in zip(own, search.trials, strict=True)
    ]


def _faster(best_us: float | None, time_us: float | None) -> float | None:
    return min(filter(None, (best_us, time_us)), default=None)


def failure_rows(searches: Iterable[Search]) -> Iterator[FailureRow]:
    """One row a status other than ok, by SKU and operation, the commonest first."""
    for group in groups(searches):
        trials = [(s.key.problem, t.evaluation) for s in group for t in (*s.trials, *s.part_trials)]
        counts = Counter(evaluation.status for _, evaluation in trials)
        for status, count in counts.most_common():
            if status is TrialStatus.OK:
                continue
            ended_so = [(p, e.reason or "no reason given") for p, e in trials if e.status is status]
            reasons = Counter(reason for _, reason in ended_so)
            yield FailureRow(
                **group_origin(group),
                op=group[0].key.problem.op,
                status=status.value,
                num_trials=count,
                share_of_trials=count / len(trials),
                num_problems=len({problem for problem, _ in ended_so}),
                reasons=_reasons_text(reasons),
            )


def _reasons_text(reasons: Counter[str]) -> str:
    told = [f"{reason} ({count})" for reason, count in reasons.most_common(NUM_REASONS)]
    untold = len(reasons) - len(told)
    return "; ".join(told) + (f"; {untold} other reasons" if untold > 0 else "")
