"""Commands that read whole databases: ``report``, ``export``."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .cli_options import (
    FormatOption,
    GpuFilter,
    OpFilter,
    parse_names,
    require_database_name,
)
from .paths import readable_databases
from .rendering import Format, render_record

__all__ = ["add_to"]

STANDARD_STREAM = "-"


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(report)
    app.command()(export)


def report(
    *,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write to.", show_default=False)
    ],
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
    form: FormatOption = Format.TABLE,
) -> None:
    """Write the report: one HTML page, CSV and PNG.

    Example: tilescout report --out report --gpu h200,b200
    """
    from .report import write_report
    from .store import Store

    with ExitStack() as stack:
        locations = db or reversed(readable_databases())
        stores = [stack.enter_context(Store.open(path, read_only=True)) for path in locations]
        paths = write_report(stores, out, gpus=parse_names(gpu))
    record = {
        "index": str(paths.index),
        "tables": [str(path) for path in paths.tables],
        "plots": [str(path) for path in paths.plots],
    }
    typer.echo(render_record(record, form))


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
