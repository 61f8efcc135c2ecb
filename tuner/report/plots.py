"""SKUs against each other: how much faster each is, ours and other libraries, and our times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import pandas as pd

from .comparison import best_us, side_by_side
from .drawing import Plot, draw_marks, light_grid, literal, markers, new_figure, plain_numbers
from .matrices import OURS
from .rows import geometric_mean
from .searches import Search
from .wording import common_fields, problem_text, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ratios_plots", "times_plots"]

MAX_PROBLEMS = 60
"""Of a plot of times; tables have all."""
_SKU_SHIFT = 0.13
"""Between two SKUs in a row of a problem, in rows."""


def times_plots(searches: Sequence[Search], skus: Sequence[str]) -> Iterator[Plot]:
    """For each operation with a common problem, the time of every SKU by problem."""
    common = side_by_side(searches)
    by_op: dict[str, list[dict[str, list[Search]]]] = {}
    for by_sku in common:
        by_op.setdefault(next(iter(by_sku.values()))[0].key.problem.op, []).append(by_sku)
    for op, problems in by_op.items():
        present = [sku for sku in skus if any(sku in by_sku for by_sku in problems)]
        yield _times_plot(op, problems, present)


def _times_plot(op: str, found: list[dict[str, list[Search]]], skus: Sequence[str]) -> Plot:
    problems = found[:MAX_PROBLEMS]
    firsts = [next(iter(by_sku.values()))[0].key for by_sku in problems]
    shared = common_fields(key.problem for key in firsts)
    policies = {key.policy for key in firsts}
    names = [
        problem_text(k.problem, shared) + (f" ({k.policy})" if len(policies) > 1 else "")
        for k in firsts
    ]
    figure = new_figure(_label_inches(names) + 5.0, 1.5 + 0.25 * len(names), layout="constrained")
    axes = figure.add_subplot()
    for index, (sku, marker) in enumerate(zip(skus, markers(len(skus)), strict=True)):
        # Below each other: times of similar SKUs would hide one another.
        shift = _SKU_SHIFT * (index - (len(skus) - 1) / 2)
        _draw_sku(axes, problems, sku, marker, shift)
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
    if len(problems) < len(found):
        caption += f"; the first {len(problems)} of {len(found)} problems"
    return Plot(slug(["times", op]), caption, figure)


def _draw_sku(
    axes: Axes, problems: list[dict[str, list[Search]]], sku: str, marker: str, shift: float
) -> None:
    points: dict[str, list[tuple[float, float]]] = {}
    for index, by_sku in enumerate(problems):
        for search in by_sku.get(sku, []):
            place = points.setdefault(search.key.provenance.value, [])
            place.append((best_us(search), index + shift))
    for provenance, found in points.items():
        x, y = zip(*found, strict=True)
        face = "black" if provenance == "measured" else "white"
        axes.plot(
            x,
            y,
            linestyle="none",
            marker=marker,
            markersize=6,
            color="black",
            markerfacecolor=face,
            label=literal(f"{sku} {provenance}"),
        )


def ratios_plots(
    comparison: pd.DataFrame, libraries: pd.DataFrame, skus: Sequence[str]
) -> Iterator[Plot]:
    """For each base, how many times as fast every SKU is, by operation and whose kernel it is.

    ``comparison`` and ``libraries`` are the frames of those names; every problem is a point.
    """
    ours = comparison.assign(
        library=OURS, ratio=comparison["speedup"], ratio_provenance=comparison["speedup_provenance"]
    )
    columns = [
        "base_sku", "sku", "op", "library", "ratio", "ratio_provenance",
        "bandwidth_ratio", "peak_ratio",
    ]  # fmt: skip
    found = pd.concat([ours[columns], libraries[columns]])
    for base_sku in skus:
        against = found[found["base_sku"] == base_sku]
        if len(against):
            yield _ratios_plot(base_sku, against, skus)


def _ratios_plot(base_sku: str, found: pd.DataFrame, skus: Sequence[str]) -> Plot:
    by = ["sku", "op", "library", "ratio_provenance"]
    groups = sorted(found.groupby(by, sort=False), key=lambda group: skus.index(group[0][0]))
    names = [
        f"{sku}: {op}, {library} ({provenance}, {len(rows)})"
        for (sku, op, library, provenance), rows in groups
    ]
    room = _label_inches(names)
    figure = new_figure(room + 5.5, 1.5 + 0.3 * len(groups), layout="constrained")
    axes = figure.add_subplot()
    for place, ((*_, provenance), rows) in enumerate(groups):
        _draw_ratios(axes, rows, place, is_filled=provenance == "measured")
    _separate_skus(axes, [str(sku) for (sku, *_), _ in groups])
    axes.set_yticks(range(len(names)), map(literal, names), fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.axvline(1.0, color="0.4", linewidth=1.0)
    axes.set_xlabel(f"times as fast as on {base_sku} (ratio, no unit)")
    axes.set_ylabel("SKU: operation, kernel (provenance, problems)", fontsize=9)
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
    caption = (
        f"every SKU against {base_sku}: how many times as fast the same problem runs, a point a "
        "problem; a predicted time rests on the bandwidth and peak rate of its SKU, so a mixed "
        "ratio is no evidence about them"
    )
    return Plot(slug(["ratios", base_sku]), caption, figure)


def _separate_skus(axes: Axes, skus: Sequence[str]) -> None:
    for place, (above, below) in enumerate(pairwise(skus)):
        if above != below:
            axes.axhline(place + 0.5, color="0.75", linewidth=0.8)


def _draw_ratios(axes: Axes, rows: pd.DataFrame, place: int, *, is_filled: bool) -> None:
    ratios = rows["ratio"].to_list()
    style: dict[str, object] = {"marker": "o", "markerfacecolor": "none", "color": "0.65"}
    draw_marks(axes, ratios, [place] * len(ratios), "one problem", style)
    face = "black" if is_filled else "white"
    kind = "measured on both" if is_filled else "published, predicted or mixed"
    marks = (
        (f"geometric mean, {kind}", geometric_mean(ratios), "D", face),
        ("bandwidth alone would give", rows["bandwidth_ratio"].iloc[0], "|", face),
        ("peak rate alone would give", rows["peak_ratio"].iloc[0], "x", face),
    )
    for label, value, marker, inside in marks:
        axes.plot(
            [value],
            [place],
            marker,
            color="black",
            markerfacecolor=inside,
            markersize=8,
            markeredgewidth=1.5,
            label=label,
        )


def _label_inches(names: Sequence[str]) -> float:
    """Room for the longest of these labels: the layout gives up where they leave none for axes."""
    return 0.07 * max(map(len, names))
