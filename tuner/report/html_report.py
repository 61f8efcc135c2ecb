"""The page: tables and plots put into ``template.html``, with nothing to load from elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import pandas as pd

from ... import __version__
from .collected import Collected
from .columns import COLUMNS
from .pictures import Picture, Pictures
from .searches import Search
from .tables import Table, make_table
from .wording import common_fields, iso_time, problem_text, slug

__all__ = ["problem_anchor", "render_page"]

MAX_ROWS = 200
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


def problem_anchor(search: Search) -> str:
    """The HTML id of the plots of the search's problem."""
    problem = search.key.problem
    return slug(["problem", problem.op, *map(str, problem.as_dict().values())])


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
    names = _ProblemNames(collected, pictures.by_problem)
    tables = {
        name: _table(names.shortened(frame), name) if len(frame) else None
        for name, frame in frames.named()
        if name in COLUMNS
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


class _ProblemNames:
    """Short names of problems: what all problems of an operation share is said once."""

    def __init__(self, collected: Collected, drawn: Collection[str]) -> None:
        """``drawn`` are the anchors of problems that have a plot."""
        self.by_op: dict[str, dict[str, str]] = {}
        current = collected.current
        problems = [search.key.problem for search in current]
        problems += [baseline.key.problem for baseline in collected.baselines]
        for op in dict.fromkeys(problem.op for problem in problems):
            self.by_op[op] = common_fields(p for p in problems if p.op == op)
        self.short: dict[tuple[str, str], str] = {}
        self.anchors: dict[tuple[str, str], str] = {}
        for problem in problems:
            place = (problem.op, str(problem))
            self.short[place] = problem_text(problem, self.by_op[problem.op])
        for search in current:
            if problem_anchor(search) in drawn:
                place = (search.key.problem.op, str(search.key.problem))
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
        frame.head(MAX_ROWS),
        COLUMNS[name],
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
    current: Iterable[Search], names: _ProblemNames, drawn: Mapping[str, Sequence[Picture]]
) -> Iterable[_ProblemSection]:
    headings = {
        problem_anchor(s): f"{s.key.problem.op} {names.short[s.key.problem.op, str(s.key.problem)]}"
        for s in current
    }
    for anchor, heading in headings.items():
        if anchor in drawn:
            yield _ProblemSection(anchor, heading, tuple(drawn[anchor]))
