"""Calls of an operator that are prepared, launched without passing torch's dispatcher.

The dispatcher takes microseconds to turn arguments into those of a schema and back. For tensors
that are plain as a prepared call has them (their dispatch keys are among its conditions, so no
trace, no mode and no transform of functorch) it would only hand them to our function. Whatever
else looks at calls of operators sees them: modes of torch functions, and the profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import TilescoutError
from .prepared import NotPreparedError, only_prepared

__all__ = ["shorten"]

_num_function_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_function_stack", None)
_is_profiling: Callable[[], bool] | None = getattr(torch._C._autograd, "_profiler_enabled", None)


def shorten(operator: Any, run: Callable[..., Any]) -> None:
    """Lets the operator, by its overload or its packet, try ``run`` before the dispatcher.

    What an operator calls is private to torch: where it is not found all stays as it is.

    Args:
        operator: The only overload of its name.
        run: Its implementation, which calls a public function with prepared calls.
    """
    if _num_function_modes is None or _is_profiling is None:
        return
    for holder in (operator, operator.overloadpacket):
        if callable(getattr(holder, "_op", None)):
            holder._op = _shortened(holder._op, run)
            # torch.jit.script knows an operator by the object that is called.
            torch.jit._builtins._register_builtin(holder._op, operator._schema.name)


def _shortened(dispatched: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    num_function_modes, is_profiling = _num_function_modes, _is_profiling
    assert num_function_modes is not None
    assert is_profiling is not None
    mark, unmark = only_prepared.set, only_prepared.reset

    def call(*args: Any, **kwargs: Any) -> Any:
        if not num_function_modes() and not is_profiling():
            token = mark(True)
            try:
                return run(*args, **kwargs)
            except (NotPreparedError, TilescoutError, TypeError):
                pass  # nothing was launched; a mistake gets the dispatcher's own error
            finally:
                unmark(token)
        return dispatched(*args, **kwargs)

    call.__module__ = dispatched.__module__
    return call
