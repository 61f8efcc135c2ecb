"""Why a config cannot run a problem on a device, as this installation knows its templates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...errors import UnknownNameError
from ...kernels.base import Config, Problem
from ...kernels.device import DeviceSpec
from ...kernels.registry import template
from ...search_spaces.registry import space_of

__all__ = ["Refusal", "refusal"]


@dataclass(frozen=True)
class Refusal:
    """What refuses a config, and in which words."""

    constraint: str | None
    """``support`` where the template does not serve the device, ``values`` where the space has no
    such value."""
    reason: str | None


@lru_cache(maxsize=1 << 12)
def refusal(problem: Problem, config: Config, device: DeviceSpec) -> Refusal | None:
    """None where the config is valid there."""
    try:
        kernel = template(problem.op, config.template)
    except UnknownNameError as error:
        return Refusal("support", str(error))
    unsupported = kernel.supports(problem, device)
    if unsupported is not None:
        return Refusal("support", f"template {kernel.name!r}: {unsupported}")
    space = space_of(problem, kernel.name, device)
    reason = space.check(config)
    if reason is None:
        return None
    name = reason.partition(":")[0]
    is_constraint = any(constraint.name == name for constraint in space.constraints)
    return Refusal(name if is_constraint else "values", reason)
