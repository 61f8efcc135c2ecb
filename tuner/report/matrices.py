"""Tables with a column for each SKU: times side by side, and what carrying a winner over costs.

Each figure has its provenance in a column beside it, ``<sku>_provenance``; the page writes that
word into the cell wherever it is not ``measured``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from .baselines import TRUST, Baseline
from .comparison import best_us
from .searches import Search
from .transfer import TransferPairRow

__all__ = ["OURS", "times_matrix", "transfer_matrix"]

OURS = "tilescout"
"""The name of our kernels among those of other libraries."""

_Place = tuple[str, str, str, str]
_Figure = tuple[float, str]


def times_matrix(
    searches: Iterable[Search], baselines: Iterable[Baseline], skus: Sequence[str]
) -> pd.DataFrame:
    """One row a problem, policy and library with times on two SKUs, ours first.

    Where a SKU has several times of one library, the most trusted counts, then the fastest.
    """
    found: dict[_Place, dict[str, tuple[int, float, str]]] = {}
    for search in searches:
        if search.best is not None:
            _add(found, search, OURS, best_us(search))
    for baseline in baselines:
        _add(found, baseline, baseline.name, baseline.time_us)
    several = {place: times for place, times in found.items() if len(times) > 1}
    figures = {
        place: {sku: (time_us, provenance) for sku, (_, time_us, provenance) in times.items()}
        for place, times in several.items()
    }
    names = ("op", "problem", "library", "policy")
    return _frame(names, figures, skus, "time_us")


def _add(
    found: dict[_Place, dict[str, tuple[int, float, str]]],
    timed: Search | Baseline,
    library: str,
    time_us: float,
) -> None:
    key = timed.key
    place = (key.problem.op, str(key.problem), library, str(key.policy))
    times = found.setdefault(place, {})
    figure = (TRUST.index(key.provenance), time_us, key.provenance.value)
    times[timed.sku] = min(figure, times.get(timed.sku, figure))


def transfer_matrix(found: Iterable[TransferPairRow], skus: Sequence[str]) -> pd.DataFrame:
    """One row an operation, policy and SKU whose winners are carried, with their mean cost.

    Where the winners themselves come from predicted times, the provenance says so.
    """
    figures: dict[_Place, dict[str, _Figure]] = {}
    for row in found:
        place = (row.op, row.policy, row.from_sku, row.from_provenance)
        costs = figures.setdefault(place, {})
        if row.geomean_cost is not None:
            about = f"{row.provenance}, {row.num_timed} of {row.num_common} problems"
            costs[row.sku] = (row.geomean_cost, about)
    names = ("op", "policy", "from_sku", "from_provenance")
    return _frame(names, figures, skus, "cost")


def _frame(
    names: Sequence[str],
    figures: dict[_Place, dict[str, _Figure]],
    skus: Sequence[str],
    suffix: str,
) -> pd.DataFrame:
    """The figures with two columns a SKU that has any, in the order of ``skus``."""
    frame = pd.DataFrame(list(figures), columns=list(names), dtype="object")
    for sku in skus:
        cells = [by_sku.get(sku) for by_sku in figures.values()]
        if any(cells):
            values = [cell[0] if cell else None for cell in cells]
            frame[f"{sku}_{suffix}"] = pd.Series(values, dtype="float64")
            words = [cell[1] if cell else None for cell in cells]
            frame[f"{sku}_provenance"] = pd.Series(words, dtype="object")
    return frame
