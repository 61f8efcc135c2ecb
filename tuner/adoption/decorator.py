"""``@tilescout.autotune``: a ``@triton.jit`` function with a space, a problem and a reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import UsageError
from .adopt import adopt
from .kernel import OnMiss
from .live_evaluator import Reference

__all__ = ["autotune"]

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Values of a space that are Triton's launch options; all others are meta-parameters."""

MAX_CONFIGS = 100_000

Space = Mapping[str, Sequence[Any]] | Sequence[Any]
"""Values of each parameter, or Triton configs."""


def autotune(
    *,
    space: Space,
    problem: Sequence[str],
    reference: Reference | None = None,
    constraint: Callable[[Mapping[str, Any]], str | None] | None = None,
    reset_to_zero: Sequence[str] = (),
    restore_value: Sequence[str] = (),
    on_miss: OnMiss = "default",
    **triton_options: Any,
) -> Callable[[Any], Any]:
    """Decorates a ``@triton.jit`` function, which is called as before, without the parameters.

    Args:
        space: ``{"BLOCK": (64, 128), "num_warps": (4, 8)}``, whose product is searched, or a list
            of ``triton.Config``. The first values, or the first config, serve untuned.
        problem: Names of the arguments that tell problems apart; dtypes do so always.
        reference: Takes the arguments by name and returns the right values of those that the kernel
            writes; None: the results of the first config are right.
        constraint: Takes the values of a config by name; returns why it is not valid, or None.
        reset_to_zero: As for ``triton.autotune``.
        restore_value: Likewise.
        on_miss: Where nothing is known of a call, see ``adopt``.
        **triton_options: More arguments of ``triton.autotune``.

    Raises:
        UsageError: the space is empty or too large, or a name is no argument of the kernel.
    """
    configs = _configs(space, constraint)

    def decorate(function: Any) -> Any:
        import triton

        names = getattr(function, "arg_names", None)
        if names is None:
            raise UsageError(
                f"{function!r} is no kernel: put @triton.jit under @tilescout.autotune"
            )
        unknown = sorted({*problem, *reset_to_zero, *restore_value} - set(names))
        if unknown:
            raise UsageError(
                f"{unknown[0]!r} is no argument of {function.__name__}: it takes {', '.join(names)}"
            )
        kernel = triton.autotune(
            configs=configs,
            key=list(problem),
            reset_to_zero=list(reset_to_zero) or None,
            restore_value=list(restore_value) or None,
            **triton_options,
        )(function)
        adopt(kernel, reference=reference, on_miss=on_miss) if len(configs) > 1 else None
        return kernel

    return decorate


def _configs(
    space: Space, constraint: Callable[[Mapping[str, Any]], str | None] | None
) -> list[Any]:
    import triton

    if not isinstance(space, Mapping):
        configs = list(space)
    else:
        size = 1
        for name, values in space.items():
            if isinstance(values, str) or not len(values):
                raise UsageError(f"space[{name!r}]={values!r} must be a list of at least one value")
            size *= len(values)
        if size > MAX_CONFIGS:
            raise UsageError(
                f"the space has {size} configs before constraints: at most {MAX_CONFIGS}"
            )
        products = itertools.product(*space.values())
        configs = [_config(dict(zip(space, values, strict=True))) for values in products]
    if constraint is not None:
        configs = [config for config in configs if constraint(config.all_kwargs()) is None]
    if not configs or not all(isinstance(config, triton.Config) for config in configs):
        raise UsageError(
            f"space={space!r} has no valid config: give values by name, or triton.Config objects"
        )
    return configs


def _config(values: Mapping[str, Any]) -> Any:
    import triton

    options = {name: value for name, value in values.items() if name in _OPTIONS}
    return triton.Config({n: v for n, v in values.items() if n not in options}, **options)
