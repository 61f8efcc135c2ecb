"""Everything a report speaks of, read from the databases once: what every form of it draws from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...errors import UsageError
from .baselines import Baseline, load_baselines
from .contests import contest_baselines
from .frames import ReportFrames, build_frames
from .searches import Search, load_searches, ordered_skus, resolve_skus, shown, with_baselines
from .second_process import SecondProcess

if TYPE_CHECKING:
    from ..store import Store

__all__ = ["Collected", "collect"]


@dataclass(frozen=True)
class Collected:
    """Searches, baselines and the tables made of them."""

    searches: tuple[Search, ...]
    baselines: tuple[Baseline, ...]
    skus: tuple[str, ...]
    """In order, with or without data."""
    frames: ReportFrames
    damaged: tuple[str, ...]
    """Rows of the databases that could not be read."""

    @cached_property
    def current(self) -> tuple[Search, ...]:
        """The searches that the results speak of."""
        return shown(self.searches)


def collect(
    stores: Sequence[Store],
    gpus: Sequence[str] | None = None,
    *,
    second: SecondProcess | None = None,
) -> Collected:
    """What the stores hold about these SKUs.

    Args:
        stores: databases to read, the one that counts first where they disagree first.
        gpus: SKU names or aliases, the first being what the others are compared with; None for
            all SKUs in the databases.
        second: a process that takes a share of the work.

    Raises:
        UsageError: no store, or an empty or unknown ``gpus``.
    """
    if not stores:
        raise UsageError("a report needs at least one database: got none; pass a Store")
    requested = resolve_skus(stores, gpus)
    alone = load_searches(stores, requested)
    baselines = (*load_baselines(stores, requested), *contest_baselines(alone))
    searches = with_baselines(alone, baselines)
    damaged = [
        f"database {number}, {note}"
        for number, store in enumerate(stores, start=1)
        for note in store.damaged_rows
    ]
    return Collected(
        searches,
        baselines,
        ordered_skus(searches, requested, baselines),
        build_frames(searches, requested, baselines, second),
        tuple(damaged),
    )
