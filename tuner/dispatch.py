"""Hands out the config for a problem: the snapshot in force, the GPU at hand, the policy asked for.

The databases are read once (shipped, then the user's, then those named) and never written. Imports
none of Optuna, SQLAlchemy and pandas. ``snapshot`` owns the look-up itself, ``winner_rows`` the
reading and checking of rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DeviceError, UsageError
from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from . import capture as capture_module
from .dispatch_policy import current_policy, policy, reread_environment
from .explain import Explanation, LookupResult
from .paths import shipped_database_path, user_database_path
from .snapshot import Snapshot
from .tiers import Policy, Tier
from .winner_rows import DatabaseSource, database_file, read_database

if TYPE_CHECKING:
    from .locked_snapshot import LockedSnapshot

__all__ = [
    "Explanation",
    "LookupResult",
    "Policy",
    "Snapshot",
    "Tier",
    "current_snapshot",
    "explain",
    "find_device",
    "generation",
    "lookup",
    "policy",
    "put_in_force",
    "refresh",
    "use_lock",
]

CAPTURE_VARIABLE = "TILESCOUT_CAPTURE"
"""Environment variable that names the file in which look-ups are counted."""

LOCK_VARIABLE = "TILESCOUT_LOCK"
"""Environment variable that names the lock file in force."""

_MAX_HOT = 4096
_HotKey = tuple[int, str | None, Policy, bool]
"""Identity of the problem; SKU, policy, leave for other toolchains."""

_lock = threading.RLock()
_snapshots: dict[tuple[str, ...], Snapshot] = {}
_hot: dict[_HotKey, tuple[Problem, LookupResult]] = {}
generation = 0
"""Counts how often what was read was forgotten: what was resolved before is not valid after."""
_chosen_lock: LockedSnapshot | None = None
"""What ``use_lock`` put in force."""


def _renew_lock() -> None:
    """A fork while another thread reads a database would leave the child a closed lock."""
    global _lock  # noqa: PLW0603 - the child's lock takes the place of the parent's
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def lookup(
    problem: Problem,
    *,
    gpu: str | DeviceSpec | None = None,
    policy: Policy | None = None,
    databases: Sequence[str | Path] | None = None,
    allow_other_toolchain: bool = False,
) -> LookupResult:
    """The config for a problem on a GPU, from the databases as they were first read.

    Args:
        problem: What will run.
        gpu: SKU name or spec; None: the GPU at hand.
        policy: ``nearest`` or ``strict``, see ``Snapshot.lookup``; None: that of the ``policy``
            block around, else of ``$TILESCOUT_POLICY``, else ``nearest``.
        databases: Files to lay over the shipped and the user's database.
        allow_other_toolchain: Lets ``strict`` take a winner found with other versions.

    Raises:
        NoWinnerError: ``strict`` found nothing.
        UnsupportedError: no template serves the problem on the GPU.
        StoreError: a database cannot be read.
        DeviceError: no GPU was named and none is at hand.
        UsageError: a policy that is none.
    """
    chosen = policy or current_policy()
    if databases is None and not isinstance(gpu, DeviceSpec):
        key = (id(problem), gpu, chosen, allow_other_toolchain)
        hot = _hot.get(key)
        # Held by the entry, so that no other object can have taken its identity.
        if hot is not None and hot[0] is problem:
            if capture_module.recorder is not None:
                capture_module.recorder.count(hot[1])
            return hot[1]
        found = current_snapshot().lookup(
            problem, find_device(gpu), policy=chosen, allow_other_toolchain=allow_other_toolchain
        )
        if len(_hot) >= _MAX_HOT:
            _hot.clear()
        _hot[key] = (problem, found)
        return found
    return current_snapshot(databases).lookup(
        problem, find_device(gpu), policy=chosen, allow_other_toolchain=allow_other_toolchain
    )


def explain(
    problem: Problem,
    *,
    gpu: str | DeviceSpec | None = None,
    policy: Policy | None = None,
    databases: Sequence[str | Path] | None = None,
    allow_other_toolchain: bool = False,
) -> Explanation:
    """Why ``lookup`` gives what it gives; the arguments are those of ``lookup``."""
    return current_snapshot(databases).explain(
        problem,
        find_device(gpu),
        policy=policy or current_policy(),
        allow_other_toolchain=allow_other_toolchain,
    )


def current_snapshot(databases: Sequence[str | Path] | None = None) -> Snapshot:
    """The lock in force, else the shipped and the user's database with these over them, read once.

    Raises:
        StoreError: a database or the lock cannot be read.
        UsageError: databases are named and a lock is in force, which answers alone.
    """
    key = tuple(map(str, databases)) if databases else ()
    found = _snapshots.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _snapshots:
            _snapshots[key] = _read(databases or ())
        return _snapshots[key]


def use_lock(path: str | Path | None, *, allow_other_toolchain: bool = False) -> str | None:
    """Puts a lock file in force for this process: look-ups are answered from it alone.

    Args:
        path: The file that ``tilescout lock`` wrote; None: no lock, not ``$TILESCOUT_LOCK`` either
            until ``refresh`` is called.
        allow_other_toolchain: Accepts a lock that was written with other versions.

    Returns:
        The id of the lock: equal on every rank that resolves as this one.

    Raises:
        StoreError: the file is no lock, cannot serve with the code at hand, or was written with
            other versions.
    """
    chosen = None
    if path is not None:
        chosen = _locked(path, allow_other_toolchain=allow_other_toolchain)
    put_in_force(chosen)
    return chosen.lock.lock_id if chosen else None


def put_in_force(snapshot: LockedSnapshot | None) -> None:
    """Makes this the snapshot that answers; None: the databases again."""
    global _chosen_lock  # noqa: PLW0603 - what is in force is of the process
    with _lock:
        _chosen_lock = snapshot
        refresh()
        if snapshot is None:
            _snapshots[()] = Snapshot([read_database(s) for s in _sources(())])


def _locked(path: str | Path, *, allow_other_toolchain: bool = False) -> LockedSnapshot:
    # Few processes have a lock; the others need not load what reads one.
    from .lock_file import read_lock
    from .locked_snapshot import LockedSnapshot

    return LockedSnapshot(read_lock(path), allow_other_toolchain=allow_other_toolchain)


def _read(databases: Sequence[str | Path]) -> Snapshot:
    counted_in = os.environ.get(CAPTURE_VARIABLE, "").strip()
    if counted_in and capture_module.recorder is None:
        capture_module.capture(counted_in)
    in_force = _chosen_lock
    named = os.environ.get(LOCK_VARIABLE, "").strip()
    if in_force is None and named:
        in_force = _locked(named)
    if in_force is None:
        return Snapshot([read_database(source) for source in _sources(databases)])
    if databases:
        raise UsageError(
            f"lock {str(in_force.lock.path)!r} is in force and answers alone: leave the databases "
            f"out, or take the lock away ({LOCK_VARIABLE}, use_lock(None))"
        )
    return in_force


def refresh() -> None:
    """Forgets what was read, so that the next look-up reads databases and environment again."""
    global generation  # noqa: PLW0603 - of the process, like what was read
    reread_environment()
    with _lock:
        _snapshots.clear()
        _hot.clear()
        # Counted last: who saw the new number resolves by what is read anew.
        generation += 1


def _sources(explicit: Sequence[str | Path]) -> tuple[DatabaseSource, ...]:
    sources = [
        DatabaseSource(shipped_database_path(), "shipped"),
        DatabaseSource(user_database_path(), "user"),
        *(DatabaseSource(database_file(database), "explicit") for database in explicit),
    ]
    # A file named twice is read once, at its last place.
    last = {source.path.resolve(): source for source in sources}
    return tuple(s for s in sources if last[s.path.resolve()] is s)


def find_device(gpu: str | DeviceSpec | None) -> DeviceSpec:
    """The SKU of that name, the spec itself, or the GPU at hand for None.

    Raises:
        UnknownNameError: no such SKU.
        DeviceError: there is no GPU.
    """
    if isinstance(gpu, DeviceSpec):
        return gpu
    return _current_device() if gpu is None else _named_device(gpu)


@cache
def _named_device(sku: str) -> DeviceSpec:
    from .catalog import gpu as find_gpu

    return find_gpu(sku)


@cache
def _current_device() -> DeviceSpec:
    from .catalog import gpu_names
    from .environment import current_device

    device = current_device()
    if device is None:
        names = ", ".join(gpu_names())
        raise DeviceError(f"no NVIDIA GPU is at hand: name one with gpu= (--gpu), of {names}")
    return device
