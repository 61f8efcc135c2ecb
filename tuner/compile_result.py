"""What a compiler made of a kernel, or of all kernels of a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .records import BinaryFacts, TrialStatus

__all__ = ["CompileResult", "joined"]


@dataclass(frozen=True)
class CompileResult:
    """What the compiler made of a config."""

    status: TrialStatus
    """ok, compile_error, out_of_resources, timeout or crashed."""
    reason: str = ""
    facts: tuple[BinaryFacts, ...] = ()
    """One a kernel, in the order of ``KernelTemplate.kernel_specs``; empty unless ok and asked."""
    compile_s: float = 0.0
    """Compiler's time, without that of kernels that another config had compiled."""
    digest: str | None = None
    """Equal for configs whose kernels are equal bit for bit; None without device code."""

    def at_no_cost(self) -> CompileResult:
        """The same, found without a compiler."""
        return replace(self, compile_s=0.0)


def joined(kernels: Sequence[CompileResult]) -> CompileResult:
    """What became of a config from what became of its kernels: the first that failed, or all."""
    compile_s = sum(kernel.compile_s for kernel in kernels)
    for kernel in kernels:
        if kernel.status is not TrialStatus.OK:
            return replace(kernel, facts=(), digest=None, compile_s=compile_s)
    facts = tuple(fact for kernel in kernels for fact in kernel.facts)
    digests = [kernel.digest for kernel in kernels]
    known = [digest for digest in digests if digest is not None]
    digest = " ".join(known) if known and len(known) == len(digests) else None
    return CompileResult(TrialStatus.OK, "", facts, compile_s, digest)
