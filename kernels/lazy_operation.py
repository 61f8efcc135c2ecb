"""An ``Operation`` whose reference and templates are imported on first use.

Reading a problem then needs neither torch nor a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from .base import KernelTemplate, Operation, Problem

__all__ = ["from_reference", "lazy_operation"]


def lazy_operation(
    package: str,
    problem_type: type[Problem],
    templates: Mapping[str, tuple[str, str]],
    *,
    is_in_place: bool = False,
) -> Operation:
    """The operation of a folder of ``kernels/``.

    Args:
        package: ``__name__`` of the folder; its module ``reference`` has ``make_inputs``,
            ``make_validation_inputs``, ``make_outputs``, ``compare`` and ``outputs_equal``.
        problem_type: The problem; its ``op`` names the operation.
        templates: Name of each template, its module in the folder and its class; the first one's
            default config serves where nothing was tuned.
        is_in_place: The operation may update its inputs; ``reference`` has ``make_in_place``.
    """

    def load_template(name: str) -> KernelTemplate:
        module, class_name = templates[name]
        loaded = getattr(import_module(f".{module}", package), class_name)()
        assert isinstance(loaded, KernelTemplate)
        return loaded

    def call_reference(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return from_reference(package, name)(*args, **kwargs)

        return call

    return Operation(
        name=problem_type.op,
        problem_type=problem_type,
        template_names=tuple(templates),
        load_template=load_template,
        make_inputs=call_reference("make_inputs"),
        make_validation_inputs=call_reference("make_validation_inputs"),
        make_outputs=call_reference("make_outputs"),
        compare=call_reference("compare"),
        outputs_equal=call_reference("outputs_equal"),
        make_in_place=call_reference("make_in_place") if is_in_place else None,
    )


def from_reference(package: str, name: str) -> Any:
    """A name of the folder's module ``reference``."""
    return getattr(import_module(".reference", package), name)
