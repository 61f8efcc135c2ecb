"""One row a finding, with its device, date, versions and provenance: what the tables are made of.

Field names carry the unit and become the columns of the CSV files. Rows of one SKU only; two SKUs
side by side are ``comparison``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, log
from statistics import median

from ..prediction.roofline import roofline_us
from ..records import Timing, TrialStatus
from .searches import Search, is_ok
from .wording import iso_time, versions_text

__all__ = [
    "BinaryRow",
    "DeviceRow",
    "FailureRow",
    "Origin",
    "ProgressRow",
    "ResultRow",
    "SearchRow",
    "SummaryRow",
    "binary_rows",
    "device_rows",
    "failure_rows",
    "progress_rows",
    "result_row",
    "search_row",
    "summary_rows",
]

NUM_REASONS = 3
"""How many reasons are told for each status in the failures."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a figure comes from; every row begins with it."""

    sku: str
    device: str
    """Product name of the GPU."""
    provenance: str
    policy: str
    versions: str
    date: str
    """When it was decided or last changed."""


@dataclass(frozen=True, kw_only=True)
class ResultRow(Origin):
    """What the search of one problem on one SKU found."""

    op: str
    problem: str
    workload: str
    state: str
    template: str | None
    config: str | None
    config_id: str | None
    time_us: float | None
    default_config: str | None
    default_status: str | None
    default_time_us: float | None
    gain_over_default: float | None
    """Default time over winner's time: above 1 the winner is faster."""
    baseline: str
    """Name of the other library it is compared with."""
    baseline_time_us: float | None
    speedup_over_baseline: float | None
    achieved_gbps: float | None
    achieved_tflops: float | None
    roofline_us: float
    share_of_roofline: float | None
    p10_us: float | None
    p90_us: float | None
    ci_low_us: float | None
    ci_high_us: float | None
    num_samples: int
    num_trials: int
    trials_by_status: str
    trial_id: int | None
    study_id: int


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
    config_id: str
    template: str
    config: str


@dataclass(frozen=True, kw_only=True)
class DeviceRow(Origin):
    """One SKU under one toolchain, policy and provenance, and how much there is of it."""

    compute_capability: str
    num_sms: int
    memory_bytes: int
    bandwidth_gbps: float
    peak_tflops: str
    """Dense peak rate by operand dtype."""
    num_studies: int
    num_trials: int
    first_date: str


@dataclass(frozen=True, kw_only=True)
class SummaryRow(Origin):
    """The problems of one operation on one SKU in a line."""

    op: str
    num_problems: int
    num_decided: int
    num_compared: int
    """Problems where winner and default both have a time: those that the gains speak of."""
    geomean_gain_over_default: float | None
    smallest_gain_over_default: float | None
    median_share_of_roofline: float | None
    num_trials: int


def origin(search: Search) -> dict[str, str]:
    """The fields of ``Origin`` for a search."""
    key = search.key
    return {
        "sku": search.sku,
        "device": key.device.name,
        "provenance": key.provenance.value,
        "policy": str(key.policy),
        "versions": versions_text(key.toolchain),
        "date": iso_time(search.last_change),
    }


def result_row(search: Search) -> ResultRow:
    """What the search found; times are blank where nothing worked."""
    key, best, default = search.key, search.best, search.default
    timing = best.evaluation.timing if best else None
    config = best.evaluation.config if best else None
    time_us = timing.median_us if timing else None
    default_us = default.evaluation.time_us if default else None
    bound_us = roofline_us(key.problem, key.device)
    spread = timing if timing is not None and num_samples(timing) else None
    return ResultRow(
        **origin(search),
        op=key.problem.op,
        problem=str(key.problem),
        workload=search.workload,
        state=search.state,
        template=config.template if config else None,
        config=str(config) if config else None,
        config_id=config.config_id if config else None,
        time_us=time_us,
        default_config=str(default.evaluation.config) if default else None,
        default_status=default.evaluation.status.value if default else None,
        default_time_us=default_us,
        gain_over_default=_ratio(default_us, time_us),
        baseline="none",
        baseline_time_us=None,
        speedup_over_baseline=None,
        achieved_gbps=_ratio(key.problem.bytes_moved / 1e3, time_us),
        achieved_tflops=_ratio(key.problem.flops / 1e6, time_us),
        roofline_us=bound_us,
        share_of_roofline=_ratio(bound_us, time_us),
        p10_us=spread.p10_us if spread else None,
        p90_us=spread.p90_us if spread else None,
        ci_low_us=spread.ci_low_us if spread else None,
        ci_high_us=spread.ci_high_us if spread else None,
        num_samples=num_samples(timing) if timing else 0,
        num_trials=len(search.trials),
        trials_by_status=_counts_text(search.status_counts),
        trial_id=best.trial_id if best else None,
        study_id=search.study.study_id,
    )


def num_samples(timing: Timing) -> int:
    """How many samples are behind a time; 0 for a prediction, which has no spread."""
    return timing.num_samples or len(timing.samples_us)


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
        trials_by_status=_counts_text(search.status_counts),
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
    for trial in search.trials:
        evaluation = trial.evaluation
        time_us = evaluation.time_us
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
            config_id=evaluation.config.config_id,
            template=evaluation.config.template,
            config=str(evaluation.config),
        )


def failure_rows(searches: Iterable[Search]) -> Iterator[FailureRow]:
    """One row a status other than ok, by SKU and operation, the commonest first."""
    for group in _groups(searches):
        trials = [(s.key.problem, t.evaluation) for s in group for t in s.trials]
        counts = Counter(evaluation.status for _, evaluation in trials)
        for status, count in counts.most_common():
            if status is TrialStatus.OK:
                continue
            ended_so = [(p, e.reason or "no reason given") for p, e in trials if e.status is status]
            reasons = Counter(reason for _, reason in ended_so)
            yield FailureRow(
                **_group_origin(group),
                op=group[0].key.problem.op,
                status=status.value,
                num_trials=count,
                share_of_trials=count / len(trials),
                num_problems=len({problem for problem, _ in ended_so}),
                reasons=_reasons_text(reasons),
            )


def device_rows(searches: Iterable[Search]) -> Iterator[DeviceRow]:
    """One row a SKU, toolchain, policy and provenance."""
    grouped: dict[tuple[object, ...], list[Search]] = {}
    for search in searches:
        key = search.key
        place = (search.sku, key.provenance, key.policy, key.toolchain, key.device)
        grouped.setdefault(place, []).append(search)
    for group in grouped.values():
        device = group[0].key.device
        peaks = sorted(device.peak_tflops.items())
        yield DeviceRow(
            **_group_origin(group),
            compute_capability=device.compute_capability_text,
            num_sms=device.num_sms,
            memory_bytes=device.memory_bytes,
            bandwidth_gbps=device.bandwidth_gbps,
            peak_tflops=", ".join(f"{dtype} {rate:g}" for dtype, rate in peaks),
            num_studies=len(group),
            num_trials=sum(len(s.trials) for s in group),
            first_date=min(iso_time(s.study.created_at) for s in group),
        )


def summary_rows(searches: Iterable[Search]) -> Iterator[SummaryRow]:
    """One row an operation, SKU, provenance and policy."""
    for group in _groups(searches):
        results = [result_row(search) for search in group]
        gains = [r.gain_over_default for r in results if r.gain_over_default is not None]
        shares = [r.share_of_roofline for r in results if r.share_of_roofline is not None]
        yield SummaryRow(
            **_group_origin(group),
            op=group[0].key.problem.op,
            num_problems=len(results),
            num_decided=sum(s.winner is not None for s in group),
            num_compared=len(gains),
            geomean_gain_over_default=geometric_mean(gains),
            smallest_gain_over_default=min(gains, default=None),
            median_share_of_roofline=median(shares) if shares else None,
            num_trials=sum(r.num_trials for r in results),
        )


def geometric_mean(ratios: list[float]) -> float | None:
    """Geometric mean; None of nothing."""
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else None


def _groups(searches: Iterable[Search]) -> Iterator[list[Search]]:
    grouped: dict[tuple[object, ...], list[Search]] = {}
    for search in searches:
        key = search.key
        place = (key.problem.op, search.sku, key.provenance, key.policy)
        grouped.setdefault(place, []).append(search)
    yield from grouped.values()


def _group_origin(group: list[Search]) -> dict[str, str]:
    """The origin of several searches of one SKU: all their versions, the last date."""
    origins = [origin(search) for search in group]
    versions = dict.fromkeys(about["versions"] for about in origins)
    last = max(about["date"] for about in origins)
    return {**origins[0], "versions": "; ".join(versions), "date": last}


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _counts_text(counts: dict[TrialStatus, int]) -> str:
    return ", ".join(f"{status.value} {count}" for status, count in counts.items()) or "no trials"


def _reasons_text(reasons: Counter[str]) -> str:
    told = [f"{reason} ({count})" for reason, count in reasons.most_common(NUM_REASONS)]
    untold = len(reasons) - len(told)
    return "; ".join(told) + (f"; {untold} other reasons" if untold > 0 else "")
