"""What a table's words on how it timed mean as a measurement policy."""

from __future__ import annotations

import re

from ...errors import UsageError
from ...kernels.base import Problem
from ..records import MeasurementPolicy

__all__ = ["policy_of"]

_GRAPH = re.compile(r"graph replay|cuda[ -]?graph", re.IGNORECASE)
_EAGER = re.compile(r"\beager\b", re.IGNORECASE)
_COLD = re.compile(r"\bcold l2\b", re.IGNORECASE)
_WARM = re.compile(r"\bwarm l2\b", re.IGNORECASE)
_SOME_FIT = re.compile(r"\((\w+) ([\d, and]+) fit in L2\)")
"""``(batch 1 and 4 fit in L2)``: the inputs rotate, and only small ones stay in the cache."""


def policy_of(
    conditions: str, problem: Problem, otherwise: MeasurementPolicy | None
) -> MeasurementPolicy:
    """The policy that the words say; ``otherwise`` where they do not.

    Raises:
        UsageError: the words do not say it and there is no ``otherwise``.
    """
    is_graph = _said(conditions, _GRAPH, _EAGER)
    is_cold = _said(conditions, _COLD, _WARM)
    some_fit = _SOME_FIT.search(conditions)
    if is_cold is None and some_fit is not None:
        name, numbers = some_fit.groups()
        is_cold = str(problem.as_dict().get(name)) not in re.findall(r"\d+", numbers)
    if otherwise is not None:
        is_graph = otherwise.is_cuda_graph if is_graph is None else is_graph
        is_cold = otherwise.is_cold_l2 if is_cold is None else is_cold
    if is_graph is None or is_cold is None:
        what = "CUDA graph or eager" if is_graph is None else "cold or warm L2"
        raise UsageError(f"mode={conditions!r} does not say {what}: give --policy")
    return MeasurementPolicy(is_cuda_graph=is_graph, is_cold_l2=is_cold)


def _said(text: str, yes: re.Pattern[str], no: re.Pattern[str]) -> bool | None:
    """True or False where exactly one of the two is said, else None."""
    is_yes, is_no = bool(yes.search(text)), bool(no.search(text))
    return None if is_yes is is_no else is_yes
