"""Writes the lock of a workload: what calls with its problems get, on one SKU, now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import StoreError, UnsupportedError
from ..kernels.device import DeviceSpec
from . import catalog
from .dispatch import current_snapshot, find_device
from .explain import LookupResult
from .lock_file import lock_text, parse_lock
from .reach import reached_problems
from .snapshot import current_toolchain
from .tiers import Policy

__all__ = ["WrittenLock", "resolve_workload", "write_lock"]


@dataclass(frozen=True)
class WrittenLock:
    """A lock as it was written."""

    path: Path
    lock_id: str
    results: tuple[LookupResult, ...]


def write_lock(
    workload: str,
    path: str | Path,
    *,
    gpu: str | DeviceSpec | None = None,
    databases: Sequence[str | Path] | None = None,
    policy: Policy = "nearest",
    allow_other_toolchain: bool = False,
) -> WrittenLock:
    """Pins what serves the problems of a workload, and the buckets that calls with them ask for.

    Args:
        workload: Name of a workload, or path of a workload file.
        path: File to write; replaced in one step.
        gpu: SKU name or spec; None: the GPU at hand.
        databases: Files to lay over the shipped and the user's database.
        policy: ``strict`` refuses to pin anything but winners measured for the very problem.
        allow_other_toolchain: Lets ``strict`` take a winner found with other versions.

    Raises:
        NoWinnerError: ``strict``, and a problem has no such winner.
        UnsupportedError: no template serves any of the problems.
        StoreError: a database cannot be read, or the file cannot be written.
    """
    device = find_device(gpu)
    results = resolve_workload(
        workload,
        device,
        databases=databases,
        policy=policy,
        allow_other_toolchain=allow_other_toolchain,
    )
    target = Path(path).expanduser()
    text = lock_text(results, device, current_toolchain())
    part = target.with_name(f".{target.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise StoreError(
            f"lock {str(target)!r} cannot be written ({error.strerror}): check that its folder "
            "exists and may be written"
        ) from error
    lock = parse_lock(text, target)
    return WrittenLock(target, lock.lock_id, results)


def resolve_workload(
    workload: str,
    device: DeviceSpec,
    *,
    databases: Sequence[str | Path] | None = None,
    policy: Policy = "nearest",
    allow_other_toolchain: bool = False,
) -> tuple[LookupResult, ...]:
    """What calls with the problems of a workload get; problems that nothing serves are left out.

    Raises:
        NoWinnerError: ``strict``, and a problem has no measured winner.
        UnsupportedError: no template serves any of the problems.
        StoreError: a database cannot be read.
    """
    snapshot = current_snapshot(databases)
    problems = [entry.problem for entry in catalog.workload(workload).problems]
    results: list[LookupResult] = []
    reasons: list[str] = []
    # Under strict only the problems that are named must be tuned, not the buckets beside them.
    wanted = problems if policy == "strict" else reached_problems(problems, device, snapshot)
    for problem in dict.fromkeys(wanted):
        try:
            found = snapshot.lookup(
                problem, device, policy=policy, allow_other_toolchain=allow_other_toolchain
            )
        except UnsupportedError as error:
            reasons.append(str(error))
            continue
        results.append(found)
    if not results:
        raise UnsupportedError("\n".join(dict.fromkeys(reasons)))
    return tuple(results)
