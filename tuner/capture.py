"""Counts the problems that a process looks up, and keeps the counts in a small file.

Off, a look-up pays for one comparison; on, for a few dictionary accesses. Each thread counts for
itself; the file is brought up to date now and then and at exit, under a lock that processes share.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import StoreError, UsageError
from ..kernels.base import canonical_json
from .explain import LookupResult

__all__ = ["CapturedProblem", "Recorder", "capture", "read_capture", "recorder"]

FORMAT, VERSION = "tilescout-capture", 1
INTERVAL_S = 60.0
"""Seconds between two writings; what a killed process loses."""


@dataclass(frozen=True)
class CapturedProblem:
    """A problem that was looked up, and how often."""

    op: str
    problem: str
    """Canonical JSON of its fields."""
    sku: str
    tier: str
    """What look-ups of it got."""
    distance: float | None
    count: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells entries of a file apart."""
        return (self.op, self.problem, self.sku, self.tier)


class _Count:
    """How often one thread got one answer."""

    __slots__ = ("num", "num_written", "result")

    def __init__(self, result: LookupResult) -> None:
        # Held, so that no other answer can take its identity.
        self.result = result
        self.num = 0
        self.num_written = 0


class Recorder:
    """Counts answers until it is closed."""

    def __init__(self, path: Path, interval_s: float = INTERVAL_S) -> None:
        """Starts no thread yet.

        Raises:
            UsageError: the interval is not positive, or the file is another one's.
            StoreError: the folder cannot be written to.
        """
        if not interval_s > 0:
            raise UsageError(f"interval_s={interval_s!r} of capture must be more than 0 seconds")
        self.path = path
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._local = threading.local()
        self._counts: list[dict[int, _Count]] = []
        self._wakes = threading.Event()
        self._writer: threading.Thread | None = None
        if not os.access(path.parent, os.W_OK):
            raise StoreError(
                f"capture {str(path)!r} cannot be written: check that its folder exists and may "
                "be written"
            )
        if path.exists():
            read_capture(path)

    def count(self, result: LookupResult) -> None:
        """Counts one look-up that got this answer."""
        try:
            counts = self._local.counts
        except AttributeError:
            counts = self._new_thread()
        found = counts.get(id(result))
        if found is None:
            found = counts[id(result)] = _Count(result)
        found.num += 1

    def flush(self) -> None:
        """Adds what was counted since the last time to the file.

        Raises:
            StoreError: the file cannot be written, or is no longer a capture.
        """
        with self._lock:
            taken: list[tuple[_Count, int]] = []
            for counts in self._counts:
                for count in list(counts.values()):
                    num = count.num
                    if num > count.num_written:
                        taken.append((count, num))
            if not taken:
                return
            news = [_captured(count, num - count.num_written) for count, num in taken]
            _add(self.path, news)
            for count, num in taken:
                count.num_written = num

    def close(self) -> None:
        """Writes what is left and ends the thread."""
        self._wakes.set()
        self.flush()

    def after_fork(self) -> None:
        """In a child: the parent writes what was counted before; locks may be held by nobody."""
        self._lock = threading.Lock()
        self._local = threading.local()
        self._counts = []
        self._wakes = threading.Event()
        self._writer = None

    def _new_thread(self) -> dict[int, _Count]:
        counts: dict[int, _Count] = {}
        with self._lock:
            self._counts.append(counts)
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._write_now_and_then, name="tilescout-capture", daemon=True
                )
                self._writer.start()
        self._local.counts = counts
        return counts

    def _write_now_and_then(self) -> None:
        wakes = self._wakes
        while not wakes.wait(self._interval_s):
            self.flush()


recorder: Recorder | None = None
"""What counts now; look-ups read it as an attribute of this module."""


def capture(path: str | Path | None, *, interval_s: float = INTERVAL_S) -> None:
    """Counts the problems that this process looks up from now on; None: no longer.

    Args:
        path: File to add the counts to; any number of processes may share it.
        interval_s: Seconds between two writings.

    Raises:
        UsageError: the interval is not positive.
        StoreError: the file cannot be written, or is no capture.
    """
    global recorder  # noqa: PLW0603 - what counts is of the process
    old, recorder = recorder, None
    if old is not None:
        old.close()
    if path is not None:
        recorder = Recorder(Path(path).expanduser().absolute(), interval_s)


def read_capture(path: str | Path) -> tuple[CapturedProblem, ...]:
    """The problems of a capture file, the most frequent first.

    Raises:
        StoreError: the file cannot be read or is no capture.
    """
    try:
        document = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(
            f"capture {str(path)!r} cannot be read ({error}): check the path"
        ) from error
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{str(path)!r} is no capture: tilescout.capture(FILE) writes one")
    if document.get("version") != VERSION:
        raise StoreError(
            f"capture {str(path)!r} has version {document.get('version')!r}, this Tilescout reads "
            f"{VERSION}: move it away and capture again"
        )
    try:
        return tuple(_parsed(entry) for entry in document["problems"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"capture {str(path)!r} is damaged ({type(error).__name__}: {error}): move it away and "
            "capture again"
        ) from error


def _parsed(entry: dict[str, Any]) -> CapturedProblem:
    distance = entry["distance"]
    return CapturedProblem(
        op=str(entry["op"]),
        problem=canonical_json(dict(entry["problem"])),
        sku=str(entry["sku"]),
        tier=str(entry["tier"]),
        distance=None if distance is None else float(distance),
        count=int(entry["count"]),
    )


def _captured(count: _Count, num: int) -> CapturedProblem:
    result = count.result
    return CapturedProblem(
        op=result.op,
        problem=result.problem.key(),
        sku=result.gpu,
        tier=result.tier.value,
        distance=result.distance,
        count=num,
    )


def _add(path: Path, news: Iterable[CapturedProblem]) -> None:
    """Adds counts to the file; processes take turns."""
    try:
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = {entry.key: entry for entry in read_capture(path)} if path.exists() else {}
            for entry in news:
                known = total.get(entry.key)
                num = entry.count + (known.count if known else 0)
                total[entry.key] = replace(entry, count=num)
            part = path.with_name(f".{path.name}.part")
            part.write_text(_text(total.values()), encoding="utf-8")
            part.replace(path)
    except OSError as error:
        raise StoreError(
            f"capture {str(path)!r} cannot be written ({error.strerror}): check that its folder "
            "exists and may be written"
        ) from error


def _text(entries: Iterable[CapturedProblem]) -> str:
    ordered = sorted(entries, key=lambda entry: (-entry.count, entry.key))
    problems = [
        {
            "op": entry.op,
            "problem": json.loads(entry.problem),
            "sku": entry.sku,
            "tier": entry.tier,
            "distance": entry.distance,
            "count": entry.count,
        }
        for entry in ordered
    ]
    return json.dumps({"format": FORMAT, "version": VERSION, "problems": problems}, indent=1) + "\n"


def _at_exit() -> None:
    if recorder is not None:
        recorder.close()


def _after_fork() -> None:
    if recorder is not None:
        recorder.after_fork()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
