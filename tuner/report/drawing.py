"""What all plots share: the figure, its files, axes in plain numbers, markers without colour.

Matplotlib is imported on first use and only its Figure objects are used, so that neither a display
nor the state of pyplot is touched. Every series differs in shape or line style, not colour alone.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "Drawing",
    "Plot",
    "draw_marks",
    "light_grid",
    "literal",
    "markers",
    "new_figure",
    "plain_numbers",
]

MAX_VECTOR_MARKS = 150
"""Above this many marks a series is drawn as pixels inside the SVG, which bounds its size."""
_PNG_DPI = 110
_SVG_DPI = 72
"""Of what is drawn as pixels inside the SVG; more would soon fill the page."""


@dataclass(frozen=True)
class Drawing:
    """A plot as its files have it."""

    name: str
    caption: str
    png: bytes
    svg: bytes


@dataclass(frozen=True)
class Plot:
    """A figure, what it is called on disk and what it says in words."""

    name: str
    """Stem of its file; unique in a report."""
    caption: str
    figure: Figure

    def drawn(self) -> Drawing:
        """The plot in both forms."""
        return Drawing(self.name, self.caption, self.png(), self.svg())

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


def draw_marks(
    axes: Axes, x: Sequence[float], y: Sequence[float], label: str, style: dict[str, object]
) -> None:
    """Draws a series of marks, as pixels where there are many."""
    if not x:
        return
    settings: dict[str, Any] = {"markersize": 4.5, "linestyle": "none", **style}
    is_raster = len(x) > MAX_VECTOR_MARKS
    axes.plot(x, y, label=label, rasterized=is_raster, **settings)


def plain_numbers(axis: Axis) -> None:
    """Labels a logarithmic axis in plain numbers, however little it spans."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    decades = LogLocator(subs=(1.0, 2.0, 5.0)) if high / low < 1e3 else LogLocator()
    axis.set_major_locator(decades if high / low > 10 else MaxNLocator(6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    # Drawing a tick takes as long as drawing a mark, and minor ones would say nothing.
    axis.set_minor_locator(NullLocator())


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"


def light_grid(axes: Axes) -> None:
    """A grid behind everything that prints as hairlines."""
    axes.grid(visible=True, which="major", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def markers(count: int) -> list[str]:
    """Shapes that can be told apart, one for each series."""
    shapes = "osD^v<>pPX"
    return [shapes[index % len(shapes)] for index in range(count)]


def literal(text: str) -> str:
    """The text with nothing in it that matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def new_figure(
    width: float, height: float, *, layout: Literal["constrained"] | None = None
) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)
