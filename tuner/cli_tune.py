"""The command ``tune``: runs the main job, shows how it goes, prints what it found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import UsageError
from .cli_options import FormatOption, parse_names, require_database_name
from .rendering import Format, render_rows

if TYPE_CHECKING:
    from .catalog import Workload
    from .progress import ProgressListener
    from .tune_summary import TuneRow, TuneSummary

__all__ = ["add_to"]

_DEFAULT_WORKLOAD = "quickstart"

INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended: 128 + SIGINT."""

FOUND_COLUMNS = (
    *("problem", "sku", "template", "config", "time_us", "speedup", "share_of_roofline"),
    *("provenance", "trial_id", "trials"),
)
PLANNED_COLUMNS = ("problem", "sku", "provenance", "space_size", "expected_s", "reason")

_Workload = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="Name of a workload, path of a file, or all.")
]
_Gpus = Annotated[
    str, typer.Option("--gpu", metavar="auto|A,B", help="SKUs; auto is the GPU at hand.")
]
_Templates = Annotated[
    str | None,
    typer.Option("--template", metavar="A,B", help="Templates to search. Default: all."),
]
_Mode = Annotated[
    Literal["auto", "measure", "predict"],
    typer.Option("--mode", help="auto measures the GPU at hand and predicts other SKUs."),
]
_Trials = Annotated[
    int | None, typer.Option("--trials", metavar="N", min=1, help="Trials of each search.")
]
_TimeBudget = Annotated[
    float | None, typer.Option("--time-budget", metavar="S", help="Seconds for the whole run.")
]
_BudgetName = Annotated[
    str, typer.Option("--budget", metavar="quick|full", help="How thorough; see configs/budgets.")
]
_Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH",
        callback=require_database_name,
        help="Database to write. Default: the user's database.",
    ),
]
_FromCapture = Annotated[
    str | None,
    typer.Option(
        "--from-capture",
        metavar="FILE",
        help="Tune what tilescout.capture counted, the problems that pay most first.",
    ),
]
_Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the search.")]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print the problems, sizes and expected time.")
]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(tune)


def tune(
    workload: _Workload = _DEFAULT_WORKLOAD,
    *,
    gpu: _Gpus = "auto",
    template: _Templates = None,
    from_capture: _FromCapture = None,
    mode: _Mode = "auto",
    trials: _Trials = None,
    time_budget: _TimeBudget = None,
    budget: _BudgetName = "quick",
    db: _Database = None,
    seed: _Seed = 0,
    dry_run: _DryRun = False,
    quiet: _Quiet = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Find the best configs for a workload, and keep every trial.

    Measures on the GPU at hand. Without one it compiles for the SKUs named (else h200 and b200)
    and predicts. Run again after an interruption, it goes on where it was.

    Example: tilescout tune quickstart --gpu h200,b200 --trials 40
    """
    with _says_how_to_go_on(), _progress(is_shown=not (quiet or dry_run)) as listener:
        # Inside: loading takes long enough for a Ctrl-C.
        from .tune import tune as tune_workload

        gpus = None if gpu == "auto" else parse_names(gpu)
        summary = tune_workload(
            workload if from_capture is None else _captured(workload, from_capture, gpus, db),
            gpus=gpus,
            templates=None if template is None else parse_names(template),
            mode=mode,
            trials=trials,
            time_budget_s=time_budget,
            budget=budget,
            db=db,
            seed=seed,
            dry_run=dry_run,
            listener=listener,
        )
    columns = PLANNED_COLUMNS if summary.is_dry_run else FOUND_COLUMNS
    typer.echo(render_rows([_row(row, form) for row in summary.rows], columns, form))
    if not quiet:
        _say_share(summary)
    _exit_if_failed(summary)


def _captured(workload: str, path: str, gpus: Sequence[str] | None, db: str | None) -> Workload:
    from .captured import captured_workload, known_gains

    if workload != _DEFAULT_WORKLOAD:
        raise UsageError(
            f"a workload, {workload!r}, and --from-capture exclude each other: leave one out"
        )
    return captured_workload(path, gpus, known_gains(db))


def _say_share(summary: TuneSummary) -> None:
    """On stderr: how much of the time the GPU had work."""
    if summary.gpu_busy_share is None:
        return
    text = f"GPU verifying and timing for {summary.gpu_busy_share:.0%} of the search time"
    if summary.num_disturbed:
        text += f"; {summary.num_disturbed} block(s) repeated because its clock changed"
    typer.echo(f"tilescout: {text}", err=True)


def _progress(*, is_shown: bool) -> AbstractContextManager[ProgressListener | None]:
    """A bar, or None, which leaves progress to the log."""
    if not is_shown:
        return nullcontext(None)
    from .progress_bar import ProgressBar

    return ProgressBar()


@contextmanager
def _says_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            "tilescout: interrupted; every finished trial is kept: run the same command again to "
            "go on",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None


def _row(row: TuneRow, form: Format) -> dict[str, object]:
    """The row as every format shows it; a table names the problem by its label."""
    record: dict[str, object] = {
        "label": row.label,
        "op": row.problem.op,
        "problem": row.label if form is Format.TABLE else row.problem.as_dict(),
        "sku": row.sku,
        "template": row.template,
        "config": row.config.as_dict() if row.config else None,
        "time_us": row.time_us,
        "default_time_us": row.default_time_us,
        "speedup": row.speedup,
        "share_of_roofline": row.share_of_roofline,
        "provenance": row.provenance.value,
        "trial_id": row.trial_id,
        "trials": dict(row.num_trials),
        "space_size": row.space_size,
        "expected_s": row.expected_s,
        "reason": row.reason,
    }
    return record


def _exit_if_failed(summary: TuneSummary) -> None:
    if not summary.has_failures:
        return
    failed = [row for row in summary.rows if row.config is None]
    for row in failed:
        typer.echo(f"tilescout: no winner for {row.label} on {row.sku}: {row.reason}", err=True)
    raise typer.Exit(1)
