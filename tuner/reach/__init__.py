"""What calls of an operation can reach: the problems they look up, the kernels they launch.

A call asks for buckets, not for the problem of a workload, and one config compiles to several
kernels by what the tensors are. An operation says so in a module of its name in this folder, with
``problems`` and ``specs``; without one, it looks up what it is given and launches what its template
names.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from ...kernels.base import KernelSpec, Problem
from ...kernels.device import DeviceSpec
from ...kernels.registry import template
from ..explain import LookupResult
from ..snapshot import Snapshot

__all__ = ["reached_problems", "reached_specs"]


def reached_problems(
    problems: Iterable[Problem], device: DeviceSpec, snapshot: Snapshot
) -> tuple[Problem, ...]:
    """The problems, and those that calls with their shapes look up; each once, in order."""
    found: dict[Problem, None] = {}
    for problem in problems:
        found[problem] = None
        module = _module_of(problem.op)
        if module is not None:
            found |= dict.fromkeys(module.problems(problem, device, snapshot))
    return tuple(found)


def reached_specs(result: LookupResult) -> tuple[KernelSpec, ...]:
    """The kernels that calls answered with this config launch, whatever they ask of the output.

    None of a library's: it compiles them by itself, on the GPU.
    """
    chosen = template(result.op, result.template)
    if chosen.is_external:
        return ()
    module = _module_of(result.op)
    specs: tuple[KernelSpec, ...] | None = module.specs(result) if module is not None else None
    if specs is None:
        specs = chosen.kernel_specs(result.problem, result.config)
    return specs


def _module_of(op: str) -> ModuleType | None:
    name = f"{__name__}.{op}"
    return import_module(name) if op.isidentifier() and find_spec(name) is not None else None
