"""The command line: ``tilescout COMMAND``; data on standard output, the rest on standard error.

Each command reads its arguments, makes one library call and prints what came back. What only one
command needs is imported inside it, so that ``--help`` and ``lookup`` start fast.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from ..errors import TilescoutError, UsageError
from . import cli_compare, cli_databases, cli_deploy, cli_import, cli_lookup, cli_replay, cli_tune

__all__ = ["app", "main"]

app = typer.Typer(
    name="tilescout",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Finds, keeps and hands out the fastest correct kernel config for a GPU.",
)
cli_tune.add_to(app)
cli_lookup.add_to(app)
cli_databases.add_to(app)
cli_import.add_to(app)
cli_compare.add_to(app)
cli_replay.add_to(app)
cli_deploy.add_to(app)


def _print_version(wanted: bool) -> None:  # typer passes the value by position
    if wanted:
        from .. import __version__

        typer.echo(f"tilescout {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log in detail and show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    del version
    handler = _StderrHandler()
    if not debug:
        # The answer of a look-up names its tier; saying it twice would be noise.
        handler.addFilter(lambda record: record.name != f"{__package__}.dispatch")
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s" if debug else "%(message)s",
        handlers=[handler],
    )


class _StderrHandler(logging.Handler):
    """Writes to whatever standard error is now: a progress bar stands in for it while it is up."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        sys.stderr.write(f"{self.format(record)}\n")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_debug = "--debug" in given
    if is_debug:
        # Accepted anywhere, because it is added to a command line that has just failed.
        given = ["--debug", *(argument for argument in given if argument != "--debug")]
    try:
        _run(given)
    except BrokenPipeError:
        # The reader has gone; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if is_debug:
            traceback.print_exc()
        sys.stderr.write(_message(error, is_debug=is_debug))
        sys.exit(2 if isinstance(error, UsageError) else 1)
    raise AssertionError("typer exits by itself")


def _run(arguments: Sequence[str]) -> None:
    try:
        app(arguments, prog_name="tilescout")
    finally:
        # Here a reader that has gone can still be told from a bug; at exit it cannot.
        sys.stdout.flush()


def _message(error: Exception, *, is_debug: bool) -> str:
    if isinstance(error, TilescoutError):
        return f"tilescout: {error}\n"
    hint = "" if is_debug else "; run it again with --debug and report what it shows"
    return f"tilescout: internal error, {type(error).__name__}: {error}{hint}\n"
