"""A clock that only waiting moves, compilers that take time by it, and a GPU that takes turns.

The queue is the compile pool's own; what stands in for a process is a time at which it ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from formula_evaluator import timing
from tilescout.kernels import registry
from tilescout.kernels.base import Config, Problem
from tilescout.search_spaces.parts import PartScope
from tilescout.tuner.compile_pool import kernels_of
from tilescout.tuner.compile_pool_jobs import KernelJobs, KernelKey
from tilescout.tuner.compile_result import CompileResult
from tilescout.tuner.records import Evaluation, Provenance, TrialStatus

_ARCH = 90
READ_S = 1.0
"""A disassembler takes about a third of the time of a compile."""


class WaitingCompilers:
    """Compilers of a run and the clock of everybody in it."""

    def __init__(self, num_workers: int, compile_s: Callable[[object], float]) -> None:
        """``compile_s`` says how long a kernel's specification takes."""
        self.num_workers = num_workers
        self.now = 0.0
        self.busy_s = 0.0
        self.num_compiled = 0
        self._compile_s = compile_s
        self._ends: list[tuple[float, int, Future[CompileResult]]] = []
        self._count = itertools.count()
        self.kernels = KernelJobs(num_workers, self._start)

    def _start(self, key: KernelKey) -> Future[CompileResult]:
        future: Future[CompileResult] = Future()
        took_s = READ_S if key.reads_code else self._compile_s(key.spec)
        self.busy_s += took_s
        self.num_compiled += not key.reads_code
        heapq.heappush(self._ends, (self.now + took_s, next(self._count), future))
        return future

    @property
    def next_end(self) -> float:
        """When the next kernel is compiled."""
        return self._ends[0][0] if self._ends else float("inf")

    def move_to(self, when: float) -> None:
        """Lets time pass; what ends on the way makes room for what is queued."""
        while self._ends and self._ends[0][0] <= when:
            end, _, future = heapq.heappop(self._ends)
            self.now = max(self.now, end)
            if future.set_running_or_notify_cancel():
                future.set_result(CompileResult(TrialStatus.OK))
        self.now = max(self.now, when)


class WaitingEvaluator:
    """Compiles on ``WaitingCompilers``; each config then holds the GPU for ``measure_s``."""

    provenance = Provenance.MEASURED

    def __init__(
        self,
        problem: Problem,
        compilers: WaitingCompilers,
        time_us: Callable[[Config, str], float],
        *,
        scope: PartScope | None = None,
        deadline: float | None = None,
        measure_s: float = 0.1,
        log: list[tuple[float, str, Config]] | None = None,
    ) -> None:
        self.capacity = compilers.num_workers + 2
        self._problem = problem
        self._compilers = compilers
        self._time_us = time_us
        self._scope = scope
        self._deadline = deadline
        self._measure_s = measure_s
        self._log = [] if log is None else log
        self._in_flight: list[tuple[Config, Future[CompileResult]]] = []
        self._ready: list[Config] = []
        self._has_ended = scope is not None

    def _keys(self, config: Config, part: str) -> list[KernelKey]:
        template = registry.template(self._problem.op, config.template)
        specs = template.kernel_specs(self._problem, config)
        names = kernels_of(template, self._problem, config, part) if part else ()
        return [KernelKey(s, _ARCH, False) for s in specs if not part or s.name in names]

    def submit(self, config: Config) -> None:
        part = self._scope.part if self._scope else ""
        job = self._compilers.kernels.submit(self._keys(self._whole(config), part))
        self._in_flight.append((config, job))
        job.add_done_callback(lambda ended: ended.cancelled() or self._ready.append(config))

    def prepare(self, config: Config) -> None:
        self._compilers.kernels.prepare(self._keys(self._whole(config), ""))

    def collect(self, until: float | None = None) -> Evaluation | None:
        own = self._deadline if self._has_ended else None
        limit = min((t for t in (own, until) if t is not None), default=float("inf"))
        while not self._ready:
            if self._compilers.next_end > limit:
                self._compilers.move_to(max(limit, self._compilers.now))
                _, job = self._in_flight.pop()
                job.cancel()
                return None
            self._compilers.move_to(self._compilers.next_end)
        config = self._ready.pop(0)
        self._in_flight = [(c, job) for c, job in self._in_flight if c != config]
        self._compilers.move_to(self._compilers.now + self._measure_s)
        self._has_ended = True
        part = self._scope.part if self._scope else ""
        self._log.append((self._compilers.now, part, config))
        time_us = self._time_us(self._whole(config), part)
        return Evaluation(config, TrialStatus.OK, self.provenance, timing=timing(time_us))

    def finals(self, configs: Sequence[Config]) -> list[Evaluation]:
        self._compilers.move_to(self._compilers.now + 0.3 * len(configs))
        ended = [
            Evaluation(c, TrialStatus.OK, self.provenance, timing=timing(self._time_us(c, "")))
            for c in configs
        ]
        return sorted(ended, key=lambda evaluation: evaluation.time_us)

    def close(self) -> None:
        if self._scope is None:
            self._compilers.kernels.drop_prepared()

    def _whole(self, config: Config) -> Config:
        return self._scope.whole(config) if self._scope else config
