"""What the gated delta net has to reach beside FLA, FlashQLA and FlashInfer, for ``gdn.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from side_by_side import DISPATCH, OURS

__all__ = [
    "FASTEST",
    "SAME_STATES",
    "States",
    "Target",
    "best_of",
    "decode_targets",
    "prefill_targets",
]

_FLASHINFER = ("flashinfer", "flashinfer_kv", "flashinfer_pool")

FASTEST = ("fla", "flash_qla", *_FLASHINFER)

States = Literal["KV", "VK", "KV pool", "VK pool"]
"""How the states of a row lie: [K, V] or [V, K], in batch order or in a pool by slot index."""

SAME_STATES: dict[States, tuple[str, ...]] = {
    "KV": ("fla", "flash_qla", "flashinfer_kv"),
    "VK": ("fla", "flash_qla", "flashinfer"),
    "KV pool": (),
    "VK pool": ("flashinfer_pool",),
}
"""Libraries that take and give a row's states as they are. Others are timed beside ours without the
transposes, the gathering and the scattering that their user needs."""

Times = Mapping[str, float]
"""Microseconds by contender; who failed is not in it."""


@dataclass(frozen=True)
class Target:
    """One thing to reach and what was measured of it."""

    name: str
    is_reached: bool | None
    """None: not measured."""
    detail: str

    def __str__(self) -> str:
        word = {True: "PASS", False: "FAIL", None: "NOT MEASURED"}[self.is_reached]
        return f"{word:>12}  {self.name}: {self.detail}"


def best_of(us: Times, names: Sequence[str]) -> float | None:
    """Time of the fastest of these contenders; None where it is not known.

    FlashInfer with other states says nothing of what its user gets: without the time of the form
    that is asked for the fastest is not known.
    """
    forms = set(_FLASHINFER)
    if forms & set(us) and forms & set(names) and not forms & set(us) & set(names):
        return None
    return min((us[name] for name in names if name in us), default=None)


def prefill_targets(rows: Mapping[str, Times], states: States = "KV") -> list[Target]:
    """The targets over the rows of the table, whose states lie so."""
    fla = _ratios(rows, OURS, ("fla",))
    both = _ratios(rows, OURS, ("fla", "flash_qla"))
    every = _ratios(rows, OURS, FASTEST)
    dispatch = _ratios(rows, DISPATCH, SAME_STATES[states])
    return [
        _target("ours against FLA, every row at least 1.2", fla, min, 1.2),
        _target("ours against the better of FLA and FlashQLA, mean at least 1.0", both, _mean, 1.0),
        _target(
            "ours against the better of FLA and FlashQLA, every row at least 0.8", both, min, 0.8
        ),
        _target("ours against the best of all, mean at least 0.75", every, _mean, 0.75),
        _target("dispatch against the best library, every row at least 0.98", dispatch, min, 0.98),
    ]


def decode_targets(batches: Mapping[int, Times], states: States = "VK pool") -> list[Target]:
    """The targets over the batches, whose states lie so."""
    named = {f"batch {batch}": us for batch, us in batches.items()}
    larger = {f"batch {batch}": us for batch, us in batches.items() if batch >= 4}
    same = [name for name in SAME_STATES[states] if name in _FLASHINFER]
    alike = _ratios(larger, OURS, same)
    fastest = _ratios(larger, OURS, _FLASHINFER)
    dispatch = _ratios(named, DISPATCH, SAME_STATES[states])
    return [
        _target(
            "ours against FlashInfer on these states, batches from 4 on at least 1.0",
            alike,
            min,
            1.0,
        ),
        _target(
            "ours against FlashInfer's fastest form, batches from 4 on at least 1.0",
            fastest,
            min,
            1.0,
        ),
        _at_most("ours at batch 1 at most 3.2 us", batches.get(1, {}).get(OURS), 3.2),
        _target(
            "dispatch against the best library, every batch at least 0.98", dispatch, min, 0.98
        ),
    ]


def _ratios(rows: Mapping[str, Times], mine: str, theirs: Sequence[str]) -> dict[str, float]:
    """Best time of theirs over mine, by row, where both were measured."""
    found = {}
    for name, us in rows.items():
        best = best_of(us, theirs)
        if best is not None and mine in us:
            found[name] = best / us[mine]
    return found


def _mean(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios)


def _target(
    name: str,
    ratios: Mapping[str, float],
    reduce: Callable[[Sequence[float]], float],
    least: float,
) -> Target:
    if not ratios:
        return Target(name, None, "no row has both")
    found = reduce(list(ratios.values()))
    lowest = min(ratios, key=lambda row: ratios[row])
    detail = f"{found:.3f} over {len(ratios)} rows, lowest {ratios[lowest]:.3f} at {lowest}"
    return Target(name, found >= least, detail)


def _at_most(name: str, us: float | None, bound_us: float) -> Target:
    if us is None:
        return Target(name, None, "it was not timed")
    return Target(name, us <= bound_us, f"{us:.2f} us")
