"""Compiles configs for a named architecture on all CPU cores; needs no GPU.

A job is one config with all its kernels. Triton's and TileLang's own caches on disk keep what was
compiled; this module keeps nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ..kernels import registry
from ..kernels.base import CompiledBinary, Config, KernelSpec, KernelTemplate, Problem
from .prediction.binary import read_facts
from .process_pool import JobCrashedError, JobMemoryError, JobTimeoutError, WorkerPool
from .records import BinaryFacts, TrialStatus

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


@dataclass(frozen=True)
class CompileResult:
    """What the compiler made of a config."""

    status: TrialStatus
    """ok, compile_error, out_of_resources, timeout or crashed."""
    reason: str = ""
    facts: tuple[BinaryFacts, ...] = ()
    """One a kernel, in the order of ``KernelTemplate.kernel_specs``; empty unless ok and asked."""
    compile_s: float = 0.0
    digest: str | None = None
    """Equal for configs whose kernels are equal bit for bit; None without device code."""


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
        compile.
        ``op_module`` is ``registry.module_of(op_name)``. ``cancel`` of the future ends the job. The
        future holds an exception only where
        the fault is not the config's: no cuobjdump, or an error in the template's own code.
        """
        outer: Future[CompileResult] = Future()
        start = time.monotonic()
        compiled = partial(compile_config, op_name, op_module, template, problem, config, arch)
        job = self._pool.submit(self._timeout_s, compiled, part, reads_code=reads_code)

        def settle(inner: Future[CompileResult]) -> None:
            if inner.cancelled():
                outer.cancel()
            elif outer.set_running_or_notify_cancel():
                try:
                    outer.set_result(self._result(inner, time.monotonic() - start))
                except Exception as error:
                    outer.set_exception(error)

        job.add_done_callback(settle)
        outer.add_done_callback(lambda ended: ended.cancelled() and job.cancel())
        return outer

    def close(self) -> None:
        """Kills the workers."""
        self._pool.close()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
    """Compiles one config, or one part of it, in this process; runs in a worker."""
    registry.register(op_name, op_module)
    found = registry.template(op_name, template)
    specs = found.kernel_specs(problem, config)
    if part:
        kernels = kernels_of(found, problem, config, part)
        specs = tuple(spec for spec in specs if spec.name in kernels)
    start = time.monotonic()
    facts: list[BinaryFacts] = []
    digests: list[str | None] = []
    for spec in specs:
        result = _compile_kernel(spec, arch, reads_code)
        facts.extend(result.facts)
        digests.append(result.digest)
        if result.status is not TrialStatus.OK:
            return replace(result, facts=(), compile_s=time.monotonic() - start)
    elapsed_s = time.monotonic() - start
    return CompileResult(TrialStatus.OK, "", tuple(facts), elapsed_s, _joined(digests))


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
    try:
        binary = spec.compile(arch)
    # A compiler raises whatever it likes, plain AssertionError and RuntimeError included.
    except Exception as error:
        reason = short_reason(error)
        is_resource = _OUT_OF_RESOURCES.search(f"{type(error).__name__} {error}") is not None
        status = TrialStatus.OUT_OF_RESOURCES if is_resource else TrialStatus.COMPILE_ERROR
        return CompileResult(status, reason)
    facts = (read_facts(binary),) if reads_code else ()
    return CompileResult(TrialStatus.OK, facts=facts, digest=_digest(binary))


def _digest(binary: CompiledBinary) -> str | None:
    """Hash of the code and of what a launch takes from the compiler."""
    if not binary.cubin:
        return None
    resources = (binary.threads_per_block, binary.smem_bytes, binary.tmem_columns)
    return hashlib.sha256(binary.cubin + repr((binary.kernel, resources)).encode()).hexdigest()


def _joined(digests: Sequence[str | None]) -> str | None:
    """One digest for all kernels of a config, None where one of them has none."""
    known = [digest for digest in digests if digest is not None]
    return " ".join(known) if known and len(known) == len(digests) else None


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
