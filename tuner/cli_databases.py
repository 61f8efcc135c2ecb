"""Commands over whole databases: ``report``, ``export``, ``import``."""

from __future__ import annotations

import json
import sys
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
from .paths import readable_databases, user_database_path
from .rendering import Format, render_record

__all__ = ["add_to"]

STANDARD_STREAM = "-"


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(report)
    app.command()(export)
    app.command("import")(import_)


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


def import_(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="What export wrote; - is standard input.", show_default=False
        ),
    ],
    db: Annotated[
        str | None,
        typer.Option(
            "--db",
            metavar="PATH",
            callback=require_database_name,
            help="Database file. Default: the user's database.",
        ),
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Add exported trials and winners to a database.

    All of the file is added or nothing; what is there already stays as it is.

    Example: tilescout import winners.json --db results.db
    """
    from .store import Store
    from .store.transfer import import_json

    data = _read(file)
    try:
        if _is_absent(db):
            # A file that cannot be imported must not leave a new, empty database behind.
            with Store.open("sqlite://") as rehearsal:
                import_json(rehearsal, data)
        with Store.open(db) as store:
            summary = import_json(store, data)
    except UsageError as error:
        raise UsageError(f"{file!r} cannot be imported: {error}") from error
    record = {
        "studies": summary.num_studies,
        "trials": summary.num_trials,
        "winners": summary.num_winners,
    }
    typer.echo(render_record(record, form))


def _is_absent(db: str | None) -> bool:
    """Whether the database is a file that is not there yet."""
    if db is not None and "://" in db:
        return False
    return not (user_database_path() if db is None else Path(db)).exists()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror}; choose another file"
        ) from error


def _read(file: str) -> object:
    try:
        text = (
            sys.stdin.read() if file == STANDARD_STREAM else Path(file).read_text(encoding="utf-8")
        )
        return json.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {file!r}: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{file!r} is not JSON ({error}): give a file that `tilescout export` wrote"
        ) from error
