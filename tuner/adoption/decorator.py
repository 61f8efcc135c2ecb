"""``@tilescout.autotune``: a kernel of a user's with a space, a problem and a reference."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import UsageError
from .adopt import adopt
from .kernel import OnMiss
from .live_evaluator import Reference
from .program import PROGRAM_MISSES, ProgramFactory, is_program_factory

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
    """Decorates a ``@triton.jit`` function, or what ``@tilelang.jit`` makes of a program factory.

    The kernel is called as before, without the parameters. Of a factory that means: called with the
    sizes of a problem it gives the program for them, which is called with tensors.

    Args:
        space: ``{"BLOCK": (64, 128), "num_warps": (4, 8)}``, whose product is searched, or a list
            of ``triton.Config`` (of a factory: of values by name). The first values, or the first
            config, serve untuned.
        problem: Names of the arguments that tell problems apart; of a Triton kernel the dtypes do
            so always.
        reference: Takes the arguments by name and returns the right values of those that the kernel
            writes, by name. Of a program: takes its tensors and returns what it returns or, where
            it writes into its arguments, the right values by their places. None: the results of the
            first config are right.
        constraint: Takes the values of a config by name; returns why it is not valid, or None.
        reset_to_zero: As for ``triton.autotune``.
        restore_value: Likewise.
        on_miss: Where nothing is known of a call, see ``adopt``; ``triton`` is for Triton's.
        **triton_options: More arguments of ``triton.autotune``; of a factory only ``do_bench``,
            which takes a call and gives the median, low and high of its times in milliseconds.

    Raises:
        UsageError: the space is empty or too large, or a name is no argument of the kernel.
    """
    values = _products(space)

    def decorate(function: Any) -> Any:
        import triton

        if is_program_factory(function):
            given: Sequence[Any] = list(space) if values is None else values
            return _program(
                function,
                [each for each in given if constraint is None or constraint(each) is None],
                problem,
                reference=reference,
                on_miss=on_miss,
                options={
                    **triton_options,
                    "reset_to_zero": reset_to_zero,
                    "restore_value": restore_value,
                },
            )
        configs = _configs(values, space, constraint)
        names = getattr(function, "arg_names", None)
        if names is None:
            raise UsageError(
                f"{function!r} is no kernel: put @triton.jit or @tilelang.jit under "
                "@tilescout.autotune"
            )
        _check_names(function, names, (*problem, *reset_to_zero, *restore_value))
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


def _check_names(function: Any, known: Sequence[str], names: Sequence[str]) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} is no argument of {function.__name__}: it takes {', '.join(known)}"
        )


def _program(
    factory: Any,
    configs: Sequence[Any],
    problem: Sequence[str],
    *,
    reference: Reference | None,
    on_miss: OnMiss,
    options: dict[str, Any],
) -> ProgramFactory:
    function, timer = inspect.unwrap(factory.func), options.pop("do_bench", None)
    name = function.__name__
    given = sorted(option for option, value in options.items() if value)
    if given:
        raise UsageError(f"{given[0]} is of Triton's autotuner: {name} is a TileLang program")
    if on_miss not in PROGRAM_MISSES:
        allowed = ", ".join(PROGRAM_MISSES)
        raise UsageError(f"on_miss={on_miss!r} of {name}, a TileLang program: one of {allowed}")
    if not configs or not all(isinstance(config, Mapping) and config for config in configs):
        raise UsageError(f"the space of {name} has no valid config: give values by name")
    parameters = {parameter for config in configs for parameter in config}
    known = list(inspect.signature(function).parameters)
    _check_names(function, known, (*problem, *parameters))
    both = sorted(parameters & set(problem))
    if both:
        raise UsageError(f"{both[0]!r} of {name} is both in the space and of the problem")
    return ProgramFactory(
        *(factory, configs, problem, reference), tunes_always=on_miss == "tune", timer=timer
    )


def _products(space: Space) -> list[dict[str, Any]] | None:
    """Every combination of the values; None where the space is a list of configs."""
    if not isinstance(space, Mapping):
        return None
    size = 1
    for name, values in space.items():
        if isinstance(values, str) or not len(values):
            raise UsageError(f"space[{name!r}]={values!r} must be a list of at least one value")
        size *= len(values)
    if size > MAX_CONFIGS:
        raise UsageError(f"the space has {size} configs before constraints: at most {MAX_CONFIGS}")
    return [dict(zip(space, each, strict=True)) for each in itertools.product(*space.values())]


def _configs(
    values: list[dict[str, Any]] | None,
    space: Space,
    constraint: Callable[[Mapping[str, Any]], str | None] | None,
) -> list[Any]:
    import triton

    configs = list(space) if values is None else [_config(each) for each in values]
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
