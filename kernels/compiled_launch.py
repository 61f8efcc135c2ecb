"""What a launcher enqueues for given tensors, written down once and enqueued again for others.

A launcher computes grids and arguments anew at every launch. For tensors that differ in their
addresses only it computes the same again: here its launches are recorded as grids, numbers and
places of addresses, and then go to the compiled kernels without it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.compiler import CompiledKernel

from .triton_spec import BoundTritonKernel

__all__ = [
    "Address",
    "BoundLaunch",
    "RecordedLaunch",
    "bound_launch",
    "has_launch_hooks",
    "record",
    "without_offsets",
]

_runtime = knobs.runtime
_C_LAUNCHER_VERSIONS = ("3.9.",)
"""Triton versions whose C function takes its arguments as ``_c_launch`` gives them (read off the
installed 3.9.0; others go through the launcher object, which takes the same everywhere)."""


@dataclass(frozen=True)
class Address:
    """An argument of a kernel: so many bytes after the address of one of the call's tensors."""

    index: int
    offset_bytes: int = 0


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch of a compiled kernel."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    """Run-time arguments: numbers, an ``Address``, or scratch memory."""
    constants: tuple[Any, ...]
    """Values of the compile-time arguments, which follow."""


@dataclass(frozen=True)
class BoundLaunch:
    """One launch of a compiled kernel on one stream, which lacks only addresses."""

    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    constants: tuple[Any, ...]
    enqueue: Callable[[tuple[Any, ...]], object]
    """Takes what ``arguments`` gives."""

    def arguments(self, addresses: Sequence[int]) -> tuple[Any, ...]:
        """The kernel's run-time arguments for these addresses of the call's tensors."""
        return self.pick((*addresses, *self.constants))


class _NotRecordableError(Exception):
    """What a launcher does cannot be written down."""


def record(
    launcher: Any,
    inputs: Any,
    outputs: Any,
    addresses: Mapping[int, Address],
    constants: Mapping[int, torch.Tensor],
) -> tuple[RecordedLaunch, ...] | None:
    """The launches of ``launcher.launch(inputs, outputs)``; nothing is enqueued.

    None where they are not launches of compiled Triton kernels that the launcher holds, or depend
    on more than the addresses: a tensor that is neither known nor scratch of the launcher, or
    computed with torch.

    Args:
        launcher: It has launched for tensors like these before, so that all is compiled.
        inputs: Tensors of which no two roles share one object.
        outputs: Likewise.
        addresses: What each of these tensors (by ``id``) is to the call.
        constants: Tensors among them (by ``id``) that every such call reads.
    """
    launches: list[RecordedLaunch] = []
    scratch = dict(constants)
    try:
        shadow = copy.copy(launcher)
        found: list[_RecordingKernel] = []
        for name, value in vars(launcher).items():
            setattr(shadow, name, _recording(value, launches, scratch, found))
        if not found:
            return None  # it would launch by means that are not seen here
        views = _Views(addresses)
        with _nothing_is_launched(), views:
            shadow.launch(inputs, outputs)
        return tuple(
            RecordedLaunch(
                launch.kernel,
                launch.grid,
                tuple(_argument(value, views.addresses, scratch) for value in launch.args),
                launch.constants,
            )
            for launch in launches
        )
    except _NotRecordableError:
        return None


def without_offsets(
    launches: Sequence[RecordedLaunch], num_addresses: int
) -> tuple[tuple[RecordedLaunch, ...], tuple[Address, ...]]:
    """The launches with every address behind an offset as one of its own, and those addresses.

    They follow the ``num_addresses`` of the tensors, in this order.
    """
    places: dict[Address, Address] = {}
    for launch in launches:
        for value in launch.args:
            if isinstance(value, Address) and value.offset_bytes:
                places.setdefault(value, Address(num_addresses + len(places)))
    flat = tuple(
        RecordedLaunch(
            launch.kernel,
            launch.grid,
            tuple(places.get(v, v) if isinstance(v, Address) else v for v in launch.args),
            launch.constants,
        )
        for launch in launches
    )
    return flat, tuple(places)


def bound_launch(launch: RecordedLaunch, num_addresses: int, stream: int) -> BoundLaunch:
    """The launch for other addresses, in as few steps as the version of Triton allows.

    Scratch memory must outlive it, as must the device's context.
    """
    order, constants = _order(launch, num_addresses)
    pick = itemgetter(*order)
    run, kernel = launch.kernel.run, launch.kernel
    if _has_known_c_launcher(run):
        return BoundLaunch(pick, constants, _c_launch(launch, run, stream))
    head = (*launch.grid, stream, kernel.function, kernel.packed_metadata, None, None, None)
    compile_time = launch.constants

    def enqueue(arguments: tuple[Any, ...]) -> None:
        run(*head, *arguments, *compile_time)

    return BoundLaunch(pick, constants, enqueue)


def has_launch_hooks() -> bool:
    """Whether a profiler wants to see launches: those go the long way, which calls its hooks."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # a plain function in the place of Triton's chain of them
        return enter is not None or leave is not None


def _c_launch(launch: RecordedLaunch, run: Any, stream: int) -> Callable[[tuple[Any, ...]], object]:
    """The C function behind the launcher object, which allocates no scratch for this kernel."""
    return partial(
        run.launch,
        *launch.grid,
        stream,
        launch.kernel.function,
        run.launch_cooperative_grid,
        run.launch_pdl,
        launch.kernel.packed_metadata,
        None,  # metadata for the hooks
        None,
        None,
        None,  # Triton's own scratch, of both kinds
        None,
        # Compile-time arguments come last and are not passed on: neither need their annotations be.
        run.arg_annotations[: len(launch.args)],
        run.kernel_signature,
    )


def _has_known_c_launcher(run: Any) -> bool:
    names = ("arg_annotations", "kernel_signature", "launch_cooperative_grid", "launch_pdl")
    return (
        triton.__version__.startswith(_C_LAUNCHER_VERSIONS)
        and all(hasattr(run, name) for name in names)
        # A Python function around it takes tensor descriptors apart.
        and getattr(run.launch, "__closure__", None) is None
        and not getattr(run, "gsan_enabled", True)
        and run.global_scratch_size == 0
        and run.profile_scratch_size == 0
    )


def _order(launch: RecordedLaunch, num_addresses: int) -> tuple[list[int], tuple[Any, ...]]:
    """Where each argument stands in the addresses followed by the constants, and the constants."""
    order: list[int] = []
    constants: list[Any] = []
    for value in launch.args:
        if isinstance(value, Address):
            assert value.offset_bytes == 0, "an offset has an address of its own"
            order.append(value.index)
        else:
            order.append(num_addresses + len(constants))
            constants.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
    return order, tuple(constants)


@dataclass(frozen=True)
class _RecordingKernel:
    """Stands in for a kernel: writes launches down."""

    kernel: CompiledKernel
    constants: tuple[Any, ...]
    launches: list[RecordedLaunch]

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        self.launches.append(RecordedLaunch(self.kernel, grid, args, self.constants))


class _Frozen(dict[Any, Any]):
    """Kernels by traits: what is not there would be compiled and launched, so it is an error."""

    def __setitem__(self, key: object, value: object) -> None:
        raise _NotRecordableError


def _recording(
    value: Any,
    launches: list[RecordedLaunch],
    scratch: dict[int, torch.Tensor],
    found: list[_RecordingKernel],
) -> Any:
    """The attribute of a launcher with its kernels replaced; collects these and its scratch."""
    if isinstance(value, BoundTritonKernel):
        kernel = getattr(value.select_grid, "__self__", None)
        if not isinstance(kernel, CompiledKernel):
            raise _NotRecordableError
        found.append(_RecordingKernel(kernel, value.constants, launches))
        return found[-1]
    if isinstance(value, torch.Tensor):
        scratch[id(value)] = value
        return value
    if isinstance(value, dict):
        return _Frozen({k: _recording(v, launches, scratch, found) for k, v in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_recording(v, launches, scratch, found) for v in value)
    if hasattr(value, "launch") or type(value).__name__.startswith("Bound"):
        raise _NotRecordableError  # kernels of another kind, or another launcher inside
    return value


def _argument(value: Any, addresses: Mapping[int, Address], scratch: Mapping[int, Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    found = addresses.get(id(value))
    if found is None and id(value) not in scratch:
        raise _NotRecordableError
    return value if found is None else found


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows views of the call's tensors; anything else that torch computes is not recordable."""

    def __init__(self, addresses: Mapping[int, Address]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses = dict(addresses)
        self._held: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        source = args[0] if args else None
        if not func.is_view or not isinstance(source, torch.Tensor):
            raise _NotRecordableError
        result = func(*args, **(kwargs or {}))
        known = self.addresses.get(id(source))
        if known is None or not isinstance(result, torch.Tensor):
            raise _NotRecordableError
        offset = known.offset_bytes + result.data_ptr() - source.data_ptr()
        self.addresses[id(result)] = Address(known.index, offset)
        self._held.append(result)  # no other tensor can take its identity
        return result


@contextmanager
def _nothing_is_launched() -> Iterator[None]:
    """A launch by this thread that nobody recorded is refused before it is enqueued."""
    thread = threading.get_ident()

    def refuse(*_: object) -> None:
        if threading.get_ident() == thread:
            raise _NotRecordableError

    hook = _runtime.launch_enter_hook
    if not hasattr(hook, "add"):
        raise _NotRecordableError
    hook.add(refuse)
    try:
        yield
    finally:
        hook.remove(refuse)
