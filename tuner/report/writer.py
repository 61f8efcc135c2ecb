"""Writes a report: the page, the CSV file of every table and the PNG file of every plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from .csv_report import write_csv
from .frames import ReportFrames, build_frames
from .html_report import Picture, problem_anchor, render_page
from .plots import Plot, progress_plot, times_plots
from .searches import Search, load_searches, ordered_skus, resolve_skus, shown

if TYPE_CHECKING:
    from ..store import Store

__all__ = ["ReportPaths", "write_report"]

MAX_INLINE_BYTES = 3_000_000
"""Of SVG inside the page; base64 makes it a third more, and the page stays under 5 MB."""


@dataclass(frozen=True)
class ReportPaths:
    """The files of a report."""

    index: Path
    tables: tuple[Path, ...]
    plots: tuple[Path, ...]


@dataclass(frozen=True)
class _About:
    """What a report speaks of."""

    searches: tuple[Search, ...]
    skus: tuple[str, ...]
    damaged: tuple[str, ...]
    generated_at: datetime


def write_report(
    stores: Sequence[Store],
    out: Path,
    *,
    gpus: Sequence[str] | None = None,
    generated_at: datetime | None = None,
) -> ReportPaths:
    """Writes ``index.html``, ``<table>.csv`` and ``plots/<plot>.png`` into the folder ``out``.

    The page is complete in itself. Databases without trials for the SKUs make a page that says so.

    Args:
        stores: databases to read, the one that counts first where they disagree first.
        out: made where it does not exist; files of an earlier report are written over.
        gpus: SKU names or aliases, the first being what the others are compared with; None for
            all SKUs in the databases.
        generated_at: the date of the page; None for now.

    Raises:
        UsageError: no store, an empty or unknown ``gpus``, or a folder that cannot be written.
    """
    if not stores:
        raise UsageError("a report needs at least one database: got none; pass a Store")
    requested = resolve_skus(stores, gpus)
    searches = load_searches(stores, requested)
    frames = build_frames(searches, requested)
    skus = ordered_skus(searches, requested)
    damaged = [
        f"database {number}, {note}"
        for number, store in enumerate(stores, start=1)
        for note in store.damaged_rows
    ]
    about = _About(searches, skus, tuple(damaged), generated_at or datetime.now(UTC))
    try:
        return _write(frames, about, out)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot write the report to {str(out)!r}: {reason}; "
            "choose a folder that can be created and written"
        ) from error


def _write(frames: ReportFrames, about: _About, out: Path) -> ReportPaths:
    plots_folder = out / "plots"
    plots_folder.mkdir(parents=True, exist_ok=True)
    tables = write_csv(frames, out)
    current = shown(about.searches)
    gallery = _Gallery(plots_folder)
    across = [gallery.add(plot) for plot in times_plots(current, about.skus)]
    progress: dict[str, list[Picture]] = {}
    for anchor, plot in _progress_plots(frames, current, about.skus):
        progress.setdefault(anchor, []).append(gallery.add(plot))
    page = render_page(
        frames,
        current,
        about.skus,
        progress=progress,
        across=across,
        damaged=about.damaged,
        generated_at=about.generated_at,
    )
    index = out / "index.html"
    # Last and in one step: a page that exists has all the files it links to.
    unfinished = out / "index.html.part"
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(index)
    return ReportPaths(index, tables, tuple(gallery.paths))


def _progress_plots(
    frames: ReportFrames, current: Sequence[Search], skus: Sequence[str]
) -> Iterator[tuple[str, Plot]]:
    by_study = dict(iter(frames.progress.groupby("study_digest")))
    for search in sorted(current, key=lambda s: skus.index(s.sku)):
        if search.trials:
            yield problem_anchor(search), progress_plot(search, by_study[search.key.digest])


class _Gallery:
    """Writes plots to their files and keeps the page from growing without bound."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[Path] = []
        self.inline_bytes = 0

    def add(self, plot: Plot) -> Picture:
        """The plot as the page shows it: inside the page while there is room, else as a link."""
        path = self.folder / f"{plot.name}.png"
        path.write_bytes(plot.png())
        self.paths.append(path)
        svg: bytes | None = None
        if self.inline_bytes < MAX_INLINE_BYTES:
            svg = plot.svg()
            self.inline_bytes += len(svg)
        return Picture(plot.name, plot.caption, svg)
