"""Writes a report: the page, the CSV file of every table and the PNG file of every plot."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ...errors import UsageError
from .collected import Collected, collect
from .csv_report import write_csv
from .drawing import Drawing
from .html_report import render_page
from .pictures import Gallery, Picture, Pictures
from .plots import ratios_plots, times_plots
from .problem_names import problem_anchor
from .progress_plots import drawn_progress, overview_plots
from .roofline_plot import roofline_plots
from .searches import Search
from .second_process import Pending, SecondProcess

if TYPE_CHECKING:
    from ..store import Store

__all__ = ["NUM_PLOTS", "ReportPaths", "write_report"]

NUM_PLOTS = 12
"""Searches that have a plot of their own; a plot takes a fifth of a second."""


@dataclass(frozen=True)
class ReportPaths:
    """The files of a report."""

    index: Path
    tables: tuple[Path, ...]
    plots: tuple[Path, ...]


def write_report(
    stores: Sequence[Store],
    out: Path,
    *,
    gpus: Sequence[str] | None = None,
    generated_at: datetime | None = None,
    num_plots: int = NUM_PLOTS,
) -> ReportPaths:
    """Writes ``index.html``, ``<table>.csv`` and ``plots/<plot>.png`` into the folder ``out``.

    The page is complete in itself. Databases without trials for the SKUs make a page that says so.

    Args:
        stores: databases to read, the one that counts first where they disagree first.
        out: made where it does not exist; files of an earlier report are written over.
        gpus: SKU names or aliases, the first being what the others are compared with; None for
            all SKUs in the databases.
        generated_at: the date of the page; None for now.
        num_plots: how many searches have a plot of their own, measured ones first.

    Raises:
        UsageError: no store, an empty or unknown ``gpus``, or a folder that cannot be written.
    """
    try:
        num_trials = sum(store.num_trials() for store in stores)
        with _uncollected(), SecondProcess(num_trials) as second:
            collected = collect(stores, gpus, second=second)
            date = generated_at or datetime.now(UTC)
            return _write(collected, out, date, num_plots, second)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot write the report to {str(out)!r}: {reason}; "
            "choose a folder that can be created and written"
        ) from error


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: walking all records over and over takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _write(
    collected: Collected,
    out: Path,
    generated_at: datetime,
    num_plots: int,
    second: SecondProcess,
) -> ReportPaths:
    plots_folder = out / "plots"
    plots_folder.mkdir(parents=True, exist_ok=True)
    progress = _progress_by_search(collected)
    chosen = list(_chosen(collected.current, collected.skus, num_plots))
    drawings = [
        (search, second.submit(drawn_progress, search, progress[search.digest]))
        for search in chosen
    ]
    tables = write_csv(collected.frames, out)
    gallery = Gallery(plots_folder)
    pictures = _place(collected, gallery, progress, drawings)
    page = render_page(collected, pictures, generated_at=generated_at)
    index = out / "index.html"
    # Last and in one step: a page that exists has all the files it links to.
    unfinished = out / "index.html.part"
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(index)
    return ReportPaths(index, tables, tuple(gallery.paths))


def _progress_by_search(collected: Collected) -> dict[str, pd.DataFrame]:
    grouped = collected.frames.progress.groupby("study_digest")
    return {str(digest): rows for digest, rows in grouped}


def _place(
    collected: Collected,
    gallery: Gallery,
    progress: Mapping[str, pd.DataFrame],
    drawings: Sequence[tuple[Search, Pending[Drawing]]],
) -> Pictures:
    """All plots; those that speak of many searches come first into the page."""
    current, skus, frames = collected.current, collected.skus, collected.frames
    compared = ratios_plots(frames.comparison, frames.libraries, skus)
    ratios = [gallery.add(plot.drawn()) for plot in compared]
    times = [gallery.add(plot.drawn()) for plot in times_plots(current, skus)]
    by_sku: dict[str, list[Picture]] = {}
    for sku in skus:
        searches = [s for s in current if s.sku == sku]
        for plot in (
            *roofline_plots(searches, collected.baselines, [sku]),
            *overview_plots(searches, progress),
        ):
            by_sku.setdefault(sku, []).append(gallery.add(plot.drawn()))
    by_problem: dict[str, list[Picture]] = {}
    for search, drawing in drawings:
        picture = gallery.add(drawing.result())
        by_problem.setdefault(problem_anchor(search), []).append(picture)
    num_left_out = sum(bool(search.trials) for search in current) - len(drawings)
    return Pictures(by_sku, by_problem, num_left_out, ratios, times)


def _chosen(searches: Sequence[Search], skus: Sequence[str], num_plots: int) -> Iterator[Search]:
    """The searches with a plot of their own: measured before predicted, every kind in turn."""
    turns: dict[tuple[object, ...], Iterator[int]] = {}
    ranked = []
    for search in searches:
        if search.trials:
            key = search.key
            turn = next(turns.setdefault((key.problem.op, search.sku, key.provenance), count()))
            ranked.append((search.is_predicted, turn, search))
    ranked.sort(key=lambda entry: entry[:2])
    chosen = [search for _, _, search in ranked[:num_plots]]
    yield from sorted(chosen, key=lambda search: skus.index(search.sku))
