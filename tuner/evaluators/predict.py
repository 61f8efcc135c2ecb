"""Evaluates configs without a GPU: compile, read the binary, apply the cost model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Self

from ...kernels import registry
from ...kernels.base import Config, Problem
from ...kernels.device import DeviceSpec
from ...search_spaces.parts import PartScope
from ..compile_pool import COMPILE_TIMEOUT_S, CompilePool, CompileResult, kernels_of
from ..prediction.cost_model import predict
from ..records import Evaluation, Provenance, Timing, TrialStatus

__all__ = ["PredictEvaluator"]


class PredictEvaluator:
    """Predicts times of one problem on one device, which need not be at hand.

    Configs are collected in the order they were submitted, so that a search with one seed takes
    one course however fast its compilers run.
    """

    provenance = Provenance.PREDICTED

    def __init__(
        self,
        problem: Problem,
        device: DeviceSpec,
        *,
        num_workers: int | None = None,
        compile_timeout_s: float = COMPILE_TIMEOUT_S,
        pool: CompilePool | None = None,
        scope: PartScope | None = None,
        deadline: float | None = None,
        kept: Collection[Config] = (),
    ) -> None:
        """``pool`` is shared with other evaluators and stays open; without one, makes its own.

        With ``scope``, configs are those of a part, and the time is that of its launches. What
        still compiles at ``deadline``, in seconds of ``time.monotonic``, is taken back, but not the
        ``kept`` configs.
        """
        self._scope = scope
        self._deadline = deadline
        self._kept = frozenset(kept)
        self._num_collected = 0
        self._has_prepared = False
        self._problem = problem
        self._device = device
        self._owned = (
            CompilePool(num_workers, timeout_s=compile_timeout_s) if pool is None else None
        )
        self._pool = pool or self._owned
        assert self._pool is not None
        # As many again are queued: one that takes long does not leave the other cores idle.
        self.capacity = 2 * self._pool.num_workers
        self._in_flight: deque[tuple[Config, Future[CompileResult]]] = deque()

    def submit(self, config: Config) -> None:
        """Starts to compile a config."""
        problem, whole, arch = self._problem, self._whole(config), self._device.arch
        assert self._pool is not None
        module = registry.module_of(problem.op)
        part = self._scope.part if self._scope else ""
        future = self._pool.submit(problem.op, module, config.template, problem, whole, arch, part)
        self._in_flight.append((config, future))

    def prepare(self, config: Config) -> None:
        """See ``Evaluator``."""
        problem, whole = self._problem, self._whole(config)
        assert self._pool is not None
        self._has_prepared = True
        module = registry.module_of(problem.op)
        self._pool.prepare(problem.op, module, config.template, problem, whole, self._device.arch)

    def collect(self, until: float | None = None) -> Evaluation | None:
        """The prediction for the config that was submitted first; waits for its compiler.

        None: it was taken back, because it still compiled at the deadline or at ``until``.
        """
        # However little time there is, something is predicted: one whole config.
        own = self._deadline if self._num_collected or self._scope else None
        limits = [limit for limit in (own, until) if limit is not None]
        if not limits or self._in_flight[0][0] in self._kept:
            return self._collected(None)
        return self._collected(max(0.0, min(limits) - time.monotonic()))

    def finals(self, configs: Sequence[Config]) -> list[Evaluation]:
        """The configs by predicted time, failed ones last; ties go to the earlier."""
        assert not self._in_flight, "collect everything before the finals"
        for config in configs:
            self.submit(config)
        evaluations = [e for e in (self._collected(None) for _ in configs) if e is not None]
        return sorted(evaluations, key=lambda e: float("inf") if e.time_us is None else e.time_us)

    def close(self) -> None:
        """Ends the compilers, unless they are shared."""
        if self._has_prepared and self._pool is not None:
            self._pool.drop_prepared()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole(self, config: Config) -> Config:
        return self._scope.whole(config) if self._scope else config

    def _collected(self, time_left_s: float | None) -> Evaluation | None:
        config, future = self._in_flight.popleft()
        try:
            compiled = future.result(timeout=time_left_s)
        except TimeoutError:
            if future.cancel():
                return None
            compiled = future.result()
        self._num_collected += 1
        return self._evaluate(config, compiled)

    def _evaluate(self, config: Config, compiled: CompileResult) -> Evaluation:
        status, reason, timing = compiled.status, compiled.reason, None
        if status is TrialStatus.OK:
            template = registry.template(self._problem.op, config.template)
            whole = self._whole(config)
            estimates = template.estimate(self._problem, whole, self._device)
            if self._scope:
                kernels = kernels_of(template, self._problem, whole, self._scope.part)
                estimates = tuple(e for e in estimates if e.kernel in kernels)
            prediction = predict(self._problem, self._device, estimates, compiled.facts)
            status, reason = prediction.status, prediction.reason
            if status is TrialStatus.OK:
                timing = _timing(prediction.time_us)
        return Evaluation(
            config=config,
            status=status,
            provenance=self.provenance,
            reason=reason,
            timing=timing,
            facts=compiled.facts,
            compile_s=compiled.compile_s,
        )


def _timing(time_us: float) -> Timing:
    """A prediction has no spread."""
    return Timing(time_us, time_us, time_us, time_us, time_us)
