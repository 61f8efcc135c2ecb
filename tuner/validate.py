"""Whether one config computes the right thing: against the reference, and twice the same.

Fast and wrong is the usual way for a config to look good, so nothing is timed before it has passed
here. Outputs start as NaN and so does the scratch memory that a template allocates: what a kernel
forgets to write shows, instead of what the config before it left there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..kernels.base import Comparison, Config, KernelTemplate, Launcher, Operation, Problem
from .records import TrialStatus

__all__ = ["Verdict", "build_on_poison", "judge_repeat", "validate"]


@dataclass(frozen=True)
class Verdict:
    """What a check found: ok, incorrect or unrepeatable, with the figures."""

    status: TrialStatus
    reason: str = ""
    max_abs_error: float | None = None
    relative_rms_error: float | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the config passed."""
        return self.status is TrialStatus.OK

    @classmethod
    def of(cls, comparison: Comparison, where: str) -> Verdict:
        """The verdict on a comparison with the reference; ``where`` says on which inputs."""
        return cls(
            TrialStatus.OK if comparison.is_ok else TrialStatus.INCORRECT,
            "" if comparison.reason is None else f"{comparison.reason} ({where})",
            comparison.max_abs_error,
            comparison.relative_rms_error,
        )


def validate(
    operation: Operation,
    template: KernelTemplate,
    problem: Problem,
    config: Config,
    inputs: Any,
) -> Verdict:
    """Runs the config on inputs made to expose mistakes and judges what comes out.

    Raises whatever building and launching raise: the caller knows what that means for the device.
    """
    launcher = build_on_poison(template, problem, config, inputs)
    first = operation.make_outputs(problem, inputs)
    launcher.launch(inputs, first)
    verdict = Verdict.of(operation.compare(problem, inputs, first), "validation inputs")
    if not verdict.is_ok or not template.is_repeatable:
        return verdict
    second = operation.make_outputs(problem, inputs)
    launcher.launch(inputs, second)
    return judge_repeat(operation, verdict, first, second, "a second launch on equal inputs")


def judge_repeat(
    operation: Operation, verdict: Verdict, first: Any, second: Any, where: str
) -> Verdict:
    """The verdict, turned into ``unrepeatable`` where two outputs differ in a bit."""
    if operation.outputs_equal(first, second):
        return verdict
    return Verdict(
        TrialStatus.UNREPEATABLE,
        f"outputs differ after {where}",
        verdict.max_abs_error,
        verdict.relative_rms_error,
    )


def build_on_poison(
    template: KernelTemplate, problem: Problem, config: Config, inputs: Any
) -> Launcher:
    """Builds a launcher whose uninitialised scratch memory holds NaN."""
    with _poisoned_allocations():
        return template.build(problem, config, inputs)


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """Lets ``torch.empty`` fill with NaN, or the largest integer, inside the block.

    That is what torch does in deterministic mode, unless told not to.
    """
    import torch

    # Not use_deterministic_algorithms, which would import all of torch's compiler.
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
