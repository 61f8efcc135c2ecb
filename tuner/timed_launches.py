"""What is launched to time a config: the whole operation, or one part of it, on every copy.

Each copy of the data has launches of its own, so that going round them finds the L2 cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ..kernels.base import Config, KernelTemplate, Operation, PartwiseLauncher, Problem
from .timers import Call
from .validate import build_on_poison

__all__ = ["Copy", "TimedLaunches", "part_launches", "whole_launches"]

_MAX_LAUNCHERS = 16
"""Launchers of one config; with more copies than this, copies share a launcher and its scratch."""
_MAX_PART_COPIES = 64
"""Copies on which a part is timed: each needs scratch of its own, which holds what comes before."""


@dataclass
class Copy:
    """Inputs with outputs of their own."""

    inputs: Any
    outputs: Any


@dataclass(frozen=True)
class TimedLaunches:
    """Launches of a config to be timed, and what they have to leave in the first copy."""

    calls: list[Call]
    """One a copy."""
    first: Any
    """Outputs of one lone whole launch on the inputs of the first copy."""
    finish: Call
    """Makes the outputs of the first copy what the timed launches lead to."""


@dataclass(frozen=True)
class _Built:
    template: KernelTemplate
    problem: Problem
    config: Config

    def launcher(self, copy: Copy) -> Any:
        return build_on_poison(self.template, self.problem, self.config, copy.inputs)


def whole_launches(
    operation: Operation,
    template: KernelTemplate,
    problem: Problem,
    config: Config,
    copies: Sequence[Copy],
) -> TimedLaunches:
    """Launches of the whole operation."""
    built = _Built(template, problem, config)
    if template.is_external:
        return _library_launches(operation, built, copies)
    launchers = [built.launcher(copy) for copy in copies[:_MAX_LAUNCHERS]]
    calls: list[Call] = [
        partial(launchers[i % len(launchers)].launch, copy.inputs, copy.outputs)
        for i, copy in enumerate(copies)
    ]
    first = operation.make_outputs(problem, copies[0].inputs)
    launchers[0].launch(copies[0].inputs, first)
    return TimedLaunches(calls, first, finish=lambda: None)


def _library_launches(operation: Operation, built: _Built, copies: Sequence[Copy]) -> TimedLaunches:
    """Launches of a library, on outputs of its own.

    It may put memory of its own in the place of outputs, where captured launches of other configs
    still write. One that works in place is timed so; what it leaves there is another problem's
    answer, so the first copy gets its outputs from one more launch.
    """
    problem, given = built.problem, copies[0]
    is_in_place = built.template.is_in_place and operation.make_in_place is not None
    own = [_own_copy(operation, problem, copy, is_in_place=is_in_place) for copy in copies]
    launchers = [built.launcher(copy) for copy in own[:_MAX_LAUNCHERS]]
    calls: list[Call] = [
        partial(launchers[i % len(launchers)].launch, copy.inputs, copy.outputs)
        for i, copy in enumerate(own)
    ]

    def lone_outputs() -> Any:
        outputs = operation.make_outputs(problem, given.inputs)
        launchers[0].launch(given.inputs, outputs)
        return outputs

    def finish() -> None:
        given.outputs = lone_outputs() if is_in_place else own[0].outputs

    return TimedLaunches(calls, lone_outputs(), finish)


def _own_copy(operation: Operation, problem: Problem, copy: Copy, *, is_in_place: bool) -> Copy:
    if is_in_place:
        assert operation.make_in_place is not None
        return Copy(*operation.make_in_place(problem, copy.inputs))
    return Copy(copy.inputs, operation.make_outputs(problem, copy.inputs))


def part_launches(
    operation: Operation,
    template: KernelTemplate,
    problem: Problem,
    config: Config,
    copies: Sequence[Copy],
    *,
    part: str,
) -> TimedLaunches:
    """Launches of one part, on what the parts before it leave; the other parts run once.

    The copies are made ready part by part, on scratch and outputs of NaN, while ``first`` comes
    from a launcher that launches the whole: a part that does not do its work shows.
    """
    names = [found.name for found in template.parts(problem, config)]
    assert part in names, f"{template.op}/{template.name} has parts {names}, not {part!r}"
    built = _Built(template, problem, config)
    first = operation.make_outputs(problem, copies[0].inputs)
    built.launcher(copies[0]).launch(copies[0].inputs, first)
    copies[0].outputs = operation.make_outputs(problem, copies[0].inputs)
    launch_of: list[Callable[[str], None]] = []
    num_variants = problem.num_input_variants
    num_copies = max(1, _MAX_PART_COPIES // num_variants) * num_variants
    for copy in copies[:num_copies]:
        launcher = cast("PartwiseLauncher", built.launcher(copy))
        launch_of.append(partial(_launch, launcher, copy))
        for name in names:
            launch_of[-1](name)

    def finish() -> None:
        for name in names[names.index(part) + 1 :]:
            launch_of[0](name)

    return TimedLaunches([partial(launch, part) for launch in launch_of], first, finish)


def _launch(launcher: PartwiseLauncher, copy: Copy, part: str) -> None:
    launcher.launch_part(part, copy.inputs, copy.outputs)
