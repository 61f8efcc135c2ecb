"""Takes over kernels that ``@triton.autotune`` decorates, in place: one, or all of a package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...errors import UsageError
from .kernel import AdoptedKernel, OnMiss
from .live_evaluator import Reference

__all__ = ["Adoption", "adopt"]

_ATTRIBUTE = "_tilescout_adopted"


@dataclass(frozen=True)
class Adoption:
    """Which kernels were taken over, and which not."""

    kernels: tuple[AdoptedKernel, ...]
    refused: tuple[tuple[str, str], ...]
    """(kernel, reason)."""


def adopt(
    target: Any, *, reference: Reference | None = None, on_miss: OnMiss = "default"
) -> Adoption:
    """Makes autotuned kernels look their configs up; their callers do not change.

    Args:
        target: A kernel that ``@triton.autotune`` decorates, a module, or the name of a package:
            then every kernel in the modules of it that are loaded.
        reference: Says what is right while tuning, see ``AdoptedKernel``; for one kernel only.
        on_miss: What happens where nothing is known, see ``AdoptedKernel``.

    Raises:
        UsageError: the target holds no such kernel, or a reference is given for several.
    """
    found = dict(_named(target))
    if not found:
        raise UsageError(
            f"{_describe(target)} holds no kernel that @triton.autotune decorates: give the "
            "kernel, or a module or package that is imported"
        )
    if reference is not None and len(found) > 1:
        raise UsageError(
            f"a reference is of one kernel, but {_describe(target)} holds {len(found)}"
        )
    kernels: list[AdoptedKernel] = []
    refused: list[tuple[str, str]] = []
    for autotuner, name in found.items():
        reason = _why_not(autotuner)
        if reason is not None:
            refused.append((name, reason))
            continue
        kernels.append(_taken_over(autotuner, reference, on_miss))
    return Adoption(tuple(kernels), tuple(refused))


def _taken_over(autotuner: Any, reference: Reference | None, on_miss: OnMiss) -> AdoptedKernel:
    known = getattr(autotuner, _ATTRIBUTE, None)
    if known is not None:
        # Adopted again: the last word counts.
        known.reference, known.on_miss = reference or known.reference, on_miss
        assert isinstance(known, AdoptedKernel)
        return known
    kernel = AdoptedKernel(autotuner, reference=reference, on_miss=on_miss)
    # ``kernel[grid](...)`` ends in ``self.run``: replaced on the object, whatever its class.
    autotuner.run = kernel.run
    setattr(autotuner, _ATTRIBUTE, kernel)
    return kernel


def _why_not(autotuner: Any) -> str | None:
    if len(autotuner.configs) < 2:
        return "it has one config: there is nothing to choose"
    return None


def _named(target: Any) -> Iterator[tuple[Any, str]]:
    """Autotuners with a name each, once."""
    autotuner = _autotuner_under(target)
    if autotuner is not None:
        yield autotuner, autotuner.base_fn.__qualname__
        return
    for module in _modules(target):
        for name, value in sorted(vars(module).items()):
            autotuner = _autotuner_under(value)
            if autotuner is not None:
                yield autotuner, f"{module.__name__}.{name}"


def _modules(target: Any) -> list[ModuleType]:
    if isinstance(target, ModuleType):
        return [target]
    if not isinstance(target, str):
        return []
    names = sorted(n for n in sys.modules if n == target or n.startswith(f"{target}."))
    return [sys.modules[n] for n in names if isinstance(sys.modules[n], ModuleType)]


def _autotuner_under(value: Any) -> Any | None:
    """The autotuner that a kernel is or wraps (``@triton.heuristics`` may be outside)."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    while isinstance(value, KernelInterface):
        if isinstance(value, Autotuner):
            return value
        value = getattr(value, "fn", None)
    return None


def _describe(target: Any) -> str:
    if isinstance(target, ModuleType):
        return f"module {target.__name__!r}"
    return f"package {target!r}" if isinstance(target, str) else repr(target)
