"""The command ``compare``: two databases, or two states of one, against each other."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .cli_options import FormatOption, GpuFilter, OpFilter, parse_names
from .rendering import Format, Section, render_record, render_rows, render_sections

if TYPE_CHECKING:
    from .report.changes import ChangeRow, Changes, StoppedRow

__all__ = ["add_to"]

CHANGE_COLUMNS = (
    "op",
    "problem",
    "sku",
    "provenance",
    "policy",
    "verdict",
    "base_time_us",
    "time_us",
    "change_percent",
    "same_config_percent",
    "num_stopped",
    "winner",
    "base_versions",
    "versions",
    "base_date",
    "date",
)
TABLE_COLUMNS = (
    "verdict",
    "change_percent",
    "base_time_us",
    "time_us",
    "same_config_percent",
    "num_stopped",
    "sku",
    "op",
    "problem",
    "winner",
    "provenance",
    "policy",
    "base_versions",
    "versions",
)
"""What a terminal shows first."""
STOPPED_COLUMNS = ("op", "problem", "sku", "template", "config", "was_winner", "status", "reason")


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(compare)


def compare(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="Database as it was.", show_default=False)
    ],
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="Database as it is.", show_default=False)
    ],
    *,
    base_where: Annotated[
        list[str] | None,
        typer.Option(
            "--base-where",
            metavar="NAME=VALUE",
            help="Only such results of BASE; repeatable. NAME: triton, tilelang, torch, cuda, "
            "driver, since, until.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="NAME=VALUE", help="Only such results of OTHER."),
    ] = None,
    gpu: GpuFilter = None,
    op: OpFilter = None,
    fail_over: Annotated[
        float | None,
        typer.Option(
            "--fail-over",
            metavar="PCT",
            min=0.0,
            help="Exit 1 where a time is longer by more than PCT beyond the noise, or lost.",
        ),
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Say what got faster or slower between two databases.

    Also which winners changed and which configs stopped working. The same database twice with
    --base-where and --where compares drivers, compilers or dates.

    Example: tilescout compare results.db results.db --fail-over 5
    """
    from .report.changes import Selection, compare_results
    from .store import Store

    for name, text in (("BASE", base), ("OTHER", other)):
        if not text.strip():
            raise UsageError(f"{name} {text!r} names no database: give a path")
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(Store.open(location, read_only=True)) for location in (base, other)
        )
        changes = compare_results(
            first,
            second,
            gpus=parse_names(gpu),
            op=op,
            base_selection=Selection.parse(base_where or ()),
            selection=Selection.parse(where or ()),
        )
    typer.echo(_text(changes, form))
    if fail_over is not None:
        _fail_over(changes, fail_over)


def _text(changes: Changes, form: Format) -> str:
    rows = [asdict(row) for row in changes.rows]
    stopped = [asdict(row) for row in changes.stopped]
    if form is Format.JSON:
        record = {"counts": changes.counts, "changes": rows, "stopped": stopped}
        return render_record(record, form)
    if form is Format.CSV:
        return render_rows(rows, CHANGE_COLUMNS, form)
    sections = [
        Section("Changes, the slowest first", _named(changes.telling), TABLE_COLUMNS),
        Section("Configs that stopped working", _named(changes.stopped), STOPPED_COLUMNS),
    ]
    return f"{render_record(changes.counts, form)}\n\n{render_sections(sections)}"


def _named(rows: Iterable[ChangeRow | StoppedRow]) -> list[dict[str, object]]:
    """The rows with short names of their problems, for a terminal."""
    return [{**asdict(row), "problem": row.name} for row in rows]


def _fail_over(changes: Changes, percent: float) -> None:
    failures = changes.failures(percent)
    for row in failures:
        change = f"{row.change_percent:+.1f}%" if row.change_percent is not None else row.verdict
        typer.echo(f"over {percent:g}%: {row.op} {row.name} on {row.sku}: {change}", err=True)
    if failures:
        raise typer.Exit(1)
