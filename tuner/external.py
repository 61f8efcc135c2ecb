"""How other people's kernels take part: after ours, measured against our winner.

Our templates are searched in a study of their own, whose winner stands where no library is
installed. A second study then measures that winner and the libraries side by side; its winner is
newer and serves where the library that won is installed.
"""

from __future__ import annotations

from collections.abc import Collection

from ..errors import UnsupportedError
from ..kernels.base import Config, KernelTemplate, Problem
from ..kernels.device import DeviceSpec
from ..kernels.external import ExternalPolicy, set_external_policy
from ..kernels.registry import operation, template
from ..search_spaces.listed import listed_space
from ..search_spaces.registry import space_of
from ..search_spaces.space import JointSpace
from . import dispatch

__all__ = [
    "contest_space",
    "own_templates",
    "run_timeout_s",
    "space_of_libraries",
    "use_external",
]

_LIBRARY_TIMEOUT_S = 600.0
"""Limit for a library's first call, which compiles and may tune: FLA was seen to take 119 s for one
new key, FlashQLA 122 s (H200, 16 cores)."""


def use_external(policy: ExternalPolicy | None) -> None:
    """Says whether external templates may be searched and serve, in this process.

    Args:
        policy: ``never``; ``forward`` (the default): calls that autograd does not record;
            ``always``: those that it records, too. None: as ``$TILESCOUT_EXTERNAL`` says.

    Raises:
        UsageError: no such policy.
    """
    set_external_policy(policy)
    dispatch.refresh()


def own_templates(op: str, names: Collection[str] | None = None) -> tuple[str, ...] | None:
    """Those of the named templates that are no library's; None for all where none is."""
    libraries = {t.name for t in _libraries(op, None)}
    if not libraries:
        return None if names is None else tuple(names)
    chosen = operation(op).template_names if names is None else names
    return tuple(name for name in chosen if name not in libraries)


def contest_space(
    problem: Problem, device: DeviceSpec, names: Collection[str] | None, ours: Config | None
) -> JointSpace | None:
    """Our winner and the libraries that serve the problem; None where there is no library.

    Args:
        problem: What is searched.
        device: The GPU at hand.
        names: Templates that take part; None for all.
        ours: Our winner; None where there is none.
    """
    rivals = [
        space_of(problem, library.name, device)
        for library in _libraries(problem.op, names)
        if library.supports(problem, device) is None
    ]
    if not rivals:
        return None
    held = [] if ours is None else [listed_space(ours.template, [ours])]
    return JointSpace((*held, *rivals))


def space_of_libraries(
    problem: Problem,
    device: DeviceSpec,
    names: Collection[str] | None,
    *,
    is_measured: bool,
) -> JointSpace:
    """The libraries alone, where no template of ours is wanted.

    Raises:
        UnsupportedError: none of them takes part.
    """
    space = contest_space(problem, device, names, None) if is_measured else None
    if space is None:
        reasons = [
            f"{t.name}: {t.supports(problem, device)}" for t in _libraries(problem.op, names)
        ]
        why = "; ".join(reasons) if is_measured else "libraries are measured, never predicted"
        raise UnsupportedError(
            f"none of the templates {', '.join(names or ())} of {problem.op} can be searched for "
            f"{problem} on {device.sku}: {why}"
        )
    return space


def run_timeout_s(op: str, space: JointSpace) -> float:
    """Limit for judging and timing one config of a space."""
    # Loads the parts that need a GPU only where one is used.
    from .evaluators.measure import RUN_TIMEOUT_S

    has_library = any(template(op, part.template).is_external for part in space.spaces)
    return _LIBRARY_TIMEOUT_S if has_library else RUN_TIMEOUT_S


def _libraries(op: str, names: Collection[str] | None) -> list[KernelTemplate]:
    found = [template(op, name) for name in operation(op).template_names]
    return [t for t in found if t.is_external and (names is None or t.name in names)]
