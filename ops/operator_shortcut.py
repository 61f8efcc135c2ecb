"""Calls of an operator that are prepared, launched without passing torch's dispatcher.

The dispatcher takes microseconds to turn arguments into those of a schema and back. For tensors
that are plain as a prepared call has them (their dispatch keys are among its conditions, so no
trace, no mode and no transform of functorch) it would only hand them to our function. Whatever
else looks at calls of operators sees them: modes of torch functions, the profiler, and kernels that
somebody else registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .prepared import MISSED, OperatorCalls

__all__ = ["shorten"]

_num_function_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_function_stack", None)
_is_profiling: Callable[[], bool] | None = getattr(torch._C._autograd, "_profiler_enabled", None)
_dispatch_table: Callable[[str], str] | None = getattr(torch._C, "_dispatch_dump_table", None)
_python_kernels: set[str] | None = getattr(torch.library, "_impls", None)
"""NAMESPACE/OPERATOR/KEY of every kernel that Python registered."""


class _Kernels:
    """Whether the kernels of an operator are still those that it had here."""

    def __init__(self, name: str) -> None:
        assert _dispatch_table is not None
        self._name = name
        self._table = _dispatch_table(name)

    def are_ours(self) -> bool:
        """Looks, which takes as long as several calls."""
        assert _dispatch_table is not None
        return _dispatch_table(self._name) == self._table


def shorten(operator: Any, prepared: OperatorCalls) -> None:
    """Lets the operator, by its overload or its packet, try prepared calls before the dispatcher.

    What an operator calls is private to torch: where it is not found all stays as it is.

    Args:
        operator: The only overload of its name; its kernels are registered.
        prepared: Its prepared calls.
    """
    if None in {_num_function_modes, _is_profiling, _dispatch_table} or _python_kernels is None:
        return
    name = operator._schema.name
    # A kernel in the place of one of ours is then seen as one more.
    own = name.replace("::", "/") + "/"
    _python_kernels.difference_update([key for key in _python_kernels if key.startswith(own)])
    kernels = _Kernels(name)
    for holder in (operator, operator.overloadpacket):
        if callable(getattr(holder, "_op", None)):
            holder._op = _shortened(holder._op, prepared, kernels)
            # torch.jit.script knows an operator by the object that is called.
            torch.jit._builtins._register_builtin(holder._op, name)


def _shortened(dispatched: Any, prepared: OperatorCalls, kernels: _Kernels) -> Callable[..., Any]:
    num_function_modes, is_profiling, registered = (
        _num_function_modes,
        _is_profiling,
        _python_kernels,
    )
    assert num_function_modes is not None
    assert is_profiling is not None
    assert registered is not None
    num_registered, are_ours, launch = -1, True, prepared.calls.launch

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_registered, are_ours
        if len(registered) != num_registered:
            num_registered, are_ours = len(registered), kernels.are_ours()
        if are_ours and not num_function_modes() and not is_profiling():
            result = launch(args, kwargs)
            return prepared.dispatch(dispatched, args, kwargs) if result is MISSED else result
        return dispatched(*args, **kwargs)

    call.__module__ = dispatched.__module__
    return call
