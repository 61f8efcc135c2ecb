"""SKUs against each other: our best by problem, and other libraries by how much faster they get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from .comparison import best_us, side_by_side
from .drawing import Plot, draw_marks, light_grid, literal, markers, new_figure, plain_numbers
from .rows import geometric_mean
from .searches import Search
from .wording import common_fields, problem_text, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["library_plots", "times_plots"]


def times_plots(searches: Sequence[Search], skus: Sequence[str]) -> Iterator[Plot]:
    """For each operation with a common problem, the time of every SKU by problem."""
    common = side_by_side(searches)
    by_op: dict[str, list[dict[str, list[Search]]]] = {}
    for by_sku in common:
        by_op.setdefault(next(iter(by_sku.values()))[0].key.problem.op, []).append(by_sku)
    for op, problems in by_op.items():
        yield _times_plot(op, problems, [s for s in skus if any(s in p for p in problems)])


def _times_plot(op: str, problems: list[dict[str, list[Search]]], skus: Sequence[str]) -> Plot:
    figure = new_figure(8.0, 1.9 + 0.34 * len(problems), layout="constrained")
    axes = figure.add_subplot()
    firsts = [next(iter(by_sku.values()))[0].key for by_sku in problems]
    shared = common_fields(key.problem for key in firsts)
    policies = {key.policy for key in firsts}
    for sku, marker in zip(skus, markers(len(skus)), strict=True):
        _draw_sku(axes, problems, sku, marker)
    names = [
        problem_text(k.problem, shared) + (f" ({k.policy})" if len(policies) > 1 else "")
        for k in firsts
    ]
    axes.set_yticks(range(len(names)), map(literal, names), fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.set_xlabel("time (us a call; filled: measured, hollow: predicted or published)")
    axes.set_ylabel(literal(f"{op} problem"))
    light_grid(axes)
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
            label=literal(f"{sku} {provenance}"),
        )


def library_plots(libraries: pd.DataFrame) -> Iterator[Plot]:
    """For each operation, how many times as fast each library is on a SKU as on the base.

    ``libraries`` is the frame of that name; every problem is a point.
    """
    for (op, base_sku), found in libraries.groupby(["op", "base_sku"], sort=False):
        yield _library_plot(str(op), str(base_sku), found)


def _library_plot(op: str, base_sku: str, found: pd.DataFrame) -> Plot:
    groups = list(found.groupby(["sku", "library", "ratio_provenance"], sort=False))
    figure = new_figure(8.0, 1.7 + 0.36 * len(groups), layout="constrained")
    axes = figure.add_subplot()
    for place, (_, rows) in enumerate(groups):
        _draw_ratios(axes, rows, place)
    names = [f"{sku}: {library} ({provenance})" for (sku, library, provenance), _ in groups]
    axes.set_yticks(range(len(names)), map(literal, names), fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.axvline(1.0, color="0.4", linewidth=1.0)
    axes.set_xlabel(f"times as fast as on {base_sku} (ratio, no unit)")
    axes.set_ylabel("SKU: library (provenance)")
    light_grid(axes)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(
        once.values(),
        once.keys(),
        loc="outside upper center",
        ncols=2,
        fontsize=8,
        frameon=False,
    )
    caption = f"{op}: other libraries on each SKU against {base_sku}, every problem a point"
    return Plot(slug(["libraries", op, base_sku]), caption, figure)


def _draw_ratios(axes: Axes, rows: pd.DataFrame, place: int) -> None:
    ratios = rows["ratio"].to_list()
    style: dict[str, object] = {"marker": "o", "markerfacecolor": "none", "color": "0.6"}
    draw_marks(axes, ratios, [place] * len(ratios), "one problem", style)
    marks = (
        ("geometric mean", geometric_mean(ratios), "D"),
        ("bandwidth alone would give", rows["bandwidth_ratio"].iloc[0], "|"),
        ("peak rate alone would give", rows["peak_ratio"].iloc[0], "x"),
    )
    for label, value, marker in marks:
        axes.plot([value], [place], marker, color="black", markersize=9, label=label)
