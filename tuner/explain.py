"""Why a look-up gave what it gave, as plain data for people and for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from ..kernels.base import Config, Problem
from .records import Toolchain
from .tiers import Policy, Tier, TierStep
from .winner_rows import DatabaseRead, SkippedRow

__all__ = ["Explanation", "LookupResult"]


@dataclass(frozen=True)
class LookupResult:
    """A config and how it came to be handed out."""

    op: str
    gpu: str
    """SKU that the config is for."""
    problem: Problem
    config: Config
    template: str
    tier: Tier
    provenance: str
    """``measured``, ``predicted`` or ``default``."""
    distance: float | None
    """Doublings between this problem and the winner's; None for a default."""
    trial_id: int | None
    """Trial behind the config, in ``database``; None for a default."""
    database: str | None = None
    """Path of the database that holds the trial; None for a default."""
    notes: tuple[str, ...] = ()
    """What to know before relying on it: other toolchain, other SKU, other problem."""
    time_us: float | None = None
    """Time of the winner on its own problem; None for a default."""
    decided_at: str | None = None
    """When the winner was decided, ISO date and time in UTC; None for a default."""
    versions: Toolchain = field(default_factory=Toolchain)
    """What the winner was found with; empty for a default."""

    @property
    def age_days(self) -> float | None:
        """Days since the winner was decided; None for a default or a date that is none."""
        try:
            decided = datetime.fromisoformat(self.decided_at or "")
        except ValueError:
            return None
        decided = decided if decided.tzinfo else decided.replace(tzinfo=UTC)
        return (datetime.now(UTC) - decided).total_seconds() / 86400

    def as_dict(self) -> dict[str, object]:
        """The fields that every output shows, as JSON values."""
        return {
            "op": self.op,
            "gpu": self.gpu,
            "problem": self.problem.as_dict(),
            "config": self.config.as_dict(),
            "template": self.template,
            "tier": self.tier.value,
            "provenance": self.provenance,
            "distance": self.distance,
            "trial_id": self.trial_id,
        }


@dataclass(frozen=True)
class Explanation:
    """The walk of one look-up: every tier tried, every database read, every row set aside."""

    problem: Problem
    gpu: str
    policy: Policy
    result: LookupResult | None
    """None where ``strict`` found nothing."""
    failure: str | None
    """What ``lookup`` would have raised."""
    steps: tuple[TierStep, ...]
    databases: tuple[DatabaseRead, ...]
    skipped: tuple[SkippedRow, ...]
    other_policy: int
    """Winners of this operation that were found under another measurement policy."""

    def tier_rows(self) -> list[dict[str, object]]:
        """One row a tier: what it gave, or why nothing."""
        tried = {step.tier: step for step in self.steps}
        served = self.result.tier if self.result else None
        return [
            _tier_row(tier, tried.get(tier), self.policy, is_served=tier is served) for tier in Tier
        ]

    def database_rows(self) -> list[dict[str, object]]:
        """One row a database, in reading order."""
        return [
            {
                "database": str(read.source.path),
                "role": read.source.role,
                "present": read.is_present,
                "winners": len(read.values) if read.is_present else None,
                "of_this_op": len(read.rows_by_op.get(self.problem.op, ()))
                if read.is_present
                else None,
            }
            for read in self.databases
        ]

    def skipped_rows(self) -> list[dict[str, object]]:
        """One row a winner that this version of the code cannot hand out."""
        return [
            {"database": str(s.database), "trial_id": s.trial_id, "reason": s.reason}
            for s in self.skipped
        ]

    def as_dict(self) -> dict[str, object]:
        """Everything, as JSON values."""
        return {
            "op": self.problem.op,
            "gpu": self.gpu,
            "problem": self.problem.as_dict(),
            "policy": self.policy,
            "result": self.result.as_dict() if self.result else None,
            "notes": list(self.result.notes) if self.result else [],
            "failure": self.failure,
            "tiers": self.tier_rows(),
            "databases": self.database_rows(),
            "skipped": self.skipped_rows(),
            "other_measurement_policy": self.other_policy,
        }


def _tier_row(
    tier: Tier, step: TierStep | None, policy: Policy, *, is_served: bool
) -> dict[str, object]:
    if step is None:
        never = policy == "strict" and tier is not Tier.EXACT
        detail = "not allowed under policy strict" if never else "an earlier tier served"
        return {"tier": tier.value, "outcome": "not tried", "detail": detail, "passed_over": []}
    return {
        "tier": tier.value,
        "outcome": "served" if is_served else "nothing",
        "detail": step.detail,
        "passed_over": [
            f"trial {refusal.winner.trial_id}: {refusal.reason}" for refusal in step.refused
        ],
    }
