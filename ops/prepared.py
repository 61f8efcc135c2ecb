"""Calls that were made before, launched again without checking and resolving them anew.

The first call with some arguments does all the work and leaves here what it came to: the conditions
under which the same work comes to the same, and launches that lack nothing but addresses. A later
call for which every condition holds only enqueues them. Conditions are the options (values and
types), shape, strides, dtype, device and alignment of every tensor, where outputs may not lie, the
current device and stream, the policy and the databases in force. Values of tensors are none: calls
that look at them (debug mode) are never served from here, nor is anything during a capture.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import torch

from ..kernels.compiled_launch import has_launch_hooks
from ..tuner import dispatch
from ..tuner.dispatch_policy import policy_of_context
from .debug_checks import is_debugging
from .launchers import keeps_launchers
from .prepared_launches import (
    LaunchedCall,
    PreparedLaunches,
    Role,
    prepare_launches,
    tensor_at,
)
from .tensor_guard import tensor_guard

__all__ = [
    "LaunchedCall",
    "NotPreparedError",
    "PreparedCall",
    "PreparedCalls",
    "Role",
    "only_prepared",
]

MAX_CALLS = 1024
"""Prepared calls of one function."""
_MAX_ALIKE = 8
"""Prepared calls of equal options and equal shape of the first tensor; the oldest goes."""
_MAX_SEEN = 4096

Options = tuple[object, ...]
Tensors = tuple[Any, ...]
"""A tensor or None each; what else a caller gives fits no prepared call."""
_Pick = Callable[[Tensors], tuple[Any, ...]]
_Place = tuple[int, int, bool]
"""Current device, its current stream, whether that is being captured."""
_HOST: _Place = (-1, 0, False)


class NotPreparedError(Exception):
    """A call that was to be served prepared or not at all would go the long way."""


only_prepared: ContextVar[bool] = ContextVar("tilescout_only_prepared", default=False)
"""Whether ``launch`` raises NotPreparedError where a call must go the long way."""


class PreparedCall:
    """One call, ready to be launched for tensors of the same kind."""

    # fmt: off
    __slots__ = (
        "__weakref__", "absent", "allocations", "check", "generation", "launches",
        "needs_no_grad", "nones", "options", "outputs", "place", "policy", "present",
    )
    # fmt: on

    def __init__(self, options: Options, place: _Place, generation: int) -> None:
        self.options = options
        self.place = place
        self.generation = generation
        self.policy = policy_of_context()
        self.present: _Pick = tuple
        """Of the tensor arguments those that are given, in order."""
        self.absent: _Pick = tuple
        self.nones: tuple[None, ...] = ()
        """What ``absent`` must give."""
        self.check: Callable[..., bool] = bool
        self.needs_no_grad = False
        """Whether a tensor requires grad, which is refused where autograd would record."""
        self.allocations: tuple[Callable[[], torch.Tensor], ...] = ()
        """What the function allocates; these follow the given tensors."""
        self.outputs: _Pick = tuple
        """The outputs of the function, of its arguments where it allocates none, else of the given
        and allocated tensors followed by None."""
        self.launches: PreparedLaunches | None = None

    def fits(self, tensors: Tensors) -> bool:
        """Whether the same are given, of the same kind."""
        return self.absent(tensors) == self.nones and self.check(*self.present(tensors))

    def release(self) -> None:
        """Never serves again: the launcher has another owner or is gone."""
        self.launches = None


class PreparedCalls:
    """The prepared calls of one public function."""

    def __init__(self, roles: Sequence[Role], max_calls: int = MAX_CALLS) -> None:
        """Keeps nothing yet.

        Args:
            roles: Of every argument that is or may be a tensor, in the order of ``launch``.
            max_calls: Beyond it all are forgotten together.
        """
        self._roles = tuple(roles)
        self._max_calls = max_calls
        self._lock = threading.Lock()
        self._last: PreparedCall | None = None
        self._calls: dict[Hashable, tuple[PreparedCall, ...]] = {}
        self._num_calls = 0
        self._seen: dict[Hashable, None] = {}
        self._place: Callable[[], _Place] = _host_place
        _all.add(self)

    def __len__(self) -> int:
        return self._num_calls

    def launch(self, tensors: Tensors, options: Options) -> tuple[Any, ...] | None:
        """Enqueues the call and returns its outputs, or None: it must go the long way.

        Args:
            tensors: The arguments that have roles; None where one is not given.
            options: Every other argument, and the types of those that count by type.

        Raises:
            NotPreparedError: instead, where ``only_prepared`` is set.
        """
        call = self._last
        if call is None:
            return _missed()
        place = self._place()
        given = call.present(tensors)
        try:
            is_known = (
                call.options == options
                and call.place == place
                and call.absent(tensors) == call.nones
                and call.check(*given)
            )
            if not is_known:
                call = self._search(tensors, options, place)
                if call is None:
                    return _missed()
                given = call.present(tensors)
        except (TypeError, ValueError):
            return (
                _missed()
            )  # an argument that cannot be compared or hashed is a mistake: say which
        launches = call.launches
        if (
            launches is None
            or call.generation != dispatch.generation
            or call.policy is not policy_of_context()
            or (call.needs_no_grad and torch.is_grad_enabled())
            or is_debugging()
            or keeps_launchers()
            or has_launch_hooks()
        ):
            return _missed()
        if not call.allocations:
            return call.outputs(tensors) if launches.enqueue(given) else _missed()
        given = (*given, *[allocate() for allocate in call.allocations])
        return call.outputs((*given, None)) if launches.enqueue(given) else _missed()

    def _search(self, tensors: Tensors, options: Options, place: _Place) -> PreparedCall | None:
        for call in self._calls.get(_key_of(tensors, options, place), ()):
            if call.fits(tensors):
                self._last = call
                return call
        return None

    def keep(self, tensors: Tensors, options: Options, launched: LaunchedCall) -> None:
        """Prepares a call that was launched the long way, if it is the second one of its kind.

        Args:
            tensors: As ``launch`` took them.
            options: Likewise.
            launched: What it came to.
        """
        first = tensors[0] if tensors[0] is not None else tensors[1]
        assert first is not None
        if is_debugging() or keeps_launchers():
            return
        self._place = _gpu_place if first.is_cuda else _host_place
        place = self._place()
        if place[2] or (first.is_cuda and first.device.index != place[0]):
            return
        key = _key_of(tensors, options, place)
        if not self._is_second(key, tensors):
            return
        call = self._prepared(tensors, options, launched, place)
        if call is None:
            return
        with self._lock:
            if self._num_calls >= self._max_calls:
                self._calls.clear()
                self._num_calls = 0
            before = self._calls.get(key, ())
            self._calls[key] = (call, *before)[:_MAX_ALIKE]
            self._num_calls += len(self._calls[key]) - len(before)
            self._last = call
        launched.owned.serves(call)

    def forget(self) -> None:
        """Forgets every call, seen or prepared."""
        with self._lock:
            self._last = None
            self._calls.clear()
            self._seen.clear()
            self._num_calls = 0

    def renew_lock(self) -> None:
        """For a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def _is_second(self, key: Hashable, tensors: Tensors) -> bool:
        """Shapes that change with every call would be prepared in vain."""
        kind = (key, tuple([None if t is None else (t.shape, t.stride()) for t in tensors]))
        with self._lock:
            if kind in self._seen:
                return True
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[kind] = None
            return False

    def _prepared(
        self, tensors: Tensors, options: Options, launched: LaunchedCall, place: _Place
    ) -> PreparedCall | None:
        call = PreparedCall(options, place, launched.generation)
        present = [i for i, tensor in enumerate(tensors) if tensor is not None]
        absent = [i for i, tensor in enumerate(tensors) if tensor is None]
        call.present, call.absent = _picker(present), _picker(absent)
        call.nones = (None,) * len(absent)
        given = [tensor for tensor in tensors if tensor is not None]
        call.check = tensor_guard(given)
        call.needs_no_grad = any(tensor.requires_grad for tensor in given)
        if not call.fits(tensors):
            return None  # under a dispatch mode nothing fits: it would have to see the call
        places = {role: place for place, role in enumerate(present)}
        allocations = []
        for i, role in enumerate(self._roles):
            if role.is_output and tensors[i] is None:
                made = tensor_at(launched, role.paths[0])
                if made is not None:
                    places[i] = len(given)
                    given.append(made)
                    allocations.append(_allocation_like(made))
        call.allocations = tuple(allocations)
        outputs = [i for i, role in enumerate(self._roles) if role.is_output]
        if allocations:
            outputs = [places.get(i, len(given)) for i in outputs]
        call.outputs = _picker(outputs)
        call.launches = prepare_launches(self._roles, places, given, launched, place[1])
        return call if call.launches is not None else None


def _missed() -> tuple[Any, ...] | None:
    if only_prepared.get():
        raise NotPreparedError
    return None


_all: weakref.WeakSet[PreparedCalls] = weakref.WeakSet()


def _renew_locks() -> None:
    for calls in _all:
        calls.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def _picker(indices: Sequence[int]) -> _Pick:
    """The elements at these places, as a tuple also where there is one or none.

    One getter in C: neighbours are a slice, which is a tuple of any length.
    """
    first = indices[0] if indices else 0
    if list(indices) == list(range(first, first + len(indices))):
        return itemgetter(slice(first, first + len(indices)))
    return itemgetter(*indices)


def _key_of(tensors: Tensors, options: Options, place: _Place) -> Hashable:
    first = tensors[0] if tensors[0] is not None else tensors[1]
    return (options, place, None if first is None else first.shape)


def _allocation_like(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _host_place() -> _Place:
    return _HOST


# A build of torch without CUDA has none of them, and then no tensor is on a GPU.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def _gpu_place() -> _Place:
    device = _current_device()
    return device, _current_stream(device), _is_capturing()
