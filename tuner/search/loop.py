"""The ask, evaluate and tell of every search, whatever evaluates and whatever remembers."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..evaluators.base import Evaluator
from ..records import Evaluation
from .sampler import Sampler
from .stopping import Stopping, StopReason

__all__ = ["search"]


def search(
    sampler: Sampler,
    evaluator: Evaluator,
    stopping: Stopping,
    ended: Callable[[Evaluation], None],
    clock: Callable[[], float] = time.monotonic,
) -> StopReason:
    """Keeps the evaluator full until a limit is met, then waits for what is in flight.

    What still compiles when the time is up is taken back by an evaluator that knows the deadline.

    Args:
        sampler: says what to try; it is told of every end.
        evaluator: evaluates; stays open.
        stopping: the limits; counts what is started here.
        ended: called with each evaluation as it ends, before anything else learns of it.
        clock: seconds, monotonic.
    """
    num_in_flight = 0
    reason: StopReason | None = None
    while True:
        while num_in_flight < evaluator.capacity and reason is None:
            reason = stopping.reason(clock())
            configs = [] if reason else sampler.ask(1)
            if not configs:
                reason = reason or StopReason.EXHAUSTED
                break
            evaluator.submit(configs[0])
            stopping.started()
            num_in_flight += 1
        if not num_in_flight:
            return reason or StopReason.EXHAUSTED
        evaluation = evaluator.collect()
        num_in_flight -= 1
        if evaluation is None:
            continue
        ended(evaluation)
        sampler.tell(evaluation)
        stopping.ended(evaluation)
