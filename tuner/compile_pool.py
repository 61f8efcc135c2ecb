"""Compiles configs for a named architecture on all CPU cores; needs no GPU.

A config is its kernels: each is a job of its own, so that those of one config compile side by side
and none twice (``compile_pool_jobs``). Caches on disk, Triton's and TileLang's, keep the binaries.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from concurrent.futures import Future
from contextlib import suppress

from ..kernels import registry
from ..kernels.base import CompiledBinary, Config, KernelSpec, KernelTemplate, Problem
from .compile_pool_jobs import KernelJobs, KernelKey
from .compile_result import CompileResult, joined
from .prediction.binary import read_facts
from .process_pool import JobCrashedError, JobMemoryError, JobTimeoutError, WorkerPool
from .records import TrialStatus

__all__ = ["COMPILE_TIMEOUT_S", "CompilePool", "CompileResult", "default_num_workers", "kernels_of"]

COMPILE_TIMEOUT_S = 120.0
"""Far above any compile seen (a large attention tile takes about 20 s on one slow core)."""

_MAX_REASON = 200
_OUT_OF_RESOURCES = re.compile(
    r"out of resource|OutOfResources|uses too much (shared|global|const\w*|local) data"
    r"|too many resources|exceeds? .{0,40}(shared memory|tensor memory|tmem|registers)",
    re.IGNORECASE,
)
_MEANINGLESS = re.compile(
    r"^[\s\-=*^~|'\"`(){}\[\]]*$|^Traceback|^During handling|^\s*at \d+:\d+:$"
)


def default_num_workers() -> int:
    """The CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


class CompilePool:
    """Processes that compile; a compiler that crashes or hangs costs one config."""

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        timeout_s: float = COMPILE_TIMEOUT_S,
        memory_limit_bytes: int | None = None,
    ) -> None:
        """Starts no process yet; ``memory_limit_bytes`` is of one, see ``WorkerPool``."""
        self.num_workers = num_workers or default_num_workers()
        self._timeout_s = timeout_s
        self._pool = WorkerPool(
            self.num_workers, initializer=_load_compiler, memory_limit_bytes=memory_limit_bytes
        )
        self._kernels = KernelJobs(self.num_workers, self._compile)

    def start(self) -> None:
        """Starts the processes now, so that they load while the caller does something else."""
        self._pool.start()

    def submit(  # noqa: PLR0917  (a job is these seven)
        self,
        op_name: str,
        op_module: str,
        template: str,
        problem: Problem,
        config: Config,
        arch: int,
        part: str = "",
        *,
        reads_code: bool = True,
    ) -> Future[CompileResult]:
        """Compiles every kernel of the config for ``arch``, or those of one part.

        ``reads_code=False`` leaves the facts out: a disassembler takes a third of the time of a
        compile. ``op_module`` is ``registry.module_of(op_name)``. ``cancel`` of the future gives up
        waiting. The future holds an exception only where the fault is not the config's: no
        cuobjdump, or an error in the template's own code.
        """
        try:
            specs = _specs(op_name, op_module, template, problem, config, part)
        except Exception as error:
            failed: Future[CompileResult] = Future()
            failed.set_exception(error)
            return failed
        return self._kernels.submit([KernelKey(spec, arch, reads_code) for spec in specs])

    def prepare(  # noqa: PLR0917  (like ``submit``)
        self,
        op_name: str,
        op_module: str,
        template: str,
        problem: Problem,
        config: Config,
        arch: int,
        *,
        reads_code: bool = True,
    ) -> None:
        """Compiles a config that may be submitted later, when there is nothing else to do.

        With ``reads_code=False`` code is read when all that is prepared is compiled. What is wrong
        with it is told when it is submitted.
        """
        with suppress(Exception):
            specs = _specs(op_name, op_module, template, problem, config, "")
            self._kernels.prepare([KernelKey(spec, arch, reads_code) for spec in specs])

    def drop_prepared(self) -> None:
        """Forgets what was prepared and has not begun."""
        self._kernels.drop_prepared()

    def close(self) -> None:
        """Kills the workers."""
        self._kernels.close()
        self._pool.close()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compile(self, key: KernelKey) -> Future[CompileResult]:
        """Starts a compiler; every fate of it is a result."""
        outer: Future[CompileResult] = Future()
        start = time.monotonic()
        job = self._pool.submit(self._timeout_s, _compile_kernel, *key)

        def settle(inner: Future[CompileResult]) -> None:
            if inner.cancelled():
                outer.cancel()
            elif outer.set_running_or_notify_cancel():
                try:
                    outer.set_result(self._result(inner, time.monotonic() - start))
                except Exception as error:
                    outer.set_exception(error)

        outer.add_done_callback(lambda ended: ended.cancelled() and job.cancel())
        job.add_done_callback(settle)
        return outer

    def _result(self, job: Future[CompileResult], elapsed_s: float) -> CompileResult:
        try:
            return job.result()
        except JobTimeoutError as error:
            reason = f"compiling {error}"
            return CompileResult(TrialStatus.TIMEOUT, reason, compile_s=self._timeout_s)
        except JobMemoryError as error:
            reason = f"compiling {error}"
            return CompileResult(TrialStatus.OUT_OF_RESOURCES, reason, compile_s=elapsed_s)
        except JobCrashedError as error:
            return CompileResult(TrialStatus.CRASHED, _clip(str(error)), compile_s=elapsed_s)


def compile_config(  # noqa: PLR0917  (the job of ``CompilePool.submit``)
    op_name: str,
    op_module: str,
    template: str,
    problem: Problem,
    config: Config,
    arch: int,
    part: str = "",
    *,
    reads_code: bool = True,
) -> CompileResult:
    """Compiles one config, or one part of it, in this process, kernel after kernel."""
    kernels: list[CompileResult] = []
    for spec in _specs(op_name, op_module, template, problem, config, part):
        kernels.append(_compile_kernel(spec, arch, reads_code))
        if kernels[-1].status is not TrialStatus.OK:
            break
    return joined(kernels)


def _specs(  # noqa: PLR0917  (of the job of ``CompilePool.submit``)
    op_name: str, op_module: str, template: str, problem: Problem, config: Config, part: str
) -> tuple[KernelSpec, ...]:
    """The kernels of a config, or of one part of it."""
    registry.register(op_name, op_module)
    found = registry.template(op_name, template)
    specs = tuple(found.kernel_specs(problem, config))
    if not part:
        return specs
    kernels = kernels_of(found, problem, config, part)
    return tuple(spec for spec in specs if spec.name in kernels)


def kernels_of(
    template: KernelTemplate, problem: Problem, config: Config, part: str
) -> tuple[str, ...]:
    """Names of the kernels that the part launches."""
    known = {found.name: found.kernels for found in template.parts(problem, config)}
    assert part in known, f"{template.op}/{template.name} names parts {list(known)}, not {part!r}"
    return known[part]


def _load_compiler() -> None:
    """Loads what nearly every job needs, in all processes at a time and before the first job."""
    with suppress(ImportError):
        import triton.compiler  # noqa: F401


def _compile_kernel(spec: KernelSpec, arch: int, reads_code: bool) -> CompileResult:
    """Compiles one kernel in this process; runs in a worker."""
    start = time.monotonic()
    try:
        binary = spec.compile(arch)
    # A compiler raises whatever it likes, plain AssertionError and RuntimeError included.
    except Exception as error:
        reason = short_reason(error)
        is_resource = _OUT_OF_RESOURCES.search(f"{type(error).__name__} {error}") is not None
        status = TrialStatus.OUT_OF_RESOURCES if is_resource else TrialStatus.COMPILE_ERROR
        return CompileResult(status, reason, compile_s=time.monotonic() - start)
    facts = (read_facts(binary),) if reads_code else ()
    elapsed_s = time.monotonic() - start
    return CompileResult(TrialStatus.OK, "", facts, elapsed_s, _digest(binary))


def _digest(binary: CompiledBinary) -> str | None:
    """Hash of the code and of what a launch takes from the compiler."""
    if not binary.cubin:
        return None
    resources = (binary.threads_per_block, binary.smem_bytes, binary.tmem_columns)
    return hashlib.sha256(binary.cubin + repr((binary.kernel, resources)).encode()).hexdigest()


def short_reason(error: BaseException) -> str:
    """The line of an exception that says most, at most 200 characters, with the type's name."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    lines = [line for line in lines if not _MEANINGLESS.match(line)]
    telling = [line for line in lines if _OUT_OF_RESOURCES.search(line)]
    telling += [line for line in lines if re.search(r"\berror\b|fatal|assert", line, re.I)]
    text = next(iter(telling or lines), "")
    name = type(error).__name__
    return _clip(f"{name}: {text}" if text else name)


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"
