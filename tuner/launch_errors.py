"""What building or launching a config may raise, and which status each error is.

Errors outside ``failures()``, a ``TypeError`` say, are mistakes in a template's own code; they are
not caught, so that they surface.
"""

from __future__ import annotations

from .records import TrialStatus

__all__ = ["failures", "is_out_of_memory", "status_of"]


def failures() -> tuple[type[Exception], ...]:
    """The exceptions by which torch, Triton and TileLang report that a config failed."""
    from triton.errors import TritonError

    return (RuntimeError, MemoryError, TritonError)


def status_of(error: Exception) -> TrialStatus:
    """The status of a config that raised one of ``failures()``."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    if is_out_of_memory(error) or isinstance(error, OutOfResources):
        return TrialStatus.OUT_OF_RESOURCES
    if isinstance(error, CompilationError):
        return TrialStatus.COMPILE_ERROR
    return TrialStatus.RUNTIME_ERROR


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device's or the host's memory ran out; the process can go on."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError)
