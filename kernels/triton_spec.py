"""One specialised Triton kernel: cross-compiled for any architecture, or loaded to be launched.

The same specification serves prediction (no GPU), the compile pool and dispatch, so what was
judged is what runs. The arguments' specialisation is stated, not derived from a call: only
divisibility by 16, never equality to 1, so that one binary serves every batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from .base import CompiledBinary

__all__ = ["BoundTritonKernel", "TritonKernelSpec", "eviction_policy"]

WARP_SIZE = 32


def eviction_policy(name: str) -> str:
    """The policy as ``tl.load`` takes it: Triton 3.6 and 3.7 know the normal one only as none."""
    return "" if name == "evict_normal" else name


@dataclass(frozen=True)
class TritonKernelSpec:
    """What ``triton.compile`` needs for one kernel. Picklable: the function goes by name."""

    module: str
    """Module that holds the ``@triton.jit`` function."""
    name: str
    """Name of the function."""
    signature: Mapping[str, str] = field(hash=False)
    """Triton type of every run-time argument, in order: ``*bf16``, ``i32``, ``i64``, ``fp32``."""
    constexprs: Mapping[str, Any] = field(hash=False)
    """Value of every compile-time argument, in order; they follow the run-time arguments."""
    aligned: frozenset[str]
    """Arguments that are multiples of 16 (pointers: bytes; integers: value)."""
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    """Upper bound of registers a thread; None leaves it to the compiler."""
    launch_pdl: bool = False
    """Whether it may start while the launch before it still runs (the kernel waits inside)."""

    def _function(self) -> Any:
        return getattr(import_module(self.module), self.name)

    def _compile(self, arch: int) -> Any:
        function = self._function()
        names = [*self.signature, *self.constexprs]
        assert names == list(function.arg_names), f"{self.name} takes {function.arg_names}"
        source = ASTSource(
            function,
            signature={**self.signature, **dict.fromkeys(self.constexprs, "constexpr")},
            constexprs={(names.index(name),): value for name, value in self.constexprs.items()},
            attrs={
                (names.index(name),): [["tt.divisibility", 16]] for name in sorted(self.aligned)
            },
        )
        options: dict[str, Any] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            # Stated because the default changes with Triton 3.10, and with it every last bit.
            "enable_fp_fusion": True,
        }
        if self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        if self.launch_pdl:
            options["launch_pdl"] = True
        return triton.compile(source, target=GPUTarget("cuda", arch, WARP_SIZE), options=options)

    def compile(self, arch: int) -> CompiledBinary:
        """Compiles for ``arch`` (90, 100, ...); Triton's disk cache makes a second call cheap."""
        compiled = self._compile(arch)
        metadata = compiled.metadata
        return CompiledBinary(
            kernel=self.name,
            cubin=compiled.asm["cubin"],
            threads_per_block=metadata.num_warps * WARP_SIZE,
            smem_bytes=metadata.shared,
            tmem_columns=getattr(metadata, "tmem_size", None) or 0,
        )

    def bind(self, arch: int) -> BoundTritonKernel:
        """The kernel ready to launch on the current device, which is of ``arch``.

        Under Triton's interpreter nothing is compiled.
        """
        function = self._function()
        constants = tuple(self.constexprs.values())
        if isinstance(function, InterpretedFunction):
            return BoundTritonKernel(lambda grid: function[grid], constants)
        return BoundTritonKernel(self._compile(arch).__getitem__, constants)


@dataclass(frozen=True)
class BoundTritonKernel:
    """A loaded kernel; call it with a grid and the run-time arguments."""

    select_grid: Callable[[tuple[int, int, int]], Callable[..., Any]]
    constants: tuple[Any, ...]

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Enqueues one launch on the current stream."""
        self.select_grid(grid)(*args, *self.constants)
