"""One row a finding, with its device, date, versions and provenance: what the tables are made of.

Field names carry the unit and become the columns of the CSV files. Rows of one SKU only; two SKUs
side by side are ``comparison``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from ..prediction.roofline import roofline_us
from ..records import Timing, TrialStatus
from .baselines import fastest_baseline, mixture
from .searches import Search
from .wording import iso_time, versions_text

__all__ = [
    "DeviceRow",
    "Origin",
    "ResultRow",
    "SummaryRow",
    "device_rows",
    "result_row",
    "summary_rows",
]


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
    language: str | None
    """What the winner is written in."""
    template: str | None
    algorithm: str | None
    """The parameters that choose the winner's algorithm, for a template that has several."""
    config: str | None
    config_id: str | None
    time_us: float | None
    default_config: str | None
    default_status: str | None
    default_time_us: float | None
    gain_over_default: float | None
    """Default time over winner's time: above 1 the winner is faster."""
    baseline: str
    """The other library it is compared with: the fastest under the same policy."""
    baseline_version: str | None
    baseline_time_us: float | None
    baseline_provenance: str | None
    speedup_over_baseline: float | None
    """Baseline's time over winner's: above 1 the winner is faster."""
    speedup_provenance: str | None
    """What that ratio rests on."""
    achieved_gbps: float | None
    achieved_tflops: float | None
    roofline_us: float
    share_of_roofline: float | None
    p10_us: float | None
    p90_us: float | None
    ci_low_us: float | None
    ci_high_us: float | None
    num_samples: int
    is_settled: bool | None
    """Whether it is faster than the second best beyond the intervals of both."""
    num_trials: int
    trials_by_status: str
    trial_id: int | None
    study_id: int


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
    num_with_baseline: int
    """Problems with a baseline of another library under the same policy."""
    geomean_speedup_over_baseline: float | None
    smallest_speedup_over_baseline: float | None
    speedup_provenance: str | None
    """What those ratios rest on."""
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
    other = fastest_baseline(search.baselines, key)
    other_us = other.time_us if other else None
    return ResultRow(
        **origin(search),
        op=key.problem.op,
        problem=str(key.problem),
        workload=search.workload,
        state=search.state,
        language=search.language,
        template=config.template if config else None,
        algorithm=search.algorithm,
        config=str(config) if config else None,
        config_id=config.config_id if config else None,
        time_us=time_us,
        default_config=str(default.evaluation.config) if default else None,
        default_status=default.evaluation.status.value if default else None,
        default_time_us=default_us,
        gain_over_default=ratio(default_us, time_us),
        baseline=other.name if other else "none",
        baseline_version=other.said("version") if other else None,
        baseline_time_us=other_us,
        baseline_provenance=other.key.provenance.value if other else None,
        speedup_over_baseline=ratio(other_us, time_us),
        speedup_provenance=(
            mixture(other.key.provenance, key.provenance) if other and time_us else None
        ),
        achieved_gbps=ratio(key.problem.bytes_moved / 1e3, time_us),
        achieved_tflops=ratio(key.problem.flops / 1e6, time_us),
        roofline_us=bound_us,
        share_of_roofline=ratio(bound_us, time_us),
        p10_us=spread.p10_us if spread else None,
        p90_us=spread.p90_us if spread else None,
        ci_low_us=spread.ci_low_us if spread else None,
        ci_high_us=spread.ci_high_us if spread else None,
        num_samples=num_samples(timing) if timing else 0,
        is_settled=_is_lead_settled(search),
        num_trials=len(search.trials),
        trials_by_status=counts_text(search.status_counts),
        trial_id=best.trial_id if best else None,
        study_id=search.study.study_id,
    )


def num_samples(timing: Timing) -> int:
    """How many samples are behind a time; 0 for a prediction, which has no spread."""
    return timing.num_samples or len(timing.samples_us)


def is_settled(faster: Timing, slower: Timing) -> bool | None:
    """Whether the interval of the slower lies above that of the faster; None where one has none."""
    if not (num_samples(faster) and num_samples(slower)):
        return None
    return slower.ci_low_us > faster.ci_high_us


def _is_lead_settled(search: Search) -> bool | None:
    timings = [trial.evaluation.timing for trial in search.ranked[:2]]
    faster, slower = timings if len(timings) == 2 else (None, None)
    return is_settled(faster, slower) if faster and slower else None


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
            **group_origin(group),
            compute_capability=device.compute_capability_text,
            num_sms=device.num_sms,
            memory_bytes=device.memory_bytes,
            bandwidth_gbps=device.bandwidth_gbps,
            peak_tflops=", ".join(f"{dtype} {rate:g}" for dtype, rate in peaks),
            num_studies=len(group),
            num_trials=sum(len(s.trials) for s in group),
            first_date=min(iso_time(s.study.created_at) for s in group),
        )


def summary_rows(searches: Sequence[Search], results: Sequence[ResultRow]) -> Iterator[SummaryRow]:
    """One row an operation, SKU, provenance and policy; ``results`` are those of the searches."""
    result_of = {id(search): row for search, row in zip(searches, results, strict=True)}
    for group in groups(searches):
        rows = [result_of[id(search)] for search in group]
        gains = [r.gain_over_default for r in rows if r.gain_over_default is not None]
        shares = [r.share_of_roofline for r in rows if r.share_of_roofline is not None]
        speedups = [r.speedup_over_baseline for r in rows if r.speedup_over_baseline is not None]
        bases = dict.fromkeys(r.speedup_provenance for r in rows if r.speedup_provenance)
        yield SummaryRow(
            **group_origin(group),
            op=group[0].key.problem.op,
            num_problems=len(rows),
            num_decided=sum(s.winner is not None for s in group),
            num_compared=len(gains),
            geomean_gain_over_default=geometric_mean(gains) if gains else None,
            smallest_gain_over_default=min(gains, default=None),
            num_with_baseline=len(speedups),
            geomean_speedup_over_baseline=geometric_mean(speedups) if speedups else None,
            smallest_speedup_over_baseline=min(speedups, default=None),
            speedup_provenance="; ".join(bases) or None,
            median_share_of_roofline=median(shares) if shares else None,
            num_trials=sum(r.num_trials for r in rows),
        )


def geometric_mean(ratios: Sequence[float]) -> float:
    """Geometric mean of at least one ratio."""
    return exp(sum(map(log, ratios)) / len(ratios))


def groups(searches: Iterable[Search]) -> Iterator[list[Search]]:
    grouped: dict[tuple[object, ...], list[Search]] = {}
    for search in searches:
        key = search.key
        place = (key.problem.op, search.sku, key.provenance, key.policy)
        grouped.setdefault(place, []).append(search)
    yield from grouped.values()


def group_origin(group: Sequence[Search]) -> dict[str, str]:
    """The origin of several searches of one SKU: all their versions, the last date."""
    origins = [origin(search) for search in group]
    versions = dict.fromkeys(about["versions"] for about in origins)
    last = max(about["date"] for about in origins)
    return {**origins[0], "versions": "; ".join(versions), "date": last}


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def counts_text(counts: dict[TrialStatus, int]) -> str:
    return ", ".join(f"{status.value} {count}" for status, count in counts.items()) or "no trials"
