"""One row a search, a trial, a kernel of a winner, a way to fail: how the searches went.

What they found is ``rows``'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..records import TrialStatus
from .rows import Origin, counts_text, group_origin, groups, origin
from .searches import Search, is_ok
from .wording import iso_time

__all__ = [
    "BinaryRow",
    "FailureRow",
    "ProgressRow",
    "SearchRow",
    "binary_rows",
    "failure_rows",
    "progress_rows",
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
    """How many trials ended in one way on one SKU, and why."""

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
    compile_s: float
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
    """Seconds that the GPU was held for the trials up to this one."""
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
    key, evaluations = search.key, [trial.evaluation for trial in search.trials]
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
        compile_s=sum(e.compile_s for e in evaluations),
        measure_s=sum(e.measure_s for e in evaluations),
        space_fingerprint=key.space_fingerprint,
        template_hashes=", ".join(f"{name} {source}" for name, source in key.template_hashes),
        study_digest=key.digest,
    )


def progress_rows(search: Search) -> Iterator[ProgressRow]:
    """One row a trial, in the order they ended."""
    about = origin(search)
    op, problem, digest = search.key.problem.op, str(search.key.problem), search.key.digest
    best_us: float | None = None
    gpu_s = 0.0
    for trial in search.trials:
        evaluation = trial.evaluation
        time_us = evaluation.time_us
        gpu_s += evaluation.measure_s
        if is_ok(trial) and time_us is not None:
            best_us = time_us if best_us is None else min(best_us, time_us)
        yield ProgressRow(
            **{**about, "date": iso_time(trial.created_at)},
            op=op,
            problem=problem,
            study_digest=digest,
            number=trial.number,
            status=evaluation.status.value,
            time_us=time_us,
            best_us=best_us,
            gpu_s=gpu_s,
            config_id=evaluation.config.config_id,
            template=evaluation.config.template,
            config=str(evaluation.config),
        )


def failure_rows(searches: Iterable[Search]) -> Iterator[FailureRow]:
    """One row a status other than ok, by SKU and operation, the commonest first."""
    for group in groups(searches):
        trials = [(s.key.problem, t.evaluation) for s in group for t in s.trials]
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
