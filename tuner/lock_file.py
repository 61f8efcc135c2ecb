"""A lock file: the winners of a deployment as sorted JSON, to be reviewed and to be in force.

Holds the format: what is written, read and checked. ``locked_snapshot`` answers look-ups from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from ..errors import StoreError, UsageError
from ..kernels.base import Config, ParameterValue, Problem, canonical_json
from ..kernels.device import DeviceSpec
from ..kernels.registry import operation, template
from .explain import LookupResult
from .records import Provenance, Toolchain
from .tiers import Tier

__all__ = ["LockFile", "LockedWinner", "lock_text", "parse_lock", "read_lock"]

FORMAT, VERSION = "tilescout-lock", 1

_SHAPES_CODE = ("triton", "tilelang", "torch")
"""Parts of the toolchain that a lock is held to: another compiler is another kernel."""


@dataclass(frozen=True)
class LockedWinner:
    """The config that serves one problem, and where it came from when the lock was written."""

    problem: Problem
    config: Config
    template_hash: str
    tier: Tier
    provenance: str
    distance: float | None
    trial_id: int | None
    time_us: float | None
    decided_at: str | None
    versions: Toolchain
    """What the winner was found with."""


@dataclass(frozen=True)
class LockFile:
    """The winners of a deployment on one SKU."""

    path: Path
    sku: str
    compute_capability: str
    num_sms: int
    memory_bytes: int
    toolchain: Toolchain
    """What was installed when the lock was written."""
    winners: tuple[LockedWinner, ...]
    lock_id: str
    """Twelve hex digits over all of it: equal on every rank, or the ranks differ."""

    def toolchain_differences(self, current: Toolchain) -> tuple[str, ...]:
        """The parts that shape code and differ from what is installed now."""
        now, then = current.as_dict(), self.toolchain.as_dict()
        return tuple(
            f"{part} {then[part]} (now {now[part] or 'none'})"
            for part in _SHAPES_CODE
            if then[part] and then[part].partition("+")[0] != now[part].partition("+")[0]
        )


def lock_text(results: Iterable[LookupResult], device: DeviceSpec, toolchain: Toolchain) -> str:
    """The lock of these answers: sorted, one value a line, equal for equal answers."""
    entries = {
        (result.op, result.problem.key()): {
            "op": result.op,
            "problem": result.problem.as_dict(),
            "template": result.template,
            "template_hash": template(result.op, result.template).source_hash(),
            "config": result.config.as_dict(),
            "tier": result.tier.value,
            "provenance": result.provenance,
            "distance": result.distance,
            "trial_id": result.trial_id,
            "time_us": result.time_us,
            "decided_at": result.decided_at,
            "versions": result.versions.as_dict(),
        }
        for result in results
    }
    document = {
        "format": FORMAT,
        "version": VERSION,
        "gpu": {
            "sku": device.sku,
            "compute_capability": device.compute_capability_text,
            "num_sms": device.num_sms,
            "memory_bytes": device.memory_bytes,
        },
        # The driver shapes no code, and differs from host to host of one deployment.
        "toolchain": {part: v for part, v in toolchain.as_dict().items() if part != "driver"},
        "winners": [entries[key] for key in sorted(entries)],
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def read_lock(path: str | Path) -> LockFile:
    """The lock in a file; every winner can serve with the code at hand.

    Raises:
        StoreError: the file cannot be read, is no lock, or holds a winner that cannot serve.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"lock {str(path)!r} cannot be read ({error}): check the path") from error
    return parse_lock(text, path)


def parse_lock(text: str, path: Path) -> LockFile:
    """The lock in a text that came from ``path``.

    Raises:
        StoreError: it is no lock, or holds a winner that cannot serve.
    """
    document = _document(text, path)
    try:
        gpu = document["gpu"]
        winners = tuple(_winner(entry, path) for entry in document["winners"])
        return LockFile(
            path=path,
            sku=str(gpu["sku"]),
            compute_capability=str(gpu["compute_capability"]),
            num_sms=int(gpu["num_sms"]),
            memory_bytes=int(gpu["memory_bytes"]),
            toolchain=_toolchain(document["toolchain"]),
            winners=winners,
            lock_id=hashlib.sha256(canonical_json(document).encode()).hexdigest()[:12],
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _document(text: str, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _damaged(path, f"malformed JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{str(path)!r} is no lock: write one with `tilescout lock`")
    if document.get("version") != VERSION:
        raise StoreError(
            f"lock {str(path)!r} has version {document.get('version')!r}, this Tilescout reads "
            f"{VERSION}: write it again with `tilescout lock`"
        )
    return document


def _winner(entry: Mapping[str, Any], path: Path) -> LockedWinner:
    op, name = entry["op"], entry["template"]
    try:
        problem = operation(op).problem_type.from_dict(entry["problem"])
        current = template(op, name).source_hash()
    except (UsageError, ImportError) as error:
        raise _stale(path, f"{op} {entry['problem']}: {error}") from error
    if entry["template_hash"] != current:
        raise _stale(path, f"the code of {op}/{name} has changed since")
    return LockedWinner(
        problem=problem,
        config=Config.of(name, cast(dict[str, ParameterValue], entry["config"])),
        template_hash=current,
        tier=Tier(entry["tier"]),
        provenance=Provenance(entry["provenance"]).value,
        distance=entry["distance"],
        trial_id=entry["trial_id"],
        time_us=entry["time_us"],
        decided_at=entry["decided_at"],
        versions=_toolchain(entry["versions"]),
    )


def _toolchain(values: Mapping[str, Any]) -> Toolchain:
    return Toolchain(**{f.name: str(values.get(f.name, "")) for f in fields(Toolchain)})


def _damaged(path: Path, reason: str) -> StoreError:
    return StoreError(
        f"lock {str(path)!r} is damaged ({reason}): take it from version control, or write it "
        "again with `tilescout lock`"
    )


def _stale(path: Path, reason: str) -> StoreError:
    return StoreError(
        f"lock {str(path)!r} cannot be kept: {reason}; write it again with `tilescout lock`, or "
        "install the version that it was written with"
    )
