"""The tables of a report as Markdown, for a pull request: the main columns of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType

from ... import __version__
from .collected import Collected
from .columns import COLUMNS
from .tables import Table, make_table
from .wording import iso_time

__all__ = ["MAX_ROWS", "report_markdown"]

MAX_ROWS = 60
"""Of a table: a comment on a pull request holds 65,536 characters."""

_SECTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "devices": (
            "Environment",
            ("sku", "device", "provenance", "policy", "versions", "num_trials", "date"),
        ),
        "summary": (
            "Summary",
            (
                "sku",
                "op",
                "provenance",
                "num_problems",
                "num_decided",
                "geomean_gain_over_default",
                "smallest_gain_over_default",
                "num_with_baseline",
                "geomean_speedup_over_baseline",
                "speedup_provenance",
                "median_share_of_roofline",
            ),
        ),
        "results": (
            "Results",
            (
                "sku",
                "op",
                "problem",
                "provenance",
                "time_us",
                "ci_low_us",
                "gain_over_default",
                "share_of_roofline",
                "baseline",
                "speedup_over_baseline",
                "speedup_provenance",
                "template",
                "state",
            ),
        ),
        "comparison": (
            "Across SKUs",
            (
                "op",
                "problem",
                "base_sku",
                "base_time_us",
                "sku",
                "time_us",
                "speedup",
                "speedup_provenance",
                "bandwidth_ratio",
                "roofline_ratio",
            ),
        ),
        "transfer_summary": (
            "What the winner of one SKU costs on another",
            (
                "op",
                "from_sku",
                "from_provenance",
                "sku",
                "provenance",
                "num_common",
                "num_timed",
                "geomean_cost",
                "largest_cost",
            ),
        ),
        "libraries_summary": (
            "Other libraries across SKUs",
            (
                "op",
                "library",
                "base_sku",
                "sku",
                "provenance",
                "num_problems",
                "geomean_ratio",
                "bandwidth_ratio",
                "geomean_roofline_ratio",
                "base_library_versions",
                "library_versions",
            ),
        ),
        "failures": (
            "Failures",
            ("sku", "op", "provenance", "status", "num_trials", "share_of_trials", "reasons"),
        ),
    }
)
"""Heading and columns by the name of the frame."""


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
    for name, frame in collected.frames.named():
        if name in _SECTIONS and len(frame):
            heading, wanted = _SECTIONS[name]
            lines += ["", f"## {heading}", "", *_table(collected, name, wanted)]
    if not len(collected.frames.results) and not len(collected.frames.baselines):
        lines += ["", f"No trials for {skus} in the databases given."]
    return "\n".join(lines)


def _table(collected: Collected, name: str, wanted: tuple[str, ...]) -> Iterator[str]:
    frame = getattr(collected.frames, name)
    known = {column.name: column for column in (*COLUMNS[name], *COLUMNS["devices"])}
    table = make_table(
        frame.head(MAX_ROWS),
        [known[column] for column in wanted],
        table_id=name,
        caption=name,
        csv=f"{name}.csv",
        num_rows=len(frame),
    )
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
