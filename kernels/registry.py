"""Name -> operation and template, loaded on first use.

Adding an operation adds one line to ``_OPERATIONS``; a user's own comes in through ``register``.
Importing this module needs neither a GPU nor a compiler; loading a template imports its language.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ..errors import UnknownNameError, UnsupportedError, UsageError
from .base import KernelTemplate, Operation, Problem
from .device import DeviceSpec

__all__ = [
    "module_of",
    "operation",
    "operation_names",
    "register",
    "supported_templates",
    "template",
]

_OPERATIONS = {
    "fp4_attention_bwd": "tilescout.kernels.fp4_attention_bwd",
    "fp4_attention_fwd": "tilescout.kernels.fp4_attention",
    "gdn_chunk_fwd": "tilescout.kernels.gdn_chunk_fwd",
    "gdn_decode": "tilescout.kernels.gdn_decode",
    "paged_decode": "tilescout.kernels.paged_decode",
}


def register(name: str, module: str) -> None:
    """Makes the operation that ``module`` exports as OPERATION known under ``name``.

    A worker process registers what its parent had registered, so ``module`` must be importable
    there. Registering the same pair again does nothing.
    """
    if _OPERATIONS.get(name, module) != module:
        raise UsageError(f"operation {name!r} is already provided by {_OPERATIONS[name]!r}")
    _OPERATIONS[name] = module


def module_of(name: str) -> str:
    """The module that provides the operation: what a worker process must register."""
    return _OPERATIONS[name]


def operation_names() -> tuple[str, ...]:
    """Names of all operations, sorted."""
    return tuple(sorted(_OPERATIONS))


@cache
def operation(name: str) -> Operation:
    """The operation of that name.

    Raises:
        UnknownNameError: no such operation.
    """
    if name not in _OPERATIONS:
        raise UnknownNameError("operation", name, _OPERATIONS)
    loaded = import_module(_OPERATIONS[name]).OPERATION
    assert isinstance(loaded, Operation)
    return loaded


@cache
def template(op: str, name: str) -> KernelTemplate:
    """The template ``name`` of operation ``op``.

    Raises:
        UnknownNameError: no such operation or template.
    """
    names = operation(op).template_names
    if name not in names:
        raise UnknownNameError(f"template of {op}", name, names)
    return operation(op).load_template(name)


def supported_templates(problem: Problem, device: DeviceSpec) -> tuple[KernelTemplate, ...]:
    """The templates that can serve the problem on the device.

    Raises:
        UnsupportedError: none can; the message has each template's reason.
    """
    candidates = [template(problem.op, name) for name in operation(problem.op).template_names]
    reasons = {candidate.name: candidate.supports(problem, device) for candidate in candidates}
    supported = tuple(c for c in candidates if reasons[c.name] is None)
    if not supported:
        listing = "; ".join(f"{problem.op}/{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(
            f"no template of {problem.op} supports the problem {problem} on {device.sku}: {listing}"
        )
    return supported
