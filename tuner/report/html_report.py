"""The page: tables and plots put into ``template.html``, with nothing to load from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import pandas as pd

from ... import __version__
from .columns import COLUMNS
from .frames import ReportFrames
from .searches import Search
from .tables import Table, make_table
from .wording import common_fields, iso_time, problem_text, slug

__all__ = ["Picture", "problem_anchor", "render_page"]


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
class _SkuSection:
    sku: str
    anchor: str
    table: Table | None


@dataclass(frozen=True)
class _ProblemSection:
    anchor: str
    heading: str
    pictures: tuple[Picture, ...]


def problem_anchor(search: Search) -> str:
    """The HTML id of the plots of the search's problem."""
    problem = search.key.problem
    return slug(["problem", problem.op, *map(str, problem.as_dict().values())])


def render_page(
    frames: ReportFrames,
    current: Sequence[Search],
    skus: Sequence[str],
    *,
    progress: Mapping[str, Sequence[Picture]],
    across: Sequence[Picture],
    damaged: Sequence[str],
    generated_at: datetime,
) -> str:
    """The text of ``index.html``.

    Args:
        frames: all tables.
        current: the searches that the results speak of.
        skus: the SKUs of the report, in order, with or without data.
        progress: the plots of the searches by ``problem_anchor``.
        across: the plots that compare SKUs.
        damaged: rows of the databases that could not be read.
        generated_at: the date of the page.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = _ProblemNames(current)
    tables = {
        name: _table(names.shortened(frame), name) if len(frame) else None
        for name, frame in frames.named()
        if name in COLUMNS
    }
    return environment.get_template("template.html").render(
        version=__version__,
        generated=iso_time(generated_at),
        skus=skus,
        num_trials=len(frames.progress),
        tables=tables,
        shared=names.shared_sentences(),
        sku_sections=[_sku_section(names.shortened(frames.results), sku) for sku in skus],
        problem_sections=list(_problem_sections(current, names, progress)),
        across=across,
        damaged=damaged,
    )


class _ProblemNames:
    """Short names of problems: what all problems of an operation share is said once."""

    def __init__(self, current: Sequence[Search]) -> None:
        self.by_op: dict[str, dict[str, str]] = {}
        problems = [search.key.problem for search in current]
        for op in dict.fromkeys(problem.op for problem in problems):
            self.by_op[op] = common_fields(p for p in problems if p.op == op)
        self.short: dict[tuple[str, str], str] = {}
        self.anchors: dict[tuple[str, str], str] = {}
        for search in current:
            problem = search.key.problem
            place = (problem.op, str(problem))
            self.short[place] = problem_text(problem, self.by_op[problem.op])
            self.anchors[place] = f"#{problem_anchor(search)}"

    def shortened(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame with short problem names and the links to their plots."""
        if "problem" not in frame.columns:
            return frame
        places = list(zip(frame["op"], frame["problem"], strict=True))
        return frame.assign(
            problem=[self.short.get(place, place[1]) for place in places],
            problem_href=[self.anchors.get(place, "") for place in places],
        )

    def shared_sentences(self) -> list[str]:
        """What is left out of the short names, an operation a sentence."""
        return [
            f"Every {op} problem here has " + " ".join(f"{n}={v}" for n, v in fields.items())
            for op, fields in self.by_op.items()
            if fields
        ]


def _table(frame: pd.DataFrame, name: str, suffix: str = "") -> Table:
    return make_table(
        frame,
        COLUMNS[name],
        table_id=f"table-{name}{suffix}",
        caption=f"{name}{suffix.replace('-', ' ')}",
        csv=f"{name}.csv",
    )


def _sku_section(results: pd.DataFrame, sku: str) -> _SkuSection:
    found = results[results["sku"] == sku]
    anchor = slug(["sku", sku])
    table = _table(found, "results", f"-{slug([sku])}") if len(found) else None
    return _SkuSection(sku, anchor, table)


def _problem_sections(
    current: Iterable[Search], names: _ProblemNames, progress: Mapping[str, Sequence[Picture]]
) -> Iterable[_ProblemSection]:
    headings = {
        problem_anchor(s): f"{s.key.problem.op} {names.short[s.key.problem.op, str(s.key.problem)]}"
        for s in current
    }
    for anchor, heading in headings.items():
        yield _ProblemSection(anchor, heading, tuple(progress.get(anchor, ())))
