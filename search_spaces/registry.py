"""The search space of a problem on a device, over every template that can serve it.

The space of operation ``x`` is ``search_spaces/x.py``, whose ``SPACES`` maps a template's name to
a function ``(problem, device) -> SearchSpace``.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import UnknownNameError, UnsupportedError
from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from ..kernels.registry import operation, supported_templates

if TYPE_CHECKING:
    from .space import JointSpace, SearchSpace

__all__ = ["joint_space", "register", "space_of"]

_REGISTERED: dict[str, str] = {}


def register(op: str, module: str) -> None:
    """Makes ``module`` provide the spaces of a user's own operation."""
    _REGISTERED[op] = module


def space_of(problem: Problem, template: str, device: DeviceSpec) -> SearchSpace:
    """The space of one template.

    Raises:
        UnknownNameError: the operation has no such template.
    """
    from .space import SearchSpace  # not before a look-up: dispatch is imported in less time

    operation(problem.op)  # names the unknown operation before the import would
    spaces = import_module(
        _REGISTERED.get(problem.op, f"tilescout.search_spaces.{problem.op}")
    ).SPACES
    space = spaces[template](problem, device)
    assert isinstance(space, SearchSpace)
    return space


def joint_space(
    problem: Problem, device: DeviceSpec, templates: Collection[str] | None = None
) -> JointSpace:
    """The spaces of all templates that support the problem on the device.

    Args:
        problem: what is to be served.
        device: where.
        templates: names of those to consider; None for all.

    Raises:
        UnsupportedError: none does.
        UnknownNameError: the operation has no template of a name.
    """
    from .space import JointSpace  # likewise

    names = operation(problem.op).template_names
    for name in templates or ():
        if name not in names:
            raise UnknownNameError(f"template of {problem.op}", name, names)
    supported = [t.name for t in supported_templates(problem, device)]
    chosen = [name for name in supported if templates is None or name in templates]
    if not chosen:
        raise UnsupportedError(
            f"none of the templates {', '.join(templates or ())} of {problem.op} supports the "
            f"problem {problem} on {device.sku}; these do: {', '.join(supported)}"
        )
    return JointSpace(tuple(space_of(problem, name, device) for name in chosen))
