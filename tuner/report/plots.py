"""The plots of a report: how each search went, and SKUs against each other.

Matplotlib is imported on first use and only its Figure objects are used, so that neither a display
nor the state of pyplot is touched. Every series differs in shape or line style, not colour alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from .comparison import best_us, side_by_side
from .rows import ResultRow, result_row
from .searches import Search
from .wording import common_fields, problem_text, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["Plot", "progress_plot", "times_plots"]

MAX_VECTOR_MARKS = 150
"""Above this many marks a series is drawn as pixels inside the SVG, which bounds its size."""
_PNG_DPI = 110
_SVG_DPI = 72
"""Of what is drawn as pixels inside the SVG; more would soon fill the page."""


@dataclass(frozen=True)
class Plot:
    """A figure, what it is called on disk and what it says in words."""

    name: str
    """Stem of its file; unique in a report."""
    caption: str
    figure: Figure

    def png(self) -> bytes:
        """The figure as PNG."""
        return self._saved(format="png", dpi=_PNG_DPI)

    def svg(self) -> bytes:
        """The figure as SVG, with text as text; the same bytes for the same figure."""
        return self._saved(format="svg", dpi=_SVG_DPI, metadata={"Date": None})

    def _saved(self, **settings: Any) -> bytes:
        import matplotlib as mpl

        buffer = io.BytesIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tilescout"}):
            self.figure.savefig(buffer, **settings)
        return buffer.getvalue()


def progress_plot(search: Search, progress: pd.DataFrame) -> Plot:
    """Best time so far over the trials of one search, with the default and the roofline as lines.

    ``progress`` has the rows of this search.
    """
    found = result_row(search)
    # Fixed margins: a computed layout would take longer than the drawing, for every plot.
    figure = _new_figure(5.6, 3.8)
    axes = figure.add_axes((0.125, 0.305, 0.845, 0.62))
    _draw_trials(axes, progress)
    _draw_lines(axes, found)
    if search.winner is not None:
        time_us = best_us(search)
        label = f"winner: {time_us:.4g} us"
        number = search.winner.trial.number
        axes.plot([number], [time_us], "*", color="black", markersize=13, label=label)
    _finish_progress(figure, axes, search)
    about = f"{found.problem} on {found.sku}"
    caption = (
        f"{found.provenance}, {found.device}, {found.versions}, {found.policy}, {found.date}; "
        f"{found.state}; trials: {found.trials_by_status}"
    )
    return Plot(_plot_name(search), f"{about}: {caption}", figure)


def _plot_name(search: Search) -> str:
    key = search.key
    values = slug([str(value) for value in key.problem.as_dict().values()])
    # Long or exotic problems stay apart by the digest of their study.
    parts = ["progress", key.problem.op, search.sku, key.provenance.value, values[:60]]
    return f"{slug(parts)}-{key.digest[:8]}"


def _draw_trials(axes: Axes, progress: pd.DataFrame) -> None:
    kinds: tuple[tuple[str, dict[str, object]], ...] = (
        ("ok", {"marker": "o", "markerfacecolor": "none", "color": "0.45"}),
        ("pruned", {"marker": "x", "color": "0.45"}),
    )
    timed = progress["time_us"].notna()
    for status, style in kinds:
        points = progress[(progress["status"] == status) & timed]
        label = f"{status} ({len(points)})"
        _draw_marks(axes, points["number"].to_list(), points["time_us"].to_list(), label, style)
    failed = progress[~progress["status"].isin(["ok", "pruned"])]
    bottom = [0.035] * len(failed)
    style = {
        "marker": "|",
        "markersize": 9,
        "color": "black",
        "transform": axes.get_xaxis_transform(),
    }
    _draw_marks(axes, failed["number"].to_list(), bottom, f"failed ({len(failed)})", style)
    best = progress[progress["best_us"].notna()]
    # Only where it falls, and the end: a line through every trial would be most of the file.
    best = best[(best["best_us"].diff() != 0) | (best["number"] == best["number"].max())]
    if len(best):
        x, y = best["number"].to_list(), best["best_us"].to_list()
        axes.step(x, y, where="post", color="black", linewidth=1.8, label="best so far")


def _draw_marks(
    axes: Axes, x: Sequence[int], y: Sequence[float], label: str, style: dict[str, object]
) -> None:
    if not x:
        return
    settings: dict[str, Any] = {"markersize": 4.5, "linestyle": "none", **style}
    is_raster = len(x) > MAX_VECTOR_MARKS
    axes.plot(x, y, label=label, rasterized=is_raster, **settings)


def _draw_lines(axes: Axes, found: ResultRow) -> None:
    lines = (
        ("default", found.default_time_us, "--"),
        (found.baseline, found.baseline_time_us, "-."),
        ("roofline", found.roofline_us, ":"),
    )
    for name, time_us, style in lines:
        if time_us is not None:
            label = _literal(f"{name}: {time_us:.4g} us")
            axes.axhline(time_us, color="0.15", linestyle=style, linewidth=1.3, label=label)


def _finish_progress(figure: Figure, axes: Axes, search: Search) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** 0.1, high)  # a strip for the marks of failed trials
    _plain_numbers(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trial (number, in the order they ended)")
    axes.set_ylabel(f"time (us a call, {search.key.provenance.value})")
    axes.set_title(
        _literal(f"{search.sku}: {search.key.provenance.value}"), fontsize=10, loc="left"
    )
    axes.grid(visible=True, which="both", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="lower center", ncols=3, fontsize=8, frameon=False)


def _plain_numbers(axis: Axis) -> None:
    """Labels a logarithmic axis in plain numbers, however little it spans."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    spans_decade = high / low > 10
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if spans_decade else MaxNLocator(6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    axis.set_minor_formatter(NullFormatter())


def times_plots(searches: Sequence[Search], skus: Sequence[str]) -> Iterator[Plot]:
    """For each operation with a common problem, the time of every SKU by problem."""
    common = side_by_side(searches)
    by_op: dict[str, list[dict[str, list[Search]]]] = {}
    for by_sku in common:
        by_op.setdefault(next(iter(by_sku.values()))[0].key.problem.op, []).append(by_sku)
    for op, problems in by_op.items():
        yield _times_plot(op, problems, [s for s in skus if any(s in p for p in problems)])


def _times_plot(op: str, problems: list[dict[str, list[Search]]], skus: Sequence[str]) -> Plot:
    figure = _new_figure(8.0, 1.9 + 0.34 * len(problems), layout="constrained")
    axes = figure.add_subplot()
    firsts = [next(iter(by_sku.values()))[0].key for by_sku in problems]
    shared = common_fields(key.problem for key in firsts)
    policies = {key.policy for key in firsts}
    for sku, marker in zip(skus, _markers(len(skus)), strict=True):
        _draw_sku(axes, problems, sku, marker)
    names = [
        problem_text(k.problem, shared) + (f" ({k.policy})" if len(policies) > 1 else "")
        for k in firsts
    ]
    axes.set_yticks(range(len(names)), map(_literal, names), fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_xlabel("time (us a call; filled: measured, hollow: predicted or published)")
    axes.set_ylabel(_literal(f"{op} problem"))
    axes.grid(visible=True, axis="both", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    rest = " ".join(f"{name}={value}" for name, value in shared.items())
    caption = f"{op}: time of each SKU's best config by problem" + (f"; all {rest}" if rest else "")
    return Plot(slug(["times", op]), caption, figure)


def _draw_sku(axes: Axes, problems: list[dict[str, list[Search]]], sku: str, marker: str) -> None:
    points: dict[str, list[tuple[float, int]]] = {}
    for index, by_sku in enumerate(problems):
        for search in by_sku.get(sku, []):
            place = points.setdefault(search.key.provenance.value, [])
            place.append((best_us(search), index))
    for provenance, found in points.items():
        x, y = zip(*found, strict=True)
        face = "black" if provenance == "measured" else "white"
        axes.plot(
            x,
            y,
            linestyle="none",
            marker=marker,
            markersize=7,
            color="black",
            markerfacecolor=face,
            label=_literal(f"{sku} {provenance}"),
        )


def _markers(count: int) -> list[str]:
    shapes = "osD^v<>pPX"
    return [shapes[index % len(shapes)] for index in range(count)]


def _literal(text: str) -> str:
    """The text with nothing in it that matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def _new_figure(
    width: float, height: float, *, layout: Literal["constrained"] | None = None
) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)
