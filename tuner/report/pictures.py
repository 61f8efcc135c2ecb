"""Plots as files and as parts of the page, which must not grow without bound."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .drawing import Drawing

__all__ = ["Gallery", "Picture", "Pictures"]

MAX_INLINE_BYTES = 1_800_000
"""Of SVG inside the page; base64 makes it a third more, and the page stays under 5 MB."""


@dataclass(frozen=True)
class Picture:
    """A plot as the page shows it."""

    name: str
    """Stem of its PNG file in ``plots``."""
    caption: str
    svg: bytes | None
    """None where the page only links to the PNG file."""

    @property
    def data_uri(self) -> str | None:
        """The SVG as the source of an image: its ids and styles cannot meet those of others."""
        if self.svg is None:
            return None
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


@dataclass(frozen=True)
class Pictures:
    """All plots of the page, by where they stand."""

    by_sku: Mapping[str, Sequence[Picture]]
    by_problem: Mapping[str, Sequence[Picture]]
    """By the HTML id of the problem."""
    num_searches_left_out: int
    """Searches that have no plot of their own."""
    ratios: Sequence[Picture]
    """How many times as fast each SKU is as the base: the main figure."""
    times: Sequence[Picture]
    """Times of all SKUs by problem."""


class Gallery:
    """Writes plots to their files and counts what the page holds of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[Path] = []
        self.inline_bytes = 0

    def add(self, drawing: Drawing) -> Picture:
        """The plot as the page shows it: inside the page while there is room, else as a link."""
        path = self.folder / f"{drawing.name}.png"
        path.write_bytes(drawing.png)
        self.paths.append(path)
        # One that is too large must not keep smaller ones from the page.
        is_inside = self.inline_bytes + len(drawing.svg) <= MAX_INLINE_BYTES
        if is_inside:
            self.inline_bytes += len(drawing.svg)
        return Picture(drawing.name, drawing.caption, drawing.svg if is_inside else None)
