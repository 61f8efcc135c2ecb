"""How the searches went: best so far over trials and over the seconds that the GPU was held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..records import Provenance
from .comparison import best_us
from .drawing import (
    MAX_VECTOR_MARKS,
    Drawing,
    Plot,
    draw_marks,
    light_grid,
    literal,
    new_figure,
    plain_numbers,
)
from .rows import ResultRow, result_row
from .searches import Search
from .wording import slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["drawn_progress", "overview_plots", "progress_plot"]

MAX_WAYS = 200
"""Searches in a plot of many; more would hide each other."""
_BY_TRIAL = "trial (number, in the order they ended)"
_BY_SECONDS = "time the GPU was held (s)"


def progress_plot(search: Search, progress: pd.DataFrame) -> Plot:
    """One search, with the default, the baseline and the roofline as lines.

    ``progress`` has the rows of this search. A measured search has a second panel over GPU time.
    """
    found = result_row(search)
    has_seconds = bool(len(progress)) and progress["gpu_s"].iloc[-1] > 0
    # Fixed margins: a computed layout would take longer than the drawing, for every plot.
    figure = new_figure(5.6, 3.8)
    axes = figure.add_axes((0.15, 0.305, 0.48 if has_seconds else 0.82, 0.62))
    _draw_trials(axes, progress)
    _draw_lines(axes, found)
    if search.winner is not None:
        time_us = best_us(search)
        label = f"winner: {time_us:.4g} us"
        number = search.winner.trial.number
        axes.plot([number], [time_us], "*", color="black", markersize=13, label=label)
    _finish_progress(figure, axes, search)
    if has_seconds:
        _draw_seconds(figure, axes, progress)
    about = f"{found.problem} on {found.sku}"
    caption = (
        f"{found.provenance}, {found.device}, {found.versions}, {found.policy}, {found.date}; "
        f"{found.state}; trials: {found.trials_by_status}"
    )
    return Plot(_plot_name(search), f"{about}: {caption}", figure)


def drawn_progress(search: Search, progress: pd.DataFrame) -> Drawing:
    """The files of ``progress_plot``."""
    return progress_plot(search, progress).drawn()


def _plot_name(search: Search) -> str:
    key = search.key
    values = slug([str(value) for value in key.problem.as_dict().values()])
    # Long or exotic problems stay apart by the digest of their study.
    parts = ["progress", key.problem.op, search.sku, key.provenance.value, values[:60]]
    return f"{slug(parts)}-{search.digest[:8]}"


def _draw_trials(axes: Axes, progress: pd.DataFrame) -> None:
    kinds: tuple[tuple[str, dict[str, object]], ...] = (
        ("ok", {"marker": "o", "markerfacecolor": "none", "color": "0.45"}),
        ("pruned", {"marker": "x", "color": "0.45"}),
    )
    timed = progress["time_us"].notna()
    for status, style in kinds:
        points = progress[(progress["status"] == status) & timed]
        label = f"{status} ({len(points)})"
        draw_marks(axes, points["number"].to_list(), points["time_us"].to_list(), label, style)
    failed = progress[~progress["status"].isin(["ok", "pruned"])]
    bottom = [0.035] * len(failed)
    style = {
        "marker": "|",
        "markersize": 9,
        "color": "black",
        "transform": axes.get_xaxis_transform(),
    }
    draw_marks(axes, failed["number"].to_list(), bottom, f"failed ({len(failed)})", style)
    x, y = _steps(progress, "number")
    if x:
        axes.step(x, y, where="post", color="black", linewidth=1.8, label="best so far")


def _steps(progress: pd.DataFrame, over: str) -> tuple[list[float], list[float]]:
    """Where the best time falls, and the end: a point for every trial would fill the file."""
    best = progress["best_us"].to_numpy()
    first = int(np.isnan(best).sum())  # no time yet: only at the beginning
    falls = np.flatnonzero(np.diff(best[first:], prepend=np.inf) != 0) + first
    if not len(falls):
        return [], []
    places = falls if falls[-1] == len(best) - 1 else np.append(falls, len(best) - 1)
    return progress[over].to_numpy()[places].tolist(), best[places].tolist()


def _draw_lines(axes: Axes, found: ResultRow) -> None:
    lines = (
        ("default", found.default_time_us, "--"),
        (f"{found.baseline} ({found.baseline_provenance})", found.baseline_time_us, "-."),
        ("roofline", found.roofline_us, ":"),
    )
    for name, time_us, style in lines:
        if time_us is not None:
            label = literal(f"{name}: {time_us:.4g} us")
            axes.axhline(time_us, color="0.15", linestyle=style, linewidth=1.3, label=label)


def _finish_progress(figure: Figure, axes: Axes, search: Search) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** 0.1, high)  # a strip for the marks of failed trials
    plain_numbers(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set_xlabel(_BY_TRIAL, fontsize=9)
    axes.set_ylabel(f"time (us a call, {search.key.provenance.value})")
    axes.set_title(literal(f"{search.sku}: {search.key.provenance.value}"), fontsize=10, loc="left")
    light_grid(axes)
    figure.legend(loc="lower center", ncols=3, fontsize=8, frameon=False)


def _draw_seconds(figure: Figure, beside: Axes, progress: pd.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_axes((0.67, 0.305, 0.3, 0.62), sharey=beside)
    x, y = _steps(progress, "gpu_s")
    axes.step(x, y, where="post", color="black", linewidth=1.8)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.tick_params(labelleft=False)
    axes.set_xlabel(_BY_SECONDS, fontsize=9)
    light_grid(axes)


def overview_plots(
    searches: Sequence[Search], progress: Mapping[str, pd.DataFrame]
) -> Iterator[Plot]:
    """For each operation, SKU and provenance, every search's way to its best in one plot."""
    grouped: dict[tuple[str, str, Provenance], list[Search]] = {}
    for search in searches:
        if search.best is not None:
            place = (search.key.problem.op, search.sku, search.key.provenance)
            grouped.setdefault(place, []).append(search)
    for (op, sku, provenance), group in grouped.items():
        every = -(-len(group) // MAX_WAYS)
        drawn = [(search, progress[search.digest]) for search in group[::every]]
        yield _overview_plot(op, sku, provenance, drawn, len(group))


def _overview_plot(
    op: str,
    sku: str,
    provenance: Provenance,
    group: Sequence[tuple[Search, pd.DataFrame]],
    num_searches: int,
) -> Plot:
    from matplotlib.ticker import FuncFormatter, NullLocator

    has_seconds = provenance is Provenance.MEASURED
    panels = (("number", _BY_TRIAL), ("gpu_s", _BY_SECONDS))[: 2 if has_seconds else 1]
    figure = new_figure(8.0 if has_seconds else 4.6, 3.3)
    left, width = (0.09, 0.43) if has_seconds else (0.15, 0.8)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    first: Axes | None = None
    for over, label in panels:
        axes = figure.add_axes((left, 0.16, width, 0.74), sharey=first)
        left += width + 0.03
        end = _draw_ways(axes, group, over)
        axes.set_xscale("symlog", linthresh=max(1.0, end / 100))
        axes.xaxis.set_major_formatter(plain)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(left=0)
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        axes.set_xlabel(label, fontsize=9)
        light_grid(axes)
        if first is not None:
            axes.tick_params(labelleft=False)
        else:
            first = axes
            axes.set_ylabel(f"best so far / best ({provenance.value})", fontsize=9)
            axes.legend(fontsize=8, frameon=False)
            axes.set_title(literal(f"{op} on {sku}: {provenance.value}"), fontsize=10, loc="left")
    caption = (
        f"{op} on {sku}, {provenance.value}: the way of each of {len(group)} searches to its best"
        + (f", of {num_searches} in all" if num_searches > len(group) else "")
    )
    return Plot(slug(["searches", op, sku, provenance.value]), caption, figure)


def _draw_ways(axes: Axes, group: Sequence[tuple[Search, pd.DataFrame]], over: str) -> float:
    """Draws all searches as one artist, which is fast; returns where the longest ended."""
    from matplotlib.collections import LineCollection

    ways, last, end = [], [], 1.0
    for _, progress in group:
        x, y = _steps(progress, over)
        relative = [value / y[-1] for value in y]
        # Stairs: a time stands until the next one.
        corners = zip(x[1:], relative[:-1], strict=True)
        falls = zip(x[1:], relative[1:], strict=True)
        stairs = (point for pair in zip(corners, falls, strict=True) for point in pair)
        ways.append([(x[0], relative[0]), *stairs])
        last.append(x[relative.index(1.0)])
        end = max(end, x[-1])
    is_raster = len(ways) > MAX_VECTOR_MARKS // 4
    axes.add_collection(LineCollection(ways, colors="0.55", linewidths=0.9, rasterized=is_raster))
    label = f"one search (of {len(group)})"
    axes.plot([], [], color="0.55", linewidth=0.9, label=label)
    style: dict[str, object] = {"marker": "o", "color": "black", "markersize": 4}
    draw_marks(axes, last, [1.0] * len(last), "its last improvement", style)
    axes.autoscale()
    return end
