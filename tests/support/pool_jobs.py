"""Jobs for worker pools: each ends in another way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tilescout.errors import UnknownNameError


def add(a: int, *, b: int) -> int:
    return a + b


def divide(a: int, b: int) -> float:
    return a / b


def raise_unknown_name() -> None:
    raise UnknownNameError("thing", "x", ["y"])


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def crash(code: int) -> None:
    say("LLVM ERROR: out of words")
    os._exit(code)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


def own_pid() -> int:
    return os.getpid()


def crash_elsewhere(pid: int) -> int:
    """Returns in the process of this id only."""
    if os.getpid() != pid:
        crash(3)
    return pid


def hang_with_child(path: str) -> None:
    """Writes the ids of this process and of a program it started, then hangs."""
    child = subprocess.Popen(["sleep", "600"])
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    child.wait()


def fail() -> None:
    raise RuntimeError("no luck")


def let_child_eat_memory(num_bytes: int) -> None:
    """As a compiler whose assembler runs away."""
    program = f"import time; eaten = b'x' * {num_bytes}; time.sleep(600)"
    subprocess.run([sys.executable, "-c", program], check=True)
