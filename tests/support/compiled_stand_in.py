"""Compiled kernels that only write down what they are launched with, so that calls need no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
from tilescout.kernels.triton_spec import BoundTritonKernel, TritonKernelSpec
from triton.compiler import CompiledKernel

MADE_BY_CALLS = (
    *("k_scale", "v_scale", "gate", "beta", "a_log", "dt_bias", "state_in", "initial_state"),
    *("q_tensor_scale", "k_tensor_scale", "v_tensor_scale"),
)
"""Arguments of kernels that calls make or convert where they are not given as kernels read them."""


@dataclass(frozen=True)
class Launched:
    """One launch: which kernel, how, with which numbers and addresses; run-time ones only."""

    spec: TritonKernelSpec
    constexprs: tuple[tuple[str, Any], ...]
    signature: tuple[tuple[str, str], ...]
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: dict[str, int]
    """The first bits at the addresses that ``MADE_BY_CALLS`` names."""


@dataclass
class Launches:
    """What was enqueued, in order, and by which way."""

    all: list[Launched] = field(default_factory=list)
    num_long: int = 0
    """Launches through ``kernel[grid]``, as launchers do."""

    def take(self) -> list[Launched]:
        """What was enqueued since the last time."""
        taken, self.all = self.all, []
        return taken

    def add(self, spec: TritonKernelSpec, grid: tuple[int, int, int], args: Any) -> None:
        num_args = len(spec.signature)
        assert args[num_args:] in ((), tuple(spec.constexprs.values()))
        plain = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args[:num_args])
        constexprs = tuple(spec.constexprs.items())
        constants = {
            name: ctypes.c_uint32.from_address(value).value
            for name, value in zip(spec.signature, plain, strict=True)
            if name in MADE_BY_CALLS and spec.signature[name][0] == "*" and value
        }
        signature = tuple(spec.signature.items())
        self.all.append(Launched(spec, constexprs, signature, grid, plain, constants))


class _Run:
    """Stands in for Triton's launcher object."""

    gsan_enabled = False
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations = kernel_signature = ()

    def __init__(self, enqueue: Callable[..., None]) -> None:
        self._enqueue = enqueue

    def __call__(self, *given: Any) -> None:
        grid, args = given[:3], given[9:]
        self._enqueue(grid, args)

    def launch(self, *given: Any) -> None:
        assert len(given) == 16
        self._enqueue(given[:3], given[15])


class _Kernel(CompiledKernel):
    def __init__(self, spec: TritonKernelSpec, launches: Launches) -> None:
        self.module = None
        self.function, self.packed_metadata = 1, (4, 1, 0)
        self._spec, self._launches = spec, launches
        self._run = _Run(lambda grid, args: launches.add(spec, grid, args))

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def runner(*args: Any) -> None:
            self._launches.num_long += 1
            self._launches.add(self._spec, grid, args)

        return runner


def install(monkeypatch: pytest.MonkeyPatch, *, version: str = triton.__version__) -> Launches:
    """Every kernel that is bound from now on is a stand-in; tensors on the CPU are accepted.

    Args:
        monkeypatch: Takes it back.
        version: Of Triton: which of the two ways a prepared call takes to a kernel.
    """
    launches = Launches()

    def bind(spec: TritonKernelSpec, arch: int) -> BoundTritonKernel:
        del arch
        return BoundTritonKernel(
            _Kernel(spec, launches).__getitem__, tuple(spec.constexprs.values())
        )

    monkeypatch.setattr(TritonKernelSpec, "bind", bind)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(triton, "__version__", version)
    return launches
