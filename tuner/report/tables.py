"""A frame as a table for people: which columns, under which heading, written how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

__all__ = ["Cell", "Column", "Kind", "Table", "make_table", "written"]

Kind = Literal["text", "count", "time", "ratio", "percent", "gigabytes", "range", "tiny"]


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    """Column of the frame."""
    heading: str
    """With the unit."""
    kind: Kind = "text"
    upper: str = ""
    """For a range, the column with its upper end."""
    mark: str = ""
    """The column with a word that the cell ends with, in brackets, unless it is ``measured``."""
    href: str = ""
    """The column with the target of a link, where the frame has it."""
    is_identity: bool = False
    """Whether it tells what a row is about, so that every printed row has it."""
    is_printed: bool = True
    """False for detail that paper leaves to the CSV file."""

    @property
    def is_number(self) -> bool:
        """Whether it sorts and aligns as numbers."""
        return self.kind != "text"


@dataclass(frozen=True)
class Cell:
    """What a cell shows and what it sorts by."""

    text: str
    sort_value: str
    href: str = ""


@dataclass(frozen=True)
class Table:
    """Everything a template needs to draw a table."""

    table_id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    csv: str
    """Name of the CSV file with all its columns."""
    constants: Mapping[str, str]
    """Columns that are alike in all rows, with their text: paper has them once, above."""
    num_rows: int
    """Of the whole table; more than ``rows`` where only the first are drawn."""

    @property
    def constants_text(self) -> str:
        """The constants in words."""
        headings = {column.name: column.heading for column in self.columns if column.is_printed}
        told = [f"{headings[n]}: {text}" for n, text in self.constants.items() if n in headings]
        return "; ".join(told)

    @property
    def css_classes(self) -> list[str]:
        """How the cells of each column are drawn."""
        return [self.css_class(column) for column in self.columns]

    def css_class(self, column: Column) -> str:
        """How the cells of a column are drawn."""
        is_on_paper = column.is_printed and column.name not in self.constants
        parts = ["number" if column.is_number else "", "" if is_on_paper else "screen"]
        return " ".join(filter(None, parts))


def make_table(
    frame: pd.DataFrame,
    columns: Sequence[Column],
    *,
    table_id: str,
    caption: str,
    csv: str,
    num_rows: int | None = None,
) -> Table:
    """The table of these columns of a frame; a column empty in every row is still shown.

    ``num_rows`` is the number of rows of the whole where ``frame`` is only its beginning.
    """
    cells = tuple(tuple(_cell(column, row) for column in columns) for row in _records(frame))
    constants = _constants(columns, cells)
    total = len(cells) if num_rows is None else num_rows
    return Table(table_id, caption, tuple(columns), cells, csv, constants, total)


def _constants(columns: Sequence[Column], cells: Sequence[Sequence[Cell]]) -> Mapping[str, str]:
    alike: dict[str, str] = {}
    for index, column in enumerate(columns):
        texts = {row[index].text for row in cells}
        if not column.is_identity and not column.is_number and len(texts) == 1:
            alike[column.name] = texts.pop()
    return alike


def _records(frame: pd.DataFrame) -> Iterable[dict[str, object]]:
    """Rows as dictionaries of Python values, None where there is none."""
    plain = frame.astype(object).where(frame.notna(), None)
    names = [str(name) for name in plain.columns]
    return (dict(zip(names, row, strict=True)) for row in plain.itertuples(index=False, name=None))


def _cell(column: Column, row: dict[str, object]) -> Cell:
    value = row[column.name]
    text = written(value, column.kind)
    if column.kind == "range" and value is not None:
        text = f"{written(value, 'time')} to {written(row[column.upper], 'time')}"
    mark = row.get(column.mark)
    if mark and mark != "measured":
        text = f"{text} ({mark})"
    href = row.get(column.href)
    return Cell(text, _sort_value(value), str(href) if href else "")


def _sort_value(value: object) -> str:
    """Enough digits to sort by; the CSV files have all."""
    if isinstance(value, float):
        return f"{value:.7g}"
    return "" if value is None else str(value)


def written(value: object, kind: Kind) -> str:
    """The value as a reader sees it; a dash where there is none."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    return _written_number(value, kind)


def _written_number(value: float, kind: Kind) -> str:
    forms = {
        "percent": f"{100 * value:.1f}%",
        "ratio": f"{value:.2f}x",
        "gigabytes": f"{value / 1e9:.0f}",
        "count": f"{value:,.0f}",
        "text": str(value),
        "tiny": f"{value:.2g}",
    }
    return forms[kind] if kind in forms else _four_digits(value)


def _four_digits(value: float) -> str:
    """Four significant digits, never in exponent form."""
    size = abs(value)
    decimals = next((d for d, limit in enumerate((1000, 100, 10, 1)) if size >= limit), 4)
    return f"{value:,.{decimals}f}"
