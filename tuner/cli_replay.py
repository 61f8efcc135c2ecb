"""The command ``replay``: scores a sampler on recorded spaces, without a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .cli_options import FormatOption
from .rendering import Format, render_rows

if TYPE_CHECKING:
    from .replay.scoring import Score

__all__ = ["add_to"]

COLUMNS = (
    "file",
    "sampler",
    "seeds",
    "ratio_25",
    "ratio_50",
    "ratio_100",
    "ratio_200",
    "runs_within_5_pct",
    "runs_within_10_pct",
    "p_t",
    "median_evaluations",
)


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(replay)


def replay(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Recorded spaces: Kernel Tuner cache, T4 results or tilescout export; "
            ".gz is read too.",
            show_default=False,
        ),
    ],
    *,
    trials: Annotated[
        int, typer.Option("--trials", metavar="N", help="Distinct evaluations a run.")
    ] = 200,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Runs a space, with seeds 0 to N-1.")
    ] = 20,
    sampler: Annotated[
        str, typer.Option("--sampler", metavar="NAME", help="portfolio, forest, tpe or random.")
    ] = "portfolio",
    stop: Annotated[
        bool, typer.Option("--stop", help="Let a run end once further gain is unlikely.")
    ] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Score a sampler on recorded spaces.

    Per space: the median ratio to the optimum after 25, 50, 100 and 200 evaluations, the shares of
    runs that end within 5% and 10% of it, and the score P_t (0 is random search, 1 the optimum).

    Example: tilescout replay winners.json --trials 30 --seeds 2
    """
    for name, value in (("--trials", trials), ("--seeds", seeds)):
        if value < 1:
            raise UsageError(f"{name} {value} must be at least 1")
    from .replay.reading import read_recorded
    from .replay.runner import score_sampler

    spaces = [space for file in files for space in read_recorded(file)]
    scores = [
        (
            space.label,
            score_sampler(
                space, sampler=sampler, num_trials=trials, num_seeds=seeds, can_stop=stop
            ),
        )
        for space in spaces
    ]
    if form is Format.JSON:
        rows = [_row(label, sampler, score) for label, score in scores]
        typer.echo(json.dumps({"spaces": rows}, indent=2))
    else:
        flat = [_flat_row(label, sampler, score) for label, score in scores]
        typer.echo(render_rows(flat, COLUMNS, form))


def _row(file: str, sampler: str, score: Score) -> dict[str, object]:
    return {
        "file": file,
        "sampler": sampler,
        "seeds": score.num_runs,
        "median_ratio": {str(count): ratio for count, ratio in score.median_ratio.items()},
        "runs_within_5_pct": score.runs_within_5_pct,
        "runs_within_10_pct": score.runs_within_10_pct,
        "p_t": score.p_t,
    }


def _flat_row(file: str, sampler: str, score: Score) -> dict[str, object]:
    """The row with a column for every count, and how long the runs were."""
    row = _row(file, sampler, score)
    del row["median_ratio"]
    ratios = {f"ratio_{count}": ratio for count, ratio in score.median_ratio.items()}
    return {**row, **ratios, "median_evaluations": score.median_evaluations}
