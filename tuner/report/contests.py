"""Other libraries that were measured beside our winner, in the same run: as baselines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .baselines import Baseline
from .searches import Search, is_library, is_ok

__all__ = ["contest_baselines"]


def contest_baselines(searches: Iterable[Search]) -> Iterator[Baseline]:
    """The libraries' times in searches that had them."""
    for search in searches:
        if search.has_libraries:
            op = search.key.problem.op
            for trial in search.trials:
                if is_ok(trial) and is_library(op, trial.evaluation.config.template):
                    yield Baseline(search.study, trial)
