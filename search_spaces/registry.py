"""The search space of a problem on a device, over every template that can serve it.

The space of operation ``x`` is ``search_spaces/x.py``, whose ``SPACES`` maps a template's name to
a function ``(problem, device) -> SearchSpace``.
"""

from __future__ import annotations

from importlib import import_module

from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from ..kernels.registry import operation, supported_templates
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
    operation(problem.op)  # names the unknown operation before the import would
    spaces = import_module(
        _REGISTERED.get(problem.op, f"tilescout.search_spaces.{problem.op}")
    ).SPACES
    space = spaces[template](problem, device)
    assert isinstance(space, SearchSpace)
    return space


def joint_space(problem: Problem, device: DeviceSpec) -> JointSpace:
    """The spaces of all templates that support the problem on the device.

    Raises:
        UnsupportedError: none does.
    """
    templates = supported_templates(problem, device)
    return JointSpace(tuple(space_of(problem, t.name, device) for t in templates))
