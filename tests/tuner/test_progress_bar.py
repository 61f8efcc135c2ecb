"""What a running search shows: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from types import SimpleNamespace

from rich.console import Console
from tilescout.kernels.base import Config
from tilescout.tuner.progress_bar import ProgressBar
from tilescout.tuner.records import Evaluation, Provenance, Timing, TrialStatus
from tilescout.tuner.store.records import TrialRecord
from toy_op import ToyProblem

CONFIG = Config.of("triton", {"block_n": 64})


def trial(time_us: float) -> TrialRecord:
    timing = Timing(time_us, time_us, time_us, time_us, time_us)
    evaluation = Evaluation(CONFIG, TrialStatus.OK, Provenance.PREDICTED, timing=timing)
    return TrialRecord(1, 1, 0, evaluation, datetime.now(UTC))


def play(*, is_terminal: bool, has_winner: bool = True) -> str:
    """Shows a study of three trials, one of them from an earlier run."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=120, highlight=False)
    with ProgressBar(console) as bar:
        bar.study_started("size 64", "h200", ToyProblem(64), 3)
        bar.trial_ended(trial(9.0), 9.0, False)
        bar.trial_ended(trial(12.0), 9.0, True)
        bar._progress.refresh()
        bar.trial_ended(trial(7.5), 7.5, True)
        bar.study_ended(SimpleNamespace(trial=trial(7.5)) if has_winner else None)
    return text.getvalue()


def test_elsewhere_a_study_is_two_lines() -> None:
    assert play(is_terminal=False).splitlines() == [
        "size 64 on h200: 3 trials",
        "size 64 on h200: 7.5 us predicted, block_n=64 (3 trials, 1 of them from an earlier run)",
    ]


def test_a_terminal_shows_the_best_so_far() -> None:
    text = play(is_terminal=True)
    assert "2/3" in text
    assert "best 9 us" in text
    assert "7.5 us predicted, block_n=64" in text


def test_a_study_without_a_winner_says_so() -> None:
    assert play(is_terminal=False, has_winner=False).endswith(
        "size 64 on h200: no winner (3 trials, 1 of them from an earlier run)\n"
    )


def test_a_study_cut_short_says_how_to_go_on() -> None:
    text = io.StringIO()
    with ProgressBar(Console(file=text, width=120, highlight=False)) as bar:
        bar.study_started("size 64", "h200", ToyProblem(64), 3)
        bar.trial_ended(trial(9.0), 9.0, True)
        bar.study_ended(SimpleNamespace(trial=trial(9.0)))
    assert "(1 of 3 trials, run again to go on)" in text.getvalue()


def test_one_trial_is_not_plural() -> None:
    text = io.StringIO()
    with ProgressBar(Console(file=text, width=120, highlight=False)) as bar:
        bar.study_started("size 64", "h200", ToyProblem(64), 1)
    assert text.getvalue() == "size 64 on h200: 1 trial\n"
