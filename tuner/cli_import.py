"""The command that adds to a database: ``import``, of our exports and of published tables."""

from __future__ import annotations

import json
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import UsageError
from .cli_options import FormatOption, require_database_name
from .paths import user_database_path
from .rendering import Format, Section, render_record, render_rows, render_sections

if TYPE_CHECKING:
    from .published import PublishedSummary
    from .records import MeasurementPolicy

__all__ = ["add_to"]

STANDARD_STREAM = "-"
REFUSAL_COLUMNS = ("rows", "first_line", "reason")


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("import")(import_)


def import_(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="What export wrote; - is standard input.", show_default=False
        ),
    ],
    *,
    published: Annotated[
        bool,
        typer.Option("--published", help="FILE is a CSV table of other libraries' times."),
    ] = False,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="TEXT", help="Where the table's figures are from."),
    ] = None,
    day: Annotated[
        str | None,
        typer.Option("--date", metavar="DATE", help="When they were published: 2026-08-11."),
    ] = None,
    provenance: Annotated[
        Literal["published", "measured"],
        typer.Option("--provenance", help="measured, where the table holds runs of your own."),
    ] = "published",
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="How rows were timed that do not say so, e.g. cuda_graph/warm_l2.",
        ),
    ] = None,
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
    """Add exported trials and winners, or published times, to a database.

    All of the file is added or nothing; what is there already stays as it is.

    Example: tilescout import winners.json --db results.db
    """
    given = {"--source": source, "--date": day, "--policy": policy}
    if published:
        _import_table(file, given, provenance, db, form)
        return
    wrong = [name for name, value in given.items() if value is not None]
    if wrong or provenance != "published":
        raise UsageError(f"{(wrong or ['--provenance'])[0]} is for --published tables only")
    _import_export(file, db, form)


def _import_export(file: str, db: str | None, form: Format) -> None:
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


def _import_table(
    file: str,
    given: dict[str, str | None],
    provenance: Literal["published", "measured"],
    db: str | None,
    form: Format,
) -> None:
    from .published import import_published
    from .records import Provenance
    from .store import Store

    source, day = given["--source"], given["--date"]
    if source is None or day is None:
        missing = "--source" if source is None else "--date"
        raise UsageError(f"--published needs {missing}: where the figures are from, and when")
    if file == STANDARD_STREAM:
        raise UsageError("--published reads its table from a file, not from standard input")
    moment, policy = _moment(day), _policy(given["--policy"])
    kind = Provenance(provenance)
    path = Path(file)
    if _is_absent(db):
        with Store.open("sqlite://") as rehearsal:
            import_published(
                rehearsal, path, source=source, date=moment, provenance=kind, policy=policy
            )
    with Store.open(db) as store:
        summary = import_published(
            store, path, source=source, date=moment, provenance=kind, policy=policy
        )
    typer.echo(_summary_text(summary, form))


def _summary_text(summary: PublishedSummary, form: Format) -> str:
    record: dict[str, object] = {
        "rows": summary.num_rows,
        "added": summary.num_added,
        "present": summary.num_present,
        "refused": summary.num_refused,
    }
    refusals = [
        {"rows": r.num_rows, "first_line": r.first_line, "reason": r.reason}
        for r in summary.refusals
    ]
    if form is Format.JSON:
        return render_record({**record, "refusals": refusals}, form)
    if form is Format.CSV:
        return render_rows([record], list(record), form)
    sections = render_sections([Section("Refused", refusals, REFUSAL_COLUMNS)])
    return "\n\n".join(filter(None, (render_record(record, form), sections)))


def _moment(day: str) -> datetime:
    """Noon of the day, UTC: the same date wherever it is read."""
    try:
        parsed = date.fromisoformat(day)
    except ValueError:
        raise UsageError(f"--date {day!r} is no date: write it as 2026-08-11") from None
    moment = datetime(parsed.year, parsed.month, parsed.day, 12, tzinfo=UTC)
    if parsed.year < 1970 or moment > datetime.now(UTC) + timedelta(days=1):
        raise UsageError(f"--date {day!r} must lie between 1970 and today")
    return moment


def _policy(text: str | None) -> MeasurementPolicy | None:
    from .store.codec import POLICIES

    if text is not None and text not in POLICIES:
        raise UsageError(f"--policy {text!r} must be one of {', '.join(POLICIES)}")
    return None if text is None else POLICIES[text]


def _is_absent(db: str | None) -> bool:
    """Whether the database is a file that is not there yet."""
    if db is not None and "://" in db:
        return False
    return not (user_database_path() if db is None else Path(db)).exists()


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
