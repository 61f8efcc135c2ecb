"""Reads a CSV table of times: its columns, units and rows, each checked.

What a row's shape means is ``dialect``'s; here a row is text with a time.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from ...errors import UsageError
from ..records import Toolchain

__all__ = ["TableRow", "read_table"]

_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
"""Name of the column with the time -> microseconds."""
_NEEDED = ("gpu", "op", "library", "library_version")
_VERSIONS = tuple(field.name for field in fields(Toolchain))
_CONDITIONS = "mode"
_LABELS = ("model", "label", "tb_per_s", "gb_per_s", "tflops", "notes")
"""Columns that say what the others say already: names of shapes, rates derived from the time."""


@dataclass(frozen=True)
class TableRow:
    """One time of one library on one shape."""

    line: int
    """In the file, from 1; the headings are line 1."""
    gpu: str
    op: str
    library: str
    library_version: str
    conditions: str
    """How it was timed, in the table's words."""
    toolchain: Toolchain
    shape: Mapping[str, str]
    """The columns that describe the problem."""
    time_us: float


def read_table(path: Path) -> list[TableRow]:
    """All rows of the file.

    Raises:
        UsageError: the file cannot be read, a column is missing, or a value is wrong; the message
            names line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(_rows(csv.reader(file, strict=True), str(path)))
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} is not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise UsageError(f"{str(path)!r} is not a CSV file: {error}") from error


def _rows(lines: Iterator[list[str]], where: str) -> Iterator[TableRow]:
    headings = [heading.strip() for heading in next(lines, [])]
    unit = _check_headings(headings, where)
    number = 1
    for number, cells in enumerate(lines, start=2):
        if not cells:
            continue
        if len(cells) != len(headings):
            raise UsageError(
                f"{where} line {number} has {len(cells)} columns, the headings {len(headings)}"
            )
        values = dict(zip(headings, (cell.strip() for cell in cells), strict=True))
        for name in (*_NEEDED, unit):
            if not values[name]:
                raise UsageError(f"{where} line {number}: column {name!r} is empty")
        yield _row(values, unit, number, where)
    if number == 1:
        raise UsageError(f"{where} has no rows below its headings")


def _check_headings(headings: list[str], where: str) -> str:
    """The column with the time; refuses a table that lacks columns or has one twice."""
    twice = {name for name in headings if headings.count(name) > 1}
    if twice:
        raise UsageError(f"{where} line 1: column {min(twice)!r} is there twice")
    missing = [name for name in _NEEDED if name not in headings]
    if missing:
        raise UsageError(
            f"{where} line 1: column {missing[0]!r} is missing; a table of published times has "
            f"{', '.join(_NEEDED)}, a time in one of {', '.join(_UNITS)}, and the shape"
        )
    units = [name for name in headings if name in _UNITS]
    if len(units) != 1:
        found = f"columns {', '.join(units)}" if units else f"none among {', '.join(headings)}"
        raise UsageError(
            f"{where} line 1: the time must be one column named by its unit, "
            f"{', '.join(_UNITS)}; found {found}"
        )
    return units[0]


def _row(values: dict[str, str], unit: str, line: int, where: str) -> TableRow:
    known = {*_NEEDED, *_VERSIONS, *_LABELS, _CONDITIONS, unit}
    return TableRow(
        line=line,
        gpu=values["gpu"],
        op=values["op"],
        library=values["library"],
        library_version=values["library_version"],
        conditions=values.get(_CONDITIONS, ""),
        toolchain=Toolchain(**{name: values.get(name, "") for name in _VERSIONS}),
        shape={name: text for name, text in values.items() if name not in known},
        time_us=_time(values[unit], unit, f"{where} line {line}"),
    )


def _time(text: str, unit: str, where: str) -> float:
    # Plain decimal notation only: float() also takes 1_000, nan and padded words.
    value = float(text) if re.fullmatch(r"[0-9.]+(e[-+]?[0-9]+)?", text) and _is_number(text) else 0
    if not 0 < value < math.inf:
        raise UsageError(f"{where}: {unit}={text!r} must be a number above 0")
    return value * _UNITS[unit]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
