"""What ``tune`` was asked for, checked before anything starts: limits, seed, lists of names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path

from ..errors import UsageError
from ..kernels.external import external_policy
from . import catalog
from .catalog import Budget

__all__ = ["check_run", "checked_budget", "checked_names", "checked_seed"]

_SEED_END = 2**32
"""The random generators of NumPy and scikit-learn take no more."""
_METHODS = ("study_started", "trial_ended", "study_ended")
"""Of a ``ProgressListener``."""


def checked_budget(name: str, trials: int | None, time_budget_s: float | None) -> Budget:
    """The budget of that name with what is given in its place.

    Raises:
        UnknownNameError: no such budget.
        UsageError: the name is none, ``trials`` is no whole number from 1 on, or the time no
            number above 0.
    """
    if not isinstance(name, str):
        raise UsageError(f"budget={name!r} must be the name of a budget, such as 'quick'")
    limits = catalog.budget(name)
    if trials is not None:
        if not _is_whole(trials) or trials < 1:
            raise UsageError(f"trials={trials!r} must be at least 1, a whole number")
        limits = replace(limits, num_trials=int(trials))
    if time_budget_s is not None:
        is_number = isinstance(time_budget_s, Real) and not isinstance(time_budget_s, bool)
        if not is_number or math.isnan(time_budget_s) or time_budget_s <= 0:
            raise UsageError(f"time_budget_s={time_budget_s!r} must be more than 0 seconds")
        limits = replace(limits, time_budget_s=float(time_budget_s))
    return limits


def checked_seed(seed: int) -> int:
    """The seed; raises UsageError unless it is a whole number of 32 bits."""
    if not _is_whole(seed) or not 0 <= seed < _SEED_END:
        raise UsageError(f"seed={seed!r} must be between 0 and {_SEED_END - 1}")
    return int(seed)


def checked_names(argument: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The names; raises UsageError for what is no list of them, one name by itself included."""
    if names is None:
        return None
    if isinstance(names, str):
        raise UsageError(f"{argument}={names!r} is one name: write it as a list, [{names!r}]")
    listed = tuple(names) if isinstance(names, Iterable) else (names,)
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in listed):
        raise UsageError(f"{argument}={names!r} must be a list of names")
    return listed


def check_run(db: object, listener: object, *, dry_run: object) -> None:
    """What a run reads only when it has begun.

    Raises:
        UsageError: the database is no path or URL, the listener lacks a method, ``dry_run`` is no
            bool, or the environment names no policy of external templates, which decides what is
            searched in every mode.
    """
    if not isinstance(dry_run, bool):
        raise UsageError(f"dry_run={dry_run!r} must be True or False")
    if db is not None and not isinstance(db, (str, Path)):
        raise UsageError(
            f"db={db!r} must be a path (str or pathlib.Path) or a database URL, or None for the "
            "user's database"
        )
    if listener is not None:
        missing = [name for name in _METHODS if not callable(getattr(listener, name, None))]
        if missing or isinstance(listener, type):
            raise UsageError(
                f"listener={listener!r} must be an object with the methods {', '.join(_METHODS)} "
                "(tilescout.tuner.progress.ProgressListener), or None to log"
            )
    external_policy()


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
