"""The CSV file behind every table."""

from __future__ import annotations

import csv
import io
from collections.abc import Hashable
from pathlib import Path

import pandas as pd

from .frames import ReportFrames

__all__ = ["write_csv"]


def write_csv(frames: ReportFrames, folder: Path) -> tuple[Path, ...]:
    """Writes each frame to ``<name>.csv`` in the folder; full precision, empty where unknown."""
    paths = []
    for name, frame in frames.named():
        path = folder / f"{name}.csv"
        columns = [_cells(frame[column]) for column in frame]
        lines = [",".join(frame.columns), *map(",".join, zip(*columns, strict=True)), ""]
        path.write_text("\n".join(lines), encoding="utf-8", newline="")
        paths.append(path)
    return tuple(paths)


def _cells(column: pd.Series) -> list[str]:
    """The column as the csv module writes it, which is asked once for each value that differs.

    Texts repeat in thousands of rows: DataFrame.to_csv takes four times as long.
    """
    written: dict[Hashable, str] = {None: ""}
    cells = []
    for value in column.astype(object).where(column.notna(), None).tolist():
        if value not in written:
            written[value] = _cell(value)
        cells.append(written[value])
    return cells


def _cell(value: object) -> str:
    if not isinstance(value, str):
        return repr(value)
    text = io.StringIO()
    # A second cell, because one that is empty and alone in its row would be quoted.
    csv.writer(text, lineterminator="").writerow([value, ""])
    return text.getvalue()[:-1]
