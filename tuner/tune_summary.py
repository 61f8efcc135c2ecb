"""What a tuning run found: one row a problem and SKU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..kernels.base import Config, Problem
from .records import Provenance

__all__ = ["TuneRow", "TuneSummary"]


@dataclass(frozen=True)
class TuneRow:
    """The outcome for one problem on one SKU; what a run did not find out is None."""

    label: str
    problem: Problem
    sku: str
    provenance: Provenance
    config: Config | None = None
    """The winner."""
    time_us: float | None = None
    default_time_us: float | None = None
    share_of_roofline: float | None = None
    """Of the winner: 1.0 is at the roofline."""
    trial_id: int | None = None
    num_trials: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Trials of the study by status, those of earlier runs included."""
    reason: str = ""
    """Why there is no winner."""
    space_size: int | None = None
    """Number of valid configs."""
    expected_s: float | None = None
    """What the study would take at most, in seconds; a dry run only."""

    @property
    def template(self) -> str | None:
        """Template of the winner."""
        return self.config.template if self.config else None

    @property
    def speedup(self) -> float | None:
        """Time of the default over that of the winner."""
        if self.time_us is None or self.default_time_us is None:
            return None
        return self.default_time_us / self.time_us


@dataclass(frozen=True)
class TuneSummary:
    """All rows of a run, in the order in which they were tuned."""

    rows: tuple[TuneRow, ...]
    is_dry_run: bool
    database: str
    """Where the trials are; empty for a dry run."""
    elapsed_s: float
    gpu_busy_share: float | None = None
    """Share of the time of the measured searches that the GPU was verifying and timing; None where
    nothing was measured."""
    num_disturbed: int = 0
    """Blocks of samples repeated because the GPU's clock or throttling changed meanwhile."""

    @property
    def has_failures(self) -> bool:
        """Whether a problem that was searched has no winner."""
        return not self.is_dry_run and any(row.config is None for row in self.rows)
