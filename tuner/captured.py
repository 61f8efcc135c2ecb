"""A capture as a workload: what production calls, in the order in which tuning pays most.

The order is count times expected gain. The gain of a call is an estimate for ordering only: the
problem's roofline time, times what tuning gained over the first config in the studies at hand,
times how much of that the tier that serves now leaves.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..kernels.base import Problem
from ..kernels.registry import operation, operation_names
from .capture import CapturedProblem, read_capture
from .catalog import gpu
from .paths import user_database_path
from .prediction.roofline import roofline_us
from .records import Provenance, TrialStatus
from .tiers import MAX_FACTOR, Tier
from .workload_file import Workload, WorkloadProblem

if TYPE_CHECKING:
    from .store import Store

__all__ = ["captured_skus", "captured_workload", "gains_of", "known_gains"]

_OF_A_STRANGER = 0.5
"""Share of the gain that a sibling's or a predicted winner is taken to leave: half, as either may
be as good as the best or as the default."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Wanted:
    problem: Problem
    count: int
    saving_us: float
    """Expected, of all calls together."""


def captured_skus(path: str | Path) -> tuple[str, ...]:
    """The SKUs on which a capture was made, sorted."""
    return tuple(sorted({entry.sku for entry in read_capture(path)}))


def captured_workload(
    path: str | Path, gpus: Sequence[str] | None = None, gains: Mapping[str, float] | None = None
) -> Workload:
    """The problems of a capture that are not tuned yet, the one that pays most first.

    Args:
        path: File that ``tilescout.capture`` wrote.
        gpus: SKU names: problems that were looked up on one of these; None: on the GPU at hand,
            or on any where there is none.
        gains: What tuning an operation gains, see ``gains_of``; 1.0 for one that is not there.

    Raises:
        StoreError: the file cannot be read.
        UsageError: it holds no problem of these SKUs that is not tuned.
        UnknownNameError: no such SKU.
    """
    skus = _skus(path, gpus)
    entries = [entry for entry in read_capture(path) if entry.sku in skus]
    wanted: dict[Problem, _Wanted] = {}
    for entry in entries:
        found = _wanted(entry, gains or {})
        if found is None:
            continue
        known = wanted.get(found.problem)
        if known is not None:
            found = _Wanted(
                found.problem, found.count + known.count, found.saving_us + known.saving_us
            )
        wanted[found.problem] = found
    if not wanted:
        have = ", ".join(captured_skus(path)) or "none"
        raise UsageError(
            f"capture {str(path)!r} holds no problem of {', '.join(skus)} that is not tuned: it "
            f"has {len(entries)} of {', '.join(skus)}, and SKUs {have}"
        )
    ordered = sorted(wanted.values(), key=lambda w: (-w.saving_us, w.problem.key()))
    return Workload(
        name=Path(path).stem,
        description="Problems that were looked up, the one that pays most first.",
        problems=tuple(
            WorkloadProblem(f"{w.problem.op} {w.count} calls", w.problem, float(w.count))
            for w in ordered
        ),
        source=str(path),
    )


def known_gains(db: str | Path | None) -> dict[str, float]:
    """``gains_of`` of a database; nothing where there is none yet.

    Raises:
        StoreError: the database cannot be read.
    """
    from .store import Store

    location = user_database_path() if db is None else db
    if "://" not in str(location) and not Path(location).expanduser().exists():
        return {}
    with Store.open(location, read_only=True) as store:
        return gains_of(store)


def _skus(path: str | Path, gpus: Sequence[str] | None) -> tuple[str, ...]:
    if gpus is not None:
        return tuple(gpu(name).sku for name in gpus)
    from .environment import current_device

    device = current_device()
    return captured_skus(path) if device is None else (device.sku,)


def gains_of(store: Store) -> dict[str, float]:
    """By operation, how much slower the first config is than the best, as the median over studies.

    The first config of a study is the template's default.
    """
    found: dict[str, list[float]] = {}
    for study in store.studies():
        if study.key.provenance is not Provenance.MEASURED:
            continue
        times = [
            record.evaluation.time_us
            for record in store.trials(study.study_id)
            if record.evaluation.status is TrialStatus.OK and record.evaluation.time_us
        ]
        if len(times) > 1:
            found.setdefault(study.key.problem.op, []).append(times[0] / min(times) - 1.0)
    return {op: statistics.median(gains) for op, gains in found.items()}


def _wanted(entry: CapturedProblem, gains: Mapping[str, float]) -> _Wanted | None:
    """What tuning an entry would save; None for one that is tuned, or that nothing here knows."""
    if entry.tier == Tier.EXACT:
        return None
    if entry.op not in operation_names():
        _log.warning("captured problem of unknown operation %r is left out", entry.op)
        return None
    try:
        problem = operation(entry.op).problem_type.from_dict(json.loads(entry.problem))
    except UsageError as error:
        _log.warning("captured problem of %s is left out: %s", entry.op, error)
        return None
    gain_us = roofline_us(problem, gpu(entry.sku)) * gains.get(entry.op, 1.0)
    return _Wanted(problem, entry.count, entry.count * gain_us * _left(entry, problem))


def _left(entry: CapturedProblem, problem: Problem) -> float:
    """Share of the gain that tuning has still to give where this tier serves."""
    if entry.tier == Tier.DEFAULT:
        return 1.0
    if entry.tier != Tier.NEAREST:
        return _OF_A_STRANGER
    farthest = max(1, len(problem.dynamic_fields)) * (MAX_FACTOR.bit_length() - 1)
    return (entry.distance or 0.0) / farthest
