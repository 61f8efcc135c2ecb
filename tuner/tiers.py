"""The order in which winners may serve a problem, and why each tier gave one or none.

Pure functions over checked winners: no I/O, no state. ``dispatch`` keeps what they return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from ..kernels.registry import template
from .records import Provenance, Toolchain
from .sku_tolerance import MEMORY_TOLERANCE
from .winner_rows import Winner

if TYPE_CHECKING:
    from ..search_spaces.space import JointSpace

__all__ = [
    "MAX_FACTOR",
    "POLICIES",
    "Policy",
    "Query",
    "Refusal",
    "Tier",
    "TierStep",
    "distance_between",
    "is_same_sku",
    "toolchain_differences",
    "walk_tiers",
]

Policy = Literal["nearest", "strict"]
POLICIES: tuple[Policy, ...] = ("nearest", "strict")

MAX_FACTOR = 4
"""A winner serves another problem only where each dynamic field is within this factor.

Over two doublings the number of blocks a GPU can fill changes regime (a split that helps one
request hurts sixteen), so a farther winner is worth no more than the default.
"""


class Tier(StrEnum):
    """How closely the winner fits; tried in this order."""

    EXACT = "exact"
    """This SKU, measured, this problem."""
    NEAREST = "nearest"
    """This SKU, measured, the nearest problem with the same static fields."""
    SIBLING = "sibling"
    """Another SKU of the same compute capability, measured, this or the nearest problem."""
    PREDICTED = "predicted"
    """Predicted without a GPU, for this SKU or else for a sibling."""
    DEFAULT = "default"
    """The first template's default config: nothing known."""


@dataclass(frozen=True)
class Query:
    """One look-up."""

    problem: Problem
    device: DeviceSpec
    space: JointSpace
    """The valid configs of this very problem: a neighbour's config must be among them."""
    policy: Policy
    measurement: str
    """Measurement policy that a winner must have been found under."""
    toolchain: Toolchain
    """Versions at hand."""
    allow_other_toolchain: bool
    num_farther: int = 0
    """Winners of this SKU with the same static fields that are out of range, left out before."""


@dataclass(frozen=True)
class Refusal:
    """A winner that a tier considered before the one it gave, and why it was passed over."""

    winner: Winner
    reason: str


@dataclass(frozen=True)
class TierStep:
    """What one tier gave."""

    tier: Tier
    winner: Winner | None
    distance: float | None
    """Doublings between the problems, None where there is no winner."""
    detail: str
    """What was found, or why nothing."""
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class _Candidate:
    winner: Winner
    distance: float
    is_sibling: bool


def is_same_sku(winner: Winner, device: DeviceSpec) -> bool:
    """Whether a winner's GPU performs like the device, whatever the two are called."""
    return (
        winner.compute_capability == device.compute_capability_text
        and winner.num_sms == device.num_sms
        and abs(winner.memory_bytes - device.memory_bytes) <= MEMORY_TOLERANCE * device.memory_bytes
    )


def distance_between(problem: Problem, other: Problem) -> float | None:
    """Doublings between two problems, summed over the dynamic fields; None if out of range."""
    if type(problem) is not type(other) or problem.static_key() != other.static_key():
        return None
    steps = _steps(problem, other)
    return sum(steps) if max(steps, default=0.0) <= math.log2(MAX_FACTOR) else None


def _steps(problem: Problem, other: Problem) -> tuple[float, ...]:
    pairs = ((getattr(problem, f), getattr(other, f)) for f in problem.dynamic_fields)
    return tuple(abs(math.log2(a / b)) for a, b in pairs)


def toolchain_differences(winner: Winner, current: Toolchain) -> tuple[str, ...]:
    """The versions that differ from the ones the winner was found with.

    A part that is not known on one side says nothing; nor does the compiler of another language,
    or the build tag of a version (``2.13.0+cpu``).
    """
    other_compilers = {"triton", "tilelang"} - {template_backend(winner)}
    found = []
    for part, recorded in winner.toolchain.as_dict().items():
        now = current.as_dict()[part]
        if part in other_compilers or not recorded or not now:
            continue
        if recorded.partition("+")[0] != now.partition("+")[0]:
            found.append(f"{part} {recorded} (now {now})")
    return tuple(found)


def template_backend(winner: Winner) -> str:
    """The language of the winner's template."""
    return template(winner.problem.op, winner.config.template).backend


def walk_tiers(winners: Iterable[Winner], query: Query) -> tuple[TierStep, ...]:
    """Each tier tried, in order; the last step is the one that served, unless it has no winner.

    The default tier has no winner and always serves. Under ``strict`` only ``exact`` is tried.
    """
    usable = tuple(w for w in winners if w.policy == query.measurement)
    steps: list[TierStep] = []
    tiers = (Tier.EXACT,) if query.policy == "strict" else tuple(Tier)
    for tier in tiers:
        steps.append(_try_tier(tier, usable, query))
        if steps[-1].winner is not None:
            break
    return tuple(steps)


def _try_tier(tier: Tier, winners: tuple[Winner, ...], query: Query) -> TierStep:
    if tier is Tier.DEFAULT:
        return TierStep(tier, None, None, f"default of template {query.space.default.template!r}")
    refused: list[Refusal] = []
    for candidate in _ordered(_candidates(tier, winners, query), query):
        reason = _why_refused(candidate.winner, query)
        if reason is None:
            detail = _describe(candidate, query)
            winner, distance = candidate.winner, candidate.distance
            return TierStep(tier, winner, distance, detail, tuple(refused))
        refused.append(Refusal(candidate.winner, reason))
    if refused:
        detail = f"{len(refused)} found, none usable: {refused[0].reason}"
    else:
        detail = _why_empty(tier, query)
    return TierStep(tier, None, None, detail, tuple(refused))


def _candidates(tier: Tier, winners: tuple[Winner, ...], query: Query) -> list[_Candidate]:
    accepts = _ACCEPTS[tier]
    found = []
    for winner in winners:
        if winner.compute_capability != query.device.compute_capability_text:
            continue
        distance = distance_between(query.problem, winner.problem)
        is_sibling = not is_same_sku(winner, query.device)
        is_measured = winner.provenance is Provenance.MEASURED
        if distance is not None and accepts(is_measured, is_sibling, distance):
            found.append(_Candidate(winner, distance, is_sibling))
    return found


# (is it measured, is it a sibling SKU's, distance) -> may it serve in this tier
_ACCEPTS: dict[Tier, Callable[[bool, bool, float], bool]] = {
    Tier.EXACT: lambda measured, sibling, distance: measured and not sibling and distance == 0,
    Tier.NEAREST: lambda measured, sibling, distance: measured and not sibling and distance > 0,
    Tier.SIBLING: lambda measured, sibling, distance: measured and sibling,
    Tier.PREDICTED: lambda measured, sibling, distance: not measured,
}


def _ordered(candidates: list[_Candidate], query: Query) -> list[_Candidate]:
    """Best first: own SKU, nearest problem, likest GPU, same name, later database, newest."""

    def badness(candidate: _Candidate) -> tuple[object, ...]:
        winner, device = candidate.winner, query.device
        return (
            candidate.is_sibling,
            candidate.distance,
            _steps(query.problem, winner.problem),
            abs(math.log2(max(winner.num_sms, 1) / device.num_sms)),
            winner.sku != device.sku,
            -winner.rank,
        )

    newest_first = sorted(
        candidates, key=lambda c: (c.winner.decided_at, c.winner.trial_id), reverse=True
    )
    return sorted(newest_first, key=badness)


def _why_refused(winner: Winner, query: Query) -> str | None:
    reason = query.space.check(winner.config)
    if reason is not None:
        return f"its config is not valid for this problem: {reason}"
    if query.policy == "strict" and not query.allow_other_toolchain:
        differences = toolchain_differences(winner, query.toolchain)
        if differences:
            return f"found with another toolchain: {', '.join(differences)}"
    return None


def _describe(candidate: _Candidate, query: Query) -> str:
    winner = candidate.winner
    text = f"trial {winner.trial_id}, {winner.time_us:.4g} us {winner.provenance} on {winner.sku}"
    if winner.problem == query.problem:
        return text
    changed = (f"{f}={getattr(winner.problem, f)}" for f in query.problem.dynamic_fields)
    return f"{text} for {' '.join(changed)} (distance {candidate.distance:.3g})"


def _why_empty(tier: Tier, query: Query) -> str:
    names = " and ".join(query.problem.dynamic_fields)
    capability = query.device.compute_capability_text
    empty = {
        Tier.EXACT: f"no measured winner of this problem on {query.device.sku}",
        Tier.NEAREST: f"no measured winner on {query.device.sku} with {names} within a factor "
        f"{MAX_FACTOR} and the other fields equal",
        Tier.SIBLING: f"no measured winner in that range on another SKU of compute capability "
        f"{capability}",
        Tier.PREDICTED: f"no predicted winner in that range for compute capability {capability}",
    }
    text = empty[tier]
    if tier is Tier.NEAREST:
        text += f" ({query.num_farther} farther away)" if query.num_farther else ""
    return text
