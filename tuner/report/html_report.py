"""The page: tables and plots put into ``template.html``, with nothing to load from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import pandas as pd

from ... import __version__
from .collected import Collected
from .columns import NOT_LISTED, columns_of
from .pictures import Picture, Pictures
from .problem_names import ProblemNames, problem_anchor
from .searches import Search
from .tables import Table, make_table
from .wording import iso_time, slug

__all__ = ["render_page"]

MAX_ROWS = 100
"""Of a table on the page; its CSV file has all."""


@dataclass(frozen=True)
class _SkuSection:
    sku: str
    anchor: str
    pictures: Sequence[Picture]
    table: Table | None


@dataclass(frozen=True)
class _ProblemSection:
    anchor: str
    heading: str
    pictures: tuple[Picture, ...]


def render_page(collected: Collected, pictures: Pictures, *, generated_at: datetime) -> str:
    """The text of ``index.html``.

    Args:
        collected: what is told.
        pictures: the plots.
        generated_at: the date of the page.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    frames = collected.frames
    names = ProblemNames(collected, pictures.by_problem)
    tables = {
        name: _table(names.shortened(frame), name) if len(frame) else None
        for name, frame in frames.named()
        if name not in NOT_LISTED
    }
    results = names.shortened(frames.results)
    return environment.get_template("template.html").render(
        version=__version__,
        generated=iso_time(generated_at),
        skus=collected.skus,
        num_trials=len(frames.progress),
        num_baselines=len(frames.baselines),
        tables=tables,
        shared=names.shared_sentences(),
        sku_sections=[_sku_section(results, sku, pictures) for sku in collected.skus],
        problem_sections=list(_problem_sections(collected.current, names, pictures.by_problem)),
        pictures=pictures,
        damaged=collected.damaged,
    )


def _table(frame: pd.DataFrame, name: str, suffix: str = "") -> Table:
    return make_table(
        frame.head(MAX_ROWS),
        columns_of(name, frame),
        table_id=f"table-{name}{suffix}",
        caption=f"{name}{suffix.replace('-', ' ')}",
        csv=f"{name}.csv",
        num_rows=len(frame),
    )


def _sku_section(results: pd.DataFrame, sku: str, pictures: Pictures) -> _SkuSection:
    found = results[results["sku"] == sku]
    anchor = slug(["sku", sku])
    table = _table(found, "results", f"-{slug([sku])}") if len(found) else None
    return _SkuSection(sku, anchor, pictures.by_sku.get(sku, ()), table)


def _problem_sections(
    current: Iterable[Search], names: ProblemNames, drawn: Mapping[str, Sequence[Picture]]
) -> Iterable[_ProblemSection]:
    headings = {
        problem_anchor(s): f"{s.key.problem.op} {names.short[s.key.problem.op, str(s.key.problem)]}"
        for s in current
    }
    for anchor, heading in headings.items():
        if anchor in drawn:
            yield _ProblemSection(anchor, heading, tuple(drawn[anchor]))
