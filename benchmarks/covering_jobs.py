"""What ``covering.py`` runs in worker processes: compiles one kernel, or checks one config."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from functools import lru_cache

import torch
from covering_problems import Case, cases, shares_launcher
from tilescout.errors import TilescoutError
from tilescout.kernels.base import Config, KernelSpec, Problem
from tilescout.kernels.registry import operation, template
from tilescout.tuner.compile_pool import short_reason
from tilescout.tuner.launch_errors import failures, status_of
from tilescout.tuner.records import TrialStatus
from tilescout.tuner.validate import Verdict, build_on_poison, judge_repeat

__all__ = ["Outcome", "check_config", "compile_kernel", "load_checker", "load_compiler"]

Outcome = tuple[str, str, float]
"""Status, reason, seconds."""


def load_compiler() -> None:
    """Loads what nearly every compile needs, in all processes at a time."""
    with suppress(ImportError):
        import triton.compiler  # noqa: F401


def load_checker() -> None:
    """Loads what every check needs, and opens the device."""
    load_compiler()
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


def compile_kernel(spec: KernelSpec, arch: int) -> Outcome:
    """Compiles one kernel into the compiler's cache on disk, where the check finds it.

    Raises:
        TilescoutError: the fault is not the kernel's: there is no nvcc.
    """
    start = time.monotonic()
    try:
        spec.compile(arch)
    except TilescoutError:
        raise
    # A compiler raises whatever it likes, plain AssertionError and RuntimeError included.
    except Exception as error:
        found = status_of(error)
        status = found if found is TrialStatus.OUT_OF_RESOURCES else TrialStatus.COMPILE_ERROR
        return status.value, short_reason(error), time.monotonic() - start
    return TrialStatus.OK.value, "", time.monotonic() - start


def check_config(problem: Problem, config: Config, device: str = "cuda") -> Outcome:
    """What became of a config that was compiled, on every case of its problem's grid.

    Scratch memory starts as NaN; each case is launched twice.
    """
    start = time.monotonic()
    try:
        verdict = _verdict(problem, config, device)
    except failures() as error:
        status, reason = status_of(error), short_reason(error)
        if device == "cuda" and _is_device_lost():
            # The context fails for ever: the pool replaces a process that ends, and reads this.
            print(f"{status.value}: {reason}", file=sys.stderr, flush=True)
            os._exit(1)
        return status.value, reason, time.monotonic() - start
    return verdict.status.value, verdict.reason, time.monotonic() - start


def _verdict(problem: Problem, config: Config, device: str) -> Verdict:
    op, kernel = operation(problem.op), template(problem.op, config.template)
    launcher = None
    verdict = Verdict(TrialStatus.OK)
    for case in _cases(problem, device):
        if launcher is None or not shares_launcher(problem.op):
            launcher = build_on_poison(kernel, case.problem, config, case.inputs)
        first, second = (op.make_outputs(case.problem, case.inputs) for _ in range(2))
        launcher.launch(case.inputs, first)
        launcher.launch(case.inputs, second)
        verdict = Verdict.of(op.compare(case.problem, case.inputs, first), case.name)
        if verdict.is_ok:
            where = f"a second launch ({case.name})"
            verdict = judge_repeat(op, verdict, first, second, where)
        if not verdict.is_ok:
            break
    return verdict


@lru_cache(maxsize=8)
def _cases(problem: Problem, device: str) -> tuple[Case, ...]:
    found: tuple[Case, ...] = cases(problem, device)
    return found


def _is_device_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
