"""Rows and records as a table, CSV or JSON text for standard output.

Tables are for people: rounded, aligned. CSV and JSON hold every value as it is.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..kernels.base import canonical_json

__all__ = ["Format", "Section", "render_record", "render_rows", "render_sections"]

Row = Mapping[str, object]

UNBOUNDED_WIDTH = 100_000
"""Columns of a table that goes to a file or a pipe: never wrapped."""


class Format(StrEnum):
    """How data is printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


@dataclass(frozen=True)
class Section:
    """A titled table among others."""

    title: str
    rows: Sequence[Row]
    columns: Sequence[str]


def render_sections(sections: Sequence[Section]) -> str:
    """The sections that have rows, as tables under their titles."""
    return "\n\n".join(
        f"{section.title}\n{_table(section.rows, section.columns)}"
        for section in sections
        if section.rows
    )


def render_rows(rows: Sequence[Row], columns: Sequence[str], form: Format) -> str:
    """The rows, one a line (table, CSV) or one an object (JSON), without a final newline.

    Args:
        rows: Values by column; a table and CSV show ``columns`` only, JSON everything.
        columns: Names and order; headings are there even without rows.
        form: Which text.
    """
    if form is Format.JSON:
        return json.dumps([dict(row) for row in rows], indent=2)
    if form is Format.CSV:
        return _csv(rows, columns)
    return _table(rows, columns)


def render_record(record: Row, form: Format) -> str:
    """One object: a line a field (table), one line (CSV) or one object (JSON)."""
    if form is Format.JSON:
        return json.dumps(dict(record), indent=2)
    if form is Format.CSV:
        return _csv([record], list(record))
    width = max(map(len, record), default=0)
    return "\n".join(f"{name:<{width}}  {_cell(value)}".rstrip() for name, value in record.items())


def _csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_value(row.get(name)) for name in columns] for row in rows)
    return buffer.getvalue().rstrip("\n")


def _csv_value(value: object) -> object:
    if isinstance(value, Mapping | list | tuple):
        return canonical_json(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else value


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    # Rich takes longer to import than a look-up takes to answer.
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        is_number = any(_is_number(row.get(name)) for row in rows)
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    buffer = io.StringIO()
    width = None if sys.stdout.isatty() else UNBOUNDED_WIDTH
    Console(file=buffer, width=width, markup=False, highlight=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).rstrip("\n")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_plain(item)}" for name, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "-"
    return str(value)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
