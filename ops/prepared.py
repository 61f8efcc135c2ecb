"""Calls that were made before, launched again without checking and resolving them anew.

The first call with some arguments does all the work and leaves here what it came to: the conditions
under which the same work comes to the same, and launches that lack nothing but addresses. A later
call for which every condition holds only enqueues them. Conditions are which arguments are given
and how, the options (values and types), shape, strides, dtype, device and alignment of every
tensor, where outputs may lie, the current device and stream, the policy and the databases in force.
Values of tensors are none: calls that look at them (debug mode) are never served from here, nor is
anything during a capture.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .call_form import PLAIN, Leaves, leaves_of
from .debug_checks import is_debugging
from .launched_call import LaunchedCall, Role
from .launchers import keeps_launchers
from .prepared_call import MISSED, Place, PreparedCall, Values, spelt
from .prepared_launches import prepare_launches
from .prepared_results import result_of

__all__ = ["MISSED", "LaunchedCall", "OperatorCalls", "PreparedCall", "PreparedCalls", "Role"]

MAX_CALLS = 1024
"""Prepared calls of one function."""
_MAX_ALIKE = 8
"""Prepared calls of equal names, options and shape of the first tensor; the oldest goes."""
_MAX_SEEN = 4096

P = ParamSpec("P")
R = TypeVar("R")
_HOST: Place = (-1, 0, False)


class _HandedOver(threading.local):
    """What the function that runs in this thread came to."""

    launched: tuple[LaunchedCall, ...] = ()
    roles: Mapping[str, Role] | None = None
    """Those of the function, which tell whose it is."""
    is_awaited = False
    """Whether an operator's call waits for it, as it was spelt before the dispatcher."""


_handed_over = _HandedOver()


class PreparedCalls:
    """The prepared calls of one public function."""

    def __init__(self, roles: Mapping[str, Role], max_calls: int = MAX_CALLS) -> None:
        """Keeps nothing yet.

        Args:
            roles: Of every argument that is or may be a tensor, by its name; of elements of a
                sequence of several ``NAME[0]`` and so on, of fields of a dataclass ``NAME.FIELD``.
            max_calls: Beyond it all are forgotten together.
        """
        self._roles = roles
        self._max_calls = max_calls
        self._lock = threading.Lock()
        self._last: PreparedCall | None = None
        self._calls: dict[Hashable, tuple[PreparedCall, ...]] = {}
        self._num_calls = 0
        self._seen: dict[Hashable, None] = {}
        self._place: Callable[[], Place] = _host_place
        _all.add(self)

    def __len__(self) -> int:
        return self._num_calls

    def serve(self, function: Callable[P, R]) -> Callable[P, R]:
        """A decorator: calls that are prepared are launched, others go to the function.

        The function hands over what it launched before it returns.
        """
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_dynamo_compiling():
                return function(*args, **kwargs)
            result: Any = self.launch(args, kwargs)
            return self.run(function, names, args, kwargs) if result is MISSED else result

        return call

    def hand_over(self, *launched: LaunchedCall) -> None:
        """Leaves what the function launched, in this order, for its next calls."""
        _handed_over.launched, _handed_over.roles = launched, self._roles

    def operator(self, run: Callable[..., Any], names: Sequence[str]) -> OperatorCalls:
        """The prepared calls of an operator, which spells the function's arguments in its own way.

        Args:
            run: Its implementation, which calls the function that ``serve`` decorated.
            names: Of its arguments, in order.
        """
        return OperatorCalls(PreparedCalls(self._roles, self._max_calls), run, tuple(names))

    def run(
        self, function: Callable[..., R], names: tuple[str, ...], args: Values, kwargs: Any
    ) -> R:
        """Calls the function and prepares what it handed over, if it is the second of its kind."""
        handed = _handed_over
        handed.launched = ()
        result = function(*args, **kwargs)
        launched, handed.launched = handed.launched, ()
        if launched and handed.roles is self._roles:
            self._keep(names, args, kwargs, launched, result)
        return result

    def launch(self, args: Values, kwargs: Mapping[str, Any]) -> Any:
        """Enqueues the call and returns its result, or ``MISSED``: it must go the long way."""
        call = self._last
        if call is None:
            return MISSED
        place = self._place()
        try:
            given = call.given(args, kwargs, place)
            if given is not None:
                result = call.serve(given)
                if result is not MISSED:
                    return result
            return self._search(args, kwargs, place)
        except (TypeError, ValueError):
            # An argument that cannot be compared or hashed is a mistake: say which.
            return MISSED

    def _search(self, args: Values, kwargs: Mapping[str, Any], place: Place) -> Any:
        for call in self._calls.get(_key_of(args, kwargs, place), ()):
            given = call.given(args, kwargs, place)
            if given is not None:
                result = call.serve(given)
                if result is not MISSED:
                    self._last = call
                    return result
        return MISSED

    def _keep(
        self,
        names: tuple[str, ...],
        args: Values,
        kwargs: Mapping[str, Any],
        launched: tuple[LaunchedCall, ...],
        result: Any,
    ) -> None:
        if is_debugging() or keeps_launchers() or _get_current_dispatch_mode() is not None:
            return  # a mode would have to see every call
        ours = spelt(args, kwargs)
        leaves = leaves_of((*names[: len(args)], *ours.names), ours.values)
        if leaves is None or not leaves.tensors:
            return
        first = leaves.tensors[0][1]
        self._place = _gpu_place if first.is_cuda else _host_place
        place = self._place()
        if place[2] or (first.is_cuda and first.device.index != place[0]):
            return
        key = _key_of(args, kwargs, place)
        if not self._is_second(key, leaves):
            return
        call = self._prepared(
            PreparedCall(ours, place, leaves, launched[0].generation), leaves, launched, result
        )
        if call is None or call.given(args, kwargs, place) is None:
            return
        with self._lock:
            if self._num_calls >= self._max_calls:
                self._calls.clear()
                self._num_calls = 0
            before = self._calls.get(key, ())
            self._calls[key] = (call, *before)[:_MAX_ALIKE]
            self._num_calls += len(self._calls[key]) - len(before)
            self._last = call
        for step in launched:
            step.owned.serves(call)

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

    def _is_second(self, key: Hashable, leaves: Leaves) -> bool:
        """Shapes that change with every call would be prepared in vain."""
        kind = (key, leaves.options, tuple((t.shape, t.stride()) for _, t in leaves.tensors))
        with self._lock:
            if kind in self._seen:
                return True
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[kind] = None
            return False

    def _prepared(
        self,
        call: PreparedCall,
        leaves: Leaves,
        launched: tuple[LaunchedCall, ...],
        result: Any,
    ) -> PreparedCall | None:
        """The call with its launches and result."""
        given = dict(zip(leaves.names, (tensor for _, tensor in leaves.tensors), strict=True))
        call.result, made = result_of(result, self._roles, given, launched)
        if call.result is None:
            return None
        tensors = {**given, **made}
        launches = prepare_launches(self._roles, tensors, launched, call.place[1])
        if launches is None or not launches.fits(tuple(tensors.values())):
            return None
        call.launches = launches
        return call


@dataclass(frozen=True)
class OperatorCalls:
    """An operator's prepared calls, before the dispatcher and behind it, where it spells anew."""

    calls: PreparedCalls
    implementation: Callable[..., Any]
    names: tuple[str, ...]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The implementation, with prepared calls before it."""
        if _handed_over.is_awaited:
            return self.implementation(*args, **kwargs)
        result = self.calls.launch(args, kwargs)
        if result is MISSED:
            return self.calls.run(self.implementation, self.names, args, kwargs)
        return result

    def dispatch(self, dispatched: Callable[..., Any], args: Values, kwargs: Any) -> Any:
        """Calls the dispatcher and prepares the call as it is spelt here."""
        names = (*self.names[: len(args)], *kwargs)
        if len(args) > len(self.names) or leaves_of(names, (*args, *kwargs.values())) is None:
            return dispatched(*args, **kwargs)
        _handed_over.is_awaited = True
        try:
            return self.calls.run(dispatched, self.names, args, kwargs)
        finally:
            _handed_over.is_awaited = False


_all: weakref.WeakSet[PreparedCalls] = weakref.WeakSet()


def _renew_locks() -> None:
    for calls in _all:
        calls.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def _key_of(args: Values, kwargs: Mapping[str, Any], place: Place) -> Hashable:
    first = args[0] if args else kwargs[min(kwargs)]
    if type(first) in {tuple, list} and first:
        first = first[0]
    options = tuple([(type(value), value) for value in args if type(value) in PLAIN])
    named = frozenset(
        [
            (name, type(value), value) if type(value) in PLAIN else name
            for name, value in kwargs.items()
        ]
    )
    return (len(args), options, named, place, getattr(first, "shape", None))


def _host_place() -> Place:
    return _HOST


# A build of torch without CUDA has none of them, and then no tensor is on a GPU.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def _gpu_place() -> Place:
    device = _current_device()
    return device, _current_stream(device), _is_capturing()
