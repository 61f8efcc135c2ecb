"""The policy of a look-up: an argument, else a context manager, else one environment variable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import UsageError
from .tiers import POLICIES, Policy

__all__ = [
    "POLICY_VARIABLE",
    "current_policy",
    "policy",
    "policy_of_context",
    "reread_environment",
]

POLICY_VARIABLE = "TILESCOUT_POLICY"
"""Environment variable that names the policy of look-ups which are not told one."""

_DEFAULT: Policy = "nearest"
_chosen: ContextVar[Policy | None] = ContextVar("tilescout_policy", default=None)
policy_of_context = _chosen.get
"""The policy of the innermost ``policy`` block; None outside of any."""
_of_environment: Policy | None = None


@contextmanager
def policy(name: Policy) -> Iterator[None]:
    """Look-ups inside that are not told a policy use this one, in this thread or task only.

    Raises:
        UsageError: no such policy.
    """
    token = _chosen.set(_checked(name, "policy"))
    try:
        yield
    finally:
        _chosen.reset(token)


def current_policy() -> Policy:
    """The policy of the innermost ``policy`` block, else of the environment, else ``nearest``.

    The environment is read once, so that a look-up does not pay for it.

    Raises:
        UsageError: the variable names no policy.
    """
    global _of_environment  # noqa: PLW0603 - a cache that ``reread_environment`` empties
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    if _of_environment is None:
        named = os.environ.get(POLICY_VARIABLE, "").strip() or _DEFAULT
        _of_environment = _checked(named, POLICY_VARIABLE)
    return _of_environment


def reread_environment() -> None:
    """Makes the next look-up read the variable again."""
    global _of_environment  # noqa: PLW0603 - see above
    _of_environment = None


def _checked(name: str, what: str) -> Policy:
    for known in POLICIES:
        if name == known:
            return known
    raise UsageError(f"{what}={name!r} is not one of {', '.join(POLICIES)}")
