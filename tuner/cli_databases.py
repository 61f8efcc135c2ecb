"""Commands that read whole databases: ``report``, ``export``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import UsageError
from .cli_options import (
    GpuFilter,
    OpFilter,
    parse_names,
    require_database_name,
)
from .paths import readable_databases
from .rendering import Format, render_record

if TYPE_CHECKING:
    from .report import ReportPaths
    from .store import Store

__all__ = ["add_to"]

STANDARD_STREAM = "-"


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(report)
    app.command()(export)


def report(
    *,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Folder to write to.", show_default=False),
    ] = None,
    gpu: GpuFilter = None,
    db: Annotated[
        list[str] | None,
        typer.Option(
            "--db",
            metavar="PATH",
            callback=require_database_name,
            help="Database; repeatable, the first counts where they disagree. "
            "Default: the user's, then the shipped one.",
        ),
    ] = None,
    plots: Annotated[
        int | None,
        typer.Option(
            "--plots", metavar="N", min=0, help="Searches with a plot of their own. Default: 12."
        ),
    ] = None,
    form: Annotated[
        Literal["table", "csv", "json", "md"],
        typer.Option(
            "--format",
            help="How the files are listed on standard output; md prints the tables themselves.",
        ),
    ] = "table",
) -> None:
    """Write the report: an HTML page, CSV and PNG, or Markdown.

    Example: tilescout report --out report --gpu h200,b200
    """
    if out is None and form != "md":
        raise UsageError("report needs --out DIR; --format md prints the tables without a folder")
    if out is not None and not out.strip():
        raise UsageError(f"--out {out!r} names no folder: write . for the one you are in")
    from .report import NUM_PLOTS, write_report
    from .store import Store

    gpus = parse_names(gpu)
    with ExitStack() as stack:
        locations = db or reversed(readable_databases())
        stores = [stack.enter_context(Store.open(path, read_only=True)) for path in locations]
        if out is not None:
            num_plots = NUM_PLOTS if plots is None else plots
            paths = write_report(stores, Path(out), gpus=gpus, num_plots=num_plots)
        text = _markdown(stores, gpus) if form == "md" else _listing(paths, Format(form))
    typer.echo(text)


def _markdown(stores: Sequence[Store], gpus: Sequence[str] | None) -> str:
    from .report.collected import collect
    from .report.markdown import report_markdown

    return report_markdown(collect(stores, gpus), generated_at=datetime.now(UTC))


def _listing(paths: ReportPaths, form: Format) -> str:
    record = {
        "index": str(paths.index),
        "tables": [str(path) for path in paths.tables],
        "plots": [str(path) for path in paths.plots],
    }
    return render_record(record, form)


def export(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Where to write; - is standard output.")
    ] = STANDARD_STREAM,
    op: OpFilter = None,
    gpu: GpuFilter = None,
    db: Annotated[
        str | None,
        typer.Option(
            "--db",
            metavar="PATH",
            callback=require_database_name,
            help="Database. Default: the user's and the shipped one, merged and numbered anew.",
        ),
    ] = None,
) -> None:
    """Write trials and winners as JSON.

    Example: tilescout export winners.json --gpu h200
    """
    from .store.merge import export_databases

    locations = [db] if db else list(readable_databases())
    data = export_databases(locations, op=op, gpus=parse_names(gpu))
    text = json.dumps(data, indent=1)
    if file == STANDARD_STREAM:
        typer.echo(text)
    else:
        _write(Path(file), text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}; choose another file"
        ) from error
