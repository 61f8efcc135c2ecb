"""Keeps worker processes from taking the machine's memory: kills the one that takes too much.

A compiler that runs away would otherwise be ended by the kernel's out-of-memory killer, which may
well choose the tuner. A limit of address space will not do: CUDA reserves far more than it uses.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["MemoryWatch", "memory_share"]

_POLL_S = 0.2
_USABLE_SHARE = 0.8
_LEAST_BYTES = 2 * 2**30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_share(num_workers: int) -> int:
    """Bytes that one of ``num_workers`` processes may hold: an even part of most of the memory.

    Never less than 2 GiB, which an honest compiler may need.
    """
    total = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    with suppress(OSError, ValueError):  # "max" where the container has no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(_LEAST_BYTES, int(_USABLE_SHARE * total / num_workers))


class MemoryWatch:
    """A thread that looks at the workers' memory, the programs they started included."""

    def __init__(self, worker_pids: Callable[[], Iterable[int]], limit_bytes: int) -> None:
        """Starts watching.

        Args:
            worker_pids: Processes to watch, each the leader of its group; those that are no child
                of this process are left alone.
            limit_bytes: What one worker may hold.
        """
        self._worker_pids = worker_pids
        self._limit_bytes = limit_bytes
        self._killed: dict[int, str] = {}
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="memory-watch", daemon=True).start()

    def reason(self, pid: int) -> str | None:
        """Why this watch killed the process, or None if it did not."""
        return self._killed.get(pid)

    def close(self) -> None:
        """Ends the watch."""
        self._is_closed.set()

    def _watch(self) -> None:
        while not self._is_closed.wait(_POLL_S):
            for pid in self._worker_pids():
                held = _tree_bytes(pid) if _parent(pid) == os.getpid() else 0
                if held > self._limit_bytes:
                    limit = f"{self._limit_bytes / 2**30:.1f} GiB"
                    self._killed[pid] = f"took {held / 2**30:.1f} GiB of memory, above {limit}"
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)


def _tree_bytes(pid: int) -> int:
    """Resident memory of a process and all below it."""
    held = 0
    with suppress(OSError, ValueError, IndexError):
        held = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                held += _tree_bytes(int(child))
    return held


def _parent(pid: int) -> int | None:
    """Parent of the process, None if it is gone."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None
