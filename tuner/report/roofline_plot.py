"""Every problem on the roofline of a SKU: arithmetic intensity against the rate reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...kernels.base import Problem
from ...kernels.device import DeviceSpec
from ..prediction.roofline import peak_flops_per_us
from .baselines import Baseline
from .comparison import best_us
from .drawing import Plot, draw_marks, light_grid, literal, markers, new_figure, plain_numbers
from .searches import Search
from .wording import slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["roofline_plots"]

_Point = tuple[float, float]


def roofline_plots(
    searches: Sequence[Search], baselines: Sequence[Baseline], skus: Sequence[str]
) -> Iterator[Plot]:
    """One plot a SKU that has a time, ours or another library's."""
    for sku in skus:
        ours = [s for s in searches if s.sku == sku and s.best is not None]
        others = [b for b in baselines if b.sku == sku]
        if ours or others:
            yield _roofline_plot(sku, ours, others)


def _roofline_plot(sku: str, ours: Sequence[Search], others: Sequence[Baseline]) -> Plot:
    device = ours[0].key.device if ours else others[0].key.device
    series = _series(ours, others)
    problems = [s.key.problem for s in ours] + [b.key.problem for b in others]
    figure = new_figure(6.4, 4.6, layout="constrained")
    axes = figure.add_subplot()
    shapes = markers(len({name for name, _, _ in series}))
    shape_of = dict(zip(dict.fromkeys(name for name, _, _ in series), shapes, strict=True))
    for (name, provenance, is_ours), points in series.items():
        x, y = zip(*points, strict=True)
        color = "black" if is_ours else "0.5"
        style: dict[str, object] = {
            "marker": shape_of[name],
            "color": color,
            "markerfacecolor": color if provenance == "measured" else "none",
            "markersize": 6 if is_ours else 4,
        }
        draw_marks(axes, x, y, literal(f"{name}: {provenance} ({len(points)})"), style)
    _draw_roofs(axes, device, problems)
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    axes.set_xlabel("arithmetic intensity (FLOP a byte of device memory)")
    axes.set_ylabel("rate reached (TFLOP/s)")
    axes.set_title(literal(f"{sku} ({device.name})"), fontsize=10, loc="left")
    light_grid(axes)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    caption = (
        f"roofline of {sku}: every problem a point; filled: measured, hollow: predicted or "
        "published, grey: the fastest of other libraries on the problem"
    )
    return Plot(slug(["roofline", sku]), caption, figure)


def _series(
    ours: Sequence[Search], others: Sequence[Baseline]
) -> dict[tuple[str, str, bool], list[_Point]]:
    """Points by name, provenance and whether they are ours."""
    series: dict[tuple[str, str, bool], list[_Point]] = {}
    for search in ours:
        problem, provenance = search.key.problem, search.key.provenance.value
        place = (problem.op, provenance, True)
        series.setdefault(place, []).append(_point(problem, best_us(search)))
    fastest: dict[tuple[Problem, str], float] = {}
    for baseline in others:
        one = (baseline.key.problem, baseline.key.provenance.value)
        fastest[one] = min(baseline.time_us, fastest.get(one, baseline.time_us))
    for (problem, provenance), time_us in fastest.items():
        place = (f"{problem.op}, other libraries", provenance, False)
        series.setdefault(place, []).append(_point(problem, time_us))
    return series


def _point(problem: Problem, time_us: float) -> _Point:
    return problem.flops / problem.bytes_moved, problem.flops / time_us / 1e6


def _draw_roofs(axes: Axes, device: DeviceSpec, problems: Sequence[Problem]) -> None:
    """The bandwidth as a slope and the peak rate of each operand dtype as a ceiling."""
    peaks = {p.compute_dtype: peak_flops_per_us(device, p.compute_dtype) / 1e6 for p in problems}
    bandwidth = device.bandwidth_gbps / 1e3  # TFLOP/s at an intensity of 1
    intensities = [p.flops / p.bytes_moved for p in problems]
    low, high = min(intensities) / 2, max(intensities) * 2
    top = max(peaks.values())
    ends = [low, min(high, top / bandwidth)]
    label = f"bandwidth: {device.bandwidth_gbps:,.0f} GB/s"
    axes.plot(ends, [x * bandwidth for x in ends], color="black", linewidth=1.5, label=label)
    for (dtype, peak), style in zip(sorted(peaks.items()), ("--", ":", "-."), strict=False):
        ridge = peak / bandwidth
        if ridge < high:
            label = literal(f"peak {dtype}: {peak:,.4g} TFLOP/s")
            axes.plot([max(low, ridge), high], [peak, peak], style, color="black", label=label)
