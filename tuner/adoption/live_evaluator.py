"""Evaluates configs of a user's kernel in this process, on clones of the arguments of a call.

Timing is Triton's own (``Autotuner._bench``), so that ``reset_to_zero``, ``restore_value`` and
hooks do what they do there. What differs: the caller's tensors are never touched, and a config
whose results are not those of the reference, or of the author's first config, is refused.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...kernels.base import Config
from ..compile_pool import short_reason
from ..launch_errors import failures, status_of
from ..records import Evaluation, Provenance, Timing, TrialStatus

__all__ = ["Call", "Configs", "LiveCall", "LiveEvaluator", "Reference"]

Reference = Callable[..., Mapping[str, Any]]
"""Takes the arguments by name; returns the right values of those that the kernel writes."""

NUM_FINAL_ROUNDS = 3
_SWITCH_MARGIN = 0.01
"""A rival must be faster by more: two timings of one config differ by as much."""
_TOLERANCES = {"float64": 1e-9, "float32": 1e-2, "float16": 2e-2, "bfloat16": 4e-2}
"""Largest error over the largest value. fp32 is loose because tl.dot may compute in TF32."""
_OTHER_TOLERANCE = 0.15
"""Of narrower floats: one step of e4m3 is an eighth."""


class Call(Protocol):
    """A call of a kernel that can be repeated with any of its configs."""

    def cloned(self) -> Call:
        """The same call on clones."""

    def run(self, config: Any) -> dict[str, Any]:
        """Runs the kernel once; what it has written, by name."""

    def expected(self, reference: Any) -> dict[str, Any]:
        """What the reference says of that."""

    def time(self, config: Any) -> Sequence[float]:
        """Median, low and high of its times in milliseconds."""


class Configs(Protocol):
    """The author's configs and ours."""

    def theirs(self, config: Config) -> Any | None:
        """The author's form of one of ours."""


@dataclass(frozen=True)
class LiveCall:
    """One call of a kernel: what its autotuner was run with."""

    autotuner: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def cloned(self) -> LiveCall:
        """The same call on clones; a tensor that is passed twice is cloned once."""
        clones: dict[int, Any] = {}

        def clone(value: Any) -> Any:
            if not _is_tensor(value):
                return value
            if id(value) not in clones:
                clones[id(value)] = value.clone()
            return clones[id(value)]

        args = tuple(clone(value) for value in self.args)
        kwargs = {name: clone(value) for name, value in self.kwargs.items()}
        return LiveCall(self.autotuner, args, kwargs)

    @property
    def named(self) -> dict[str, Any]:
        """Arguments of the kernel by name, as far as they are given."""
        names = self.autotuner.arg_names
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        return {name: value for name, value in given.items() if name in names}

    def expected(self, reference: Reference) -> dict[str, Any]:
        """What the reference says of the tensors that the kernel writes, by name."""
        return dict(reference(**self.named))

    def time(self, config: Any) -> Sequence[float]:
        """Triton's own timing, hooks included: median, low and high, in milliseconds."""
        tuner = self.autotuner
        tuner.nargs = dict(zip(tuner.arg_names, self.args, strict=False))
        try:
            found: Sequence[float] = tuner._bench(*self.args, config=config, **self.kwargs)
            return found
        finally:
            tuner.nargs = None

    def run(self, config: Any) -> dict[str, Any]:
        """Runs the kernel once, from the state that timing it starts from; its tensors by name."""
        tuner = self.autotuner
        named = {**self.named, **config.all_kwargs()}
        if config.pre_hook:
            config.pre_hook(named)
        if tuner.user_defined_pre_hook:
            tuner.pre_hook(named)
        else:
            tuner.pre_hook(named, reset_only=True)
        tuner.fn.run(*self.args, **self.kwargs, **config.all_kwargs())
        return {name: value for name, value in self.named.items() if _is_tensor(value)}


class LiveEvaluator:
    """One config at a time; an evaluator of ``run_study``."""

    provenance = Provenance.MEASURED
    capacity = 1

    def __init__(self, call: Call, table: Configs, first: Any, reference: Any) -> None:
        """Keeps clones of the arguments and what is right for them.

        Args:
            call: The call at hand; its tensors are only read.
            table: Configs of the kernel.
            first: The config that is taken to be right where there is no reference.
            reference: Says what is right; None: ``first`` does.
        """
        self._call = call
        self._table = table
        self._queue: deque[Config] = deque()
        if reference is not None:
            self._expected = call.cloned().expected(reference)
        else:
            self._expected = call.cloned().run(first)

    def submit(self, config: Config) -> None:
        """Queues the config."""
        self._queue.append(config)

    def prepare(self, config: Config) -> None:
        """See ``Evaluator``; nothing is done early."""

    def collect(self, until: float | None = None) -> Evaluation:
        """Verifies and times the next config."""
        return self._evaluate(self._queue.popleft())

    def finals(self, configs: Sequence[Config]) -> list[Evaluation]:
        """Times the configs in turn, a few rounds; the first wins unless it is clearly beaten."""
        rounds: dict[Config, list[Evaluation]] = {config: [] for config in configs}
        for _ in range(NUM_FINAL_ROUNDS):
            for config in configs:
                rounds[config].append(self._evaluate(config))
        ended = [_middle(evaluations) for evaluations in rounds.values()]
        sound = [e for e in ended if e.status is TrialStatus.OK]
        failed = [e for e in ended if e.status is not TrialStatus.OK]
        incumbent = ended[0].config if ended else None

        def time_of(evaluation: Evaluation) -> float:
            bonus = 1.0 - _SWITCH_MARGIN if evaluation.config == incumbent else 1.0
            return (evaluation.time_us or 0.0) * bonus

        return sorted(sound, key=time_of) + failed

    def close(self) -> None:
        """Forgets the clones."""
        self._expected = {}

    def _evaluate(self, config: Config) -> Evaluation:
        theirs = self._table.theirs(config)
        start = time.monotonic()
        ended = Evaluation(config, TrialStatus.OK, Provenance.MEASURED)
        try:
            results = self._call.cloned().run(theirs)
            reason, worst = _difference(self._expected, results)
            if reason is not None:
                ended = replace(ended, status=TrialStatus.INCORRECT, reason=reason)
            else:
                ended = replace(ended, timing=self._time(theirs))
            ended = replace(ended, max_abs_error=worst)
        except failures() as error:
            ended = replace(ended, status=status_of(error), reason=short_reason(error))
        return replace(ended, measure_s=time.monotonic() - start)

    def _time(self, config: Any) -> Timing:
        """Of the call on clones."""
        median, low, high = (1e3 * t for t in self._call.cloned().time(config))  # milliseconds
        if median == float("inf"):
            raise RuntimeError("Triton could not time it: too many resources, or ptxas failed")
        return Timing(median, low, high, low, high, num_samples=1)


def _middle(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluation of median time, or the one that failed."""
    for evaluation in evaluations:
        if evaluation.status is not TrialStatus.OK:
            return evaluation
    median = statistics.median_low([e.time_us or 0.0 for e in evaluations])
    return next(e for e in evaluations if e.time_us == median)


def _difference(
    expected: Mapping[str, Any], results: Mapping[str, Any]
) -> tuple[str | None, float]:
    """(what is wrong or None, largest absolute error)."""
    import torch

    worst = 0.0
    for name, right in expected.items():
        got = results.get(name)
        if got is None:
            return f"argument {name!r} is no tensor, but has a reference", worst
        if not right.is_floating_point():
            if not torch.equal(right, got):
                return f"{name} differs in {int((right != got).sum())} integers", worst
            continue
        a, b = got.double(), right.double()
        if not torch.equal(a.isnan(), b.isnan()):
            return f"{name} has {int(a.isnan().sum())} NaN, {int(b.isnan().sum())} are right", worst
        finite = b.isfinite()
        if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
            return f"{name} differs where values are infinite", worst
        if not bool(finite.any()):
            continue
        error = float((a - b)[finite].abs().max())
        scale = float(b[finite].abs().max())
        worst = max(worst, error)
        dtype = str(right.dtype).removeprefix("torch.")
        tolerance = _TOLERANCES.get(dtype, _OTHER_TOLERANCE)
        if not error <= tolerance * max(scale, 1e-30):
            return f"{name}: largest error {error:.3g} at values up to {scale:.3g}", worst
    return None, worst


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "clone")
