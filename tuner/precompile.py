"""Compiles every kernel that calls with some answers can reach, in parallel, into on-disk caches.

Nothing is launched and no GPU is needed: the binaries are for a named architecture.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import UnsupportedError
from ..kernels.base import KernelSpec
from ..kernels.device import DeviceSpec
from .compile_pool import COMPILE_TIMEOUT_S, default_num_workers, short_reason
from .dispatch import find_device
from .explain import LookupResult
from .locking import resolve_workload
from .process_pool import JobCrashedError, JobTimeoutError, WorkerPool
from .reach import reached_specs

__all__ = ["PrecompiledKernel", "cache_folders", "precompile", "precompile_workload"]


@dataclass(frozen=True)
class PrecompiledKernel:
    """One kernel of an answer, compiled."""

    op: str
    template: str
    kernel: str
    compile_s: float
    """Time in the compiler, or to read what was compiled before."""
    smem_bytes: int


def cache_folders(folder: Path) -> dict[str, str]:
    """Environment under which both compilers keep what they make below ``folder``."""
    return {"TRITON_CACHE_DIR": str(folder / "triton"), "XDG_CACHE_HOME": str(folder / "xdg")}


def precompile_workload(
    workload: str,
    *,
    gpu: str | DeviceSpec | None = None,
    num_workers: int | None = None,
) -> tuple[tuple[LookupResult, ...], tuple[PrecompiledKernel, ...]]:
    """Compiles what calls with the problems of a workload reach into the caches of this user.

    Args:
        workload: Name of a workload, or path of a workload file.
        gpu: SKU name or spec; None: the GPU at hand.
        num_workers: Processes; None: the cores at hand.

    Raises:
        UnsupportedError: no template serves any of the problems, or a kernel does not compile.
        StoreError: a database cannot be read.
    """
    device = find_device(gpu)
    results = resolve_workload(workload, device)
    return results, precompile(results, device, num_workers=num_workers)


def precompile(
    results: Iterable[LookupResult],
    device: DeviceSpec,
    *,
    folder: Path | None = None,
    num_workers: int | None = None,
) -> tuple[PrecompiledKernel, ...]:
    """Compiles what calls with these answers reach, each kernel once.

    Args:
        results: Answers of look-ups.
        device: Compile for its architecture.
        folder: Where caches go; None: where they are.
        num_workers: Processes; None: the cores at hand.

    Raises:
        UnsupportedError: a kernel does not compile.
    """
    wanted: dict[KernelSpec, LookupResult] = {}
    for result in results:
        for spec in reached_specs(result):
            wanted.setdefault(spec, result)
    initializer = partial(_use_folder, folder) if folder is not None else None
    pool = WorkerPool(num_workers or default_num_workers(), initializer=initializer)
    try:
        jobs = [
            (result, spec, pool.submit(COMPILE_TIMEOUT_S, _compile, spec, device.arch))
            for spec, result in wanted.items()
        ]
        return tuple(_kernel_of(result, spec, job) for result, spec, job in jobs)
    finally:
        pool.close()


def _use_folder(folder: Path) -> None:
    os.environ.update(cache_folders(folder))


def _compile(spec: KernelSpec, arch: int) -> tuple[float, int]:
    """(seconds, shared memory) of one kernel; runs in a worker."""
    start = time.monotonic()
    binary = spec.compile(arch)
    return time.monotonic() - start, binary.smem_bytes


def _kernel_of(
    result: LookupResult, spec: KernelSpec, job: Future[tuple[float, int]]
) -> PrecompiledKernel:
    try:
        compile_s, smem_bytes = job.result()
    # A compiler raises whatever it likes.
    except (Exception, JobCrashedError, JobTimeoutError) as error:
        raise UnsupportedError(
            f"kernel {spec.name} of {result.op}/{result.template}, config {result.config}, does "
            f"not compile for {result.gpu}: {short_reason(error)}; tune {result.problem} again"
        ) from error
    return PrecompiledKernel(result.op, result.template, spec.name, compile_s, smem_bytes)
