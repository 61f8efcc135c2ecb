"""Fills the caches of libraries that compile or tune themselves for minutes, for ``gdn.py``.

One process a task, as many at once as there are cores, until the budget is spent. Triton's tuners
compile side by side and take turns to time, so that what they choose is not what the others left
them of the GPU; they keep their choice beside the kernels.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from side_by_side import OURS, Baseline, Cell
from tilescout.kernels.base import Problem
from tilescout.kernels.registry import operation, template

__all__ = ["FillTask", "fill", "use_cache", "warm"]

_POLL_S = 0.2
_FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "XDG_CACHE_HOME": "others",
    "CUTE_DSL_CACHE_DIR": "cute",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Environment variables that name the compilers' caches, and the folder of each."""


@dataclass(frozen=True)
class FillTask:
    """One library on one row of the table."""

    name: str
    label: str
    state_layout: str


@dataclass
class _Running:
    task: FillTask
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float = field(default_factory=time.monotonic)


def use_cache(folder: Path) -> None:
    """Makes all compilers of this process and of its children keep what they make in a folder."""
    for variable, name in _FOLDERS.items():
        path = folder.resolve() / name
        path.mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(path)


def fill(
    script: Sequence[str],
    tasks: Sequence[FillTask],
    folder: Path,
    *,
    budget_s: float,
    num_processes: int | None = None,
) -> int:
    """Runs every task in a process; returns how many did not end well.

    Args:
        script: Command line of the benchmark.
        tasks: What to fill, most important first.
        folder: Of the caches.
        budget_s: When it is spent, what runs is ended and the rest is not begun.
        num_processes: At once; None: the CPU cores.
    """
    deadline = time.monotonic() + budget_s
    most = num_processes or len(os.sched_getaffinity(0))
    waiting, failed = list(tasks), 0
    running: list[_Running] = []
    while waiting or running:
        is_over = time.monotonic() >= deadline
        while waiting and len(running) < most and not is_over:
            running.append(_start(script, waiting.pop(0), folder))
        for one in list(running):
            if one.process.poll() is None and not is_over:
                continue
            running.remove(one)
            failed += not _end(one)
        if is_over:
            for task in waiting:
                _tell(task, 0.0, "not begun: the budget is spent")
            return failed + len(waiting)
        time.sleep(_POLL_S)
    return failed


def _start(script: Sequence[str], task: FillTask, folder: Path) -> _Running:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the task has ended
    command = [*script, "--cache", str(folder), "--state-layout", task.state_layout]
    command += ["--warm", task.name, task.label]
    # A session of its own: compilers that it started end with it.
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    return _Running(task, process, output)


def _end(one: _Running) -> bool:
    """Says what became of a task, and ends it where it still runs; whether it ended well."""
    code = one.process.poll()
    if code is None:
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
    one.output.seek(0)
    lines = one.output.read().decode("utf-8", "replace").strip().splitlines()
    one.output.close()
    elapsed_s = time.monotonic() - one.started
    last = lines[-1][:200] if lines else ""
    words = "ended: the budget is spent" if code is None else "ok" if code == 0 else last
    _tell(one.task, elapsed_s, words)
    return code == 0


def _tell(task: FillTask, elapsed_s: float, words: str) -> None:
    print(f"{task.name:>13} {task.label:>14} {elapsed_s:>6.0f} s  {words}", flush=True)


def warm(
    name: str,
    problem: Problem,
    folder: Path,
    databases: Sequence[str] | None,
    libraries: Mapping[str, Baseline],
) -> None:
    """Runs one contender once on one copy, so that it compiles and tunes; the body of a task."""
    op = operation(problem.op)
    inputs = op.make_inputs(problem, device="cuda", seed=0)
    cell = Cell(problem, [inputs], [op.make_outputs(problem, inputs)])
    if name == OURS:
        _warm_ours(cell, databases)
        return
    with _timing_in_turn(folder):
        libraries[name](cell)


def _warm_ours(cell: Cell, databases: Sequence[str] | None) -> None:
    from tilescout.search_spaces.registry import joint_space
    from tilescout.tuner.dispatch import current_snapshot
    from tilescout.tuner.environment import current_device

    device = current_device()
    assert device is not None
    known = operation(cell.problem.op).template_names
    libraries = [name for name in known if template(cell.problem.op, name).is_external]
    found = current_snapshot(databases).lookup(cell.problem, device, without=frozenset(libraries))
    for config in (found.config, joint_space(cell.problem, device).default):
        chosen = template(cell.problem.op, config.template)
        launcher = chosen.build(cell.problem, config, cell.inputs[0])
        launcher.launch(cell.inputs[0], cell.outputs[0])


@contextmanager
def _timing_in_turn(folder: Path) -> Iterator[None]:
    """Triton's tuners in this process compile at will and time while they hold a lock."""
    from triton.runtime.autotuner import Autotuner

    kept = vars(Autotuner)["do_bench"]
    with (folder / "timing.lock").open("w") as lock:

        def do_bench(tuner: Any) -> Callable[..., Any]:
            benchmark = tuner._do_bench or _benchmarker()

            def timed(kernel_call: Callable[[], None], quantiles: Any) -> Any:
                kernel_call()  # compiles
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    return benchmark(kernel_call, quantiles=quantiles)
                finally:
                    fcntl.flock(lock, fcntl.LOCK_UN)

            return timed

        Autotuner.do_bench = property(do_bench)
        try:
            yield
        finally:
            Autotuner.do_bench = kept


def _benchmarker() -> Callable[..., Any]:
    from triton.runtime import driver

    found: Callable[..., Any] = driver.active.get_benchmarker()
    return found
