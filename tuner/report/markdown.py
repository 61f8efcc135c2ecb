"""The tables of a report as Markdown, for a pull request: the main columns of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

import pandas as pd

from ... import __version__
from .collected import Collected
from .columns import columns_of
from .problem_names import ProblemNames
from .tables import Column, Table, make_table
from .wording import iso_time

__all__ = ["MAX_ROWS", "report_markdown"]

MAX_ROWS = 60
"""Of a table: a comment on a pull request holds 65,536 characters."""

_SECTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "devices": ("Environment", "sku device provenance policy versions num_trials date"),
        "summary": (
            "Summary",
            "sku op provenance num_problems num_decided geomean_gain_over_default "
            "smallest_gain_over_default median_share_of_roofline",
        ),
        "comparison_summary": (
            "Across SKUs",
            "op base_sku sku provenance num_problems geomean_speedup smallest_speedup "
            "largest_speedup bandwidth_ratio peak_ratio geomean_roofline_ratio num_same_config",
        ),
        "libraries_summary": (
            "Other libraries across SKUs",
            "op library base_sku sku provenance num_problems geomean_ratio smallest_ratio "
            "largest_ratio bandwidth_ratio peak_ratio base_library_versions library_versions",
        ),
        "times": ("Times side by side", ""),
        "parameter_changes": (
            "What changed in the winners",
            "op base_sku sku provenance parameter num_changed num_problems changes",
        ),
        "transfer_matrix": ("What the winner of one SKU costs on another", ""),
        "results": (
            "Results",
            "sku op problem provenance time_us ci_low_us gain_over_default achieved_gbps "
            "share_of_roofline baseline speedup_over_baseline speedup_provenance template state",
        ),
        "baselines_summary": (
            "Other libraries against ours",
            "sku op library library_versions num_problems num_faster geomean_speedup "
            "smallest_speedup largest_speedup compared",
        ),
        "failures": ("Failures", "sku op provenance status num_trials share_of_trials reasons"),
    }
)
"""Heading and columns by the name of the frame; no columns named: all of the page's."""


def report_markdown(collected: Collected, *, generated_at: datetime) -> str:
    """The text, without a final newline."""
    skus = ", ".join(collected.skus) or "no SKU"
    lines = [
        f"# Tilescout report: {skus}",
        "",
        f"Generated {iso_time(generated_at)} by tilescout {__version__}. Times are microseconds a "
        "call; measured, predicted and published figures are marked, and a ratio of two kinds says "
        "mixed.",
    ]
    names = ProblemNames(collected)
    lines += [line for sentence in names.shared_sentences() for line in ("", f"{sentence}.")]
    devices = columns_of("devices", collected.frames.devices)
    for name, frame in collected.frames.named():
        if name in _SECTIONS and len(frame):
            heading, wanted = _SECTIONS[name]
            table = _table(names.shortened(frame), name, wanted.split(), devices)
            lines += ["", f"## {heading}", "", *_lines(table)]
    if not len(collected.frames.results) and not len(collected.frames.baselines):
        lines += ["", f"No trials for {skus} in the databases given."]
    return "\n".join(lines)


def _table(
    frame: pd.DataFrame, name: str, wanted: Sequence[str], devices: Iterable[Column]
) -> Table:
    columns = columns_of(name, frame)
    known = {column.name: column for column in (*devices, *columns)}
    return make_table(
        frame.head(MAX_ROWS),
        [known[column] for column in wanted] if wanted else columns,
        table_id=name,
        caption=name,
        csv=f"{name}.csv",
        num_rows=len(frame),
    )


def _lines(table: Table) -> Iterator[str]:
    yield _row([column.heading for column in table.columns])
    yield _row(["--:" if column.is_number else ":--" for column in table.columns])
    yield from (_row([cell.text for cell in row]) for row in table.rows)
    yield from _cut(table)


def _cut(table: Table) -> Iterator[str]:
    if table.num_rows > len(table.rows):
        yield ""
        yield f"The first {len(table.rows)} of {table.num_rows:,} rows."


def _row(texts: list[str]) -> str:
    cells = (" ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") for text in texts)
    return f"| {' | '.join(cells)} |"
