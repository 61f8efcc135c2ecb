"""How other people's kernels take part: after ours, measured against our winner.

Our templates are searched in a study of their own, whose winner stands where no library is
installed. A second study then measures that winner and the libraries side by side; its winner is
newer and serves where the library that won is installed. A search of some of the templates is held
against the winner that stands in the same way: the newest serves, and it must not be a slower one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import UnknownNameError, UnsupportedError
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
    "is_runnable",
    "own_templates",
    "run_timeout_s",
    "space_of_libraries",
    "use_external",
]

_LEAST_CONTEST = 2
"""Winners that are measured against each other where no library takes part."""
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
    problem: Problem,
    device: DeviceSpec,
    names: Collection[str] | None,
    held: Sequence[Config],
) -> JointSpace | None:
    """Winners and the libraries that serve the problem; None where nobody is held against another.

    Args:
        problem: What is searched.
        device: The GPU at hand.
        names: Templates that take part; None for all.
        held: Our winner, and the one that stands where its template took no part; of different
            templates.
    """
    rivals = [
        space_of(problem, library.name, device)
        for library in _libraries(problem.op, names)
        if library.supports(problem, device) is None
    ]
    winners = [
        listed_space(config.template, [config])
        for config in held
        if all(rival.template != config.template for rival in rivals)
    ]
    if not rivals and len(winners) < _LEAST_CONTEST:
        return None
    return JointSpace((*winners, *rivals))


def is_runnable(problem: Problem, device: DeviceSpec, config: Config) -> bool:
    """Whether the config is one that its template takes here, as the code is now."""
    try:
        kernel = template(problem.op, config.template)
    except UnknownNameError:
        return False
    if kernel.supports(problem, device) is not None:
        return False
    return space_of(problem, config.template, device).check(config) is None


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
    space = contest_space(problem, device, names, ()) if is_measured else None
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
