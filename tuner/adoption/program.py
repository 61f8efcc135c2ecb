"""A TileLang program factory whose parameters are looked up: what ``autotune`` makes of one.

A factory takes the sizes of a problem and the parameters of a config and returns a kernel
(``@tilelang.jit`` over a function that returns a ``prim_func``). Here it takes the sizes only.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...errors import NoWinnerError, UsageError
from ...kernels.base import Config, canonical_json
from ..dispatch import Policy, Snapshot, current_snapshot
from ..dispatch_policy import current_policy
from ..explain import LookupResult
from ..tiers import Tier
from .kernel import is_tuning, plain
from .live_evaluator import LiveEvaluator
from .live_search import is_capturing, lookup_live, search_live
from .operation import KernelProblem, register_kernel, source_of

__all__ = ["PROGRAM_MISSES", "TEMPLATE", "Program", "ProgramFactory", "is_program_factory"]

TEMPLATE: Final = "tilelang"
"""Name of the one template of a user's program."""

PROGRAM_MISSES = ("default", "tune")
"""What may happen where nothing is known."""

Timer = Callable[[Callable[[], object]], Sequence[float]]
"""Median, low and high of the times of a call, in milliseconds."""

_logger = logging.getLogger(__name__)


def is_program_factory(function: object) -> bool:
    """Whether it is what ``@tilelang.jit`` makes of a function."""
    return type(function).__module__.partition(".")[0] == "tilelang" and hasattr(function, "func")


class ProgramFactory:
    """Called with the sizes of a problem it gives the program for them."""

    def __init__(
        self,
        factory: Any,
        configs: Sequence[Mapping[str, Any]],
        problem: Sequence[str],
        reference: Callable[..., Any] | None,
        *,
        tunes_always: bool,
        timer: Timer | None,
    ) -> None:
        """Registers the factory, which is not changed.

        Args:
            factory: What ``@tilelang.jit`` made.
            configs: Values of its parameters; the first ones serve untuned.
            problem: Arguments that tell problems apart.
            reference: Takes the tensors of a call; returns what the call returns or, where it
                writes into its arguments, the right values by their places.
            tunes_always: Whether an unknown problem is tuned without being asked for.
            timer: In the place of Triton's ``do_bench``, which flushes L2 before each launch.
        """
        function = inspect.unwrap(factory.func)
        functools.update_wrapper(self, function)
        self.factory = factory
        self.reference = reference
        self.tunes_always = tunes_always
        self.timer = timer or _do_bench
        self.table = _Table(configs)
        self._signature = inspect.signature(function)
        self._problem = tuple(problem)
        self._name = function.__name__
        name = f"{function.__module__}:{function.__qualname__}"
        self._problem_type = register_kernel(name, factory, self.table.all, TEMPLATE)
        self._programs: dict[tuple[Any, ...], Program] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Program:
        """The program for these sizes; parameters of configs are not given.

        Raises:
            UsageError: a size is missing or unknown, or a parameter is given.
        """
        parameters = self.table.parameters
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{self._name}: {error}") from None
        given = sorted(parameters & bound.arguments.keys())
        if given:
            raise UsageError(f"{given[0]!r} of {self._name} is a parameter, which is looked up")
        bound.apply_defaults()
        sizes = {n: v for n, v in bound.arguments.items() if n not in parameters}
        needed = [
            name
            for name, known in self._signature.parameters.items()
            if known.default is known.empty and name not in {*sizes, *parameters}
        ]
        if needed:
            raise UsageError(f"{self._name} needs {needed[0]!r}, which is not given")
        key = tuple((name, type(value), value) for name, value in sizes.items())
        return self._programs.setdefault(key, Program(self, sizes))

    def problem_of(self, sizes: Mapping[str, Any]) -> KernelProblem:
        """The problem for these sizes."""
        named = {name: plain(sizes[name]) for name in self._problem}
        return self._problem_type(canonical_json(named), "")

    def source(self) -> str:
        """Hash of the source, for which winners hold."""
        return source_of(self.factory)


@dataclass(frozen=True)
class _Chosen:
    """A kernel, and in which state of the process it was chosen."""

    kernel: Callable[..., Any]
    snapshot: Snapshot
    policy: Policy
    tunes: bool

    def holds(self) -> bool:
        """Whether the state is the same: no lock or new database, no other policy."""
        return (
            self.snapshot is current_snapshot()
            and self.policy == current_policy()
            and self.tunes == is_tuning()
        )


class Program:
    """Called with tensors it runs the winner's kernel, compiled at the first call."""

    def __init__(self, owner: ProgramFactory, sizes: Mapping[str, Any]) -> None:
        self._owner = owner
        self._sizes = dict(sizes)
        self.problem = owner.problem_of(sizes)
        self._kernels: dict[Config, Callable[..., Any]] = {}
        self._chosen: _Chosen | None = None
        self._lock = threading.RLock()

    def __call__(self, *tensors: Any) -> Any:
        """Runs the kernel; tunes first where that is asked for and nothing is known."""
        chosen = self._chosen
        if chosen is None or not chosen.holds():
            with self._lock:
                config, is_put_off = self._choose(tensors)
                kernel = self.kernel(config)
            # Tuning has made a new snapshot.
            chosen = _Chosen(kernel, current_snapshot(), current_policy(), tunes=is_tuning())
            # What a capture gets untuned, the next call shall not.
            self._chosen = None if is_put_off else chosen
        return chosen.kernel(*tensors)

    def lookup(self) -> LookupResult:
        """What a call gets.

        Raises:
            NoWinnerError: the policy is ``strict`` and nothing was measured for the problem.
        """
        return lookup_live(self.problem)

    def kernel(self, config: Config) -> Callable[..., Any]:
        """The compiled kernel of a config."""
        if config not in self._kernels:
            values = self._owner.table.theirs(config)
            assert values is not None
            self._kernels[config] = self._owner.factory(**self._sizes, **values)
        return self._kernels[config]

    def _choose(self, tensors: tuple[Any, ...]) -> tuple[Config, bool]:
        """What runs, and whether a search was put off because a CUDA graph is captured."""
        owner = self._owner
        may_tune = (is_tuning() or owner.tunes_always) and len(owner.table.all) > 1
        try:
            found = self.lookup()
        except NoWinnerError:
            if not may_tune:
                raise
        else:
            is_known = found.config in owner.table.all
            if found.tier is not Tier.DEFAULT and is_known:
                return found.config, False
        first = owner.table.all[0]
        if not may_tune or is_capturing():
            return first, may_tune
        call = _ProgramCall(self, tensors, owner.timer)
        winner = search_live(
            self.problem,
            owner.table.all,
            lambda: LiveEvaluator(call, _Same(), first, owner.reference),
            owner.source(),
        )
        if winner is None:
            _logger.warning("%s: no config works; the first one serves", self.problem.op)
        return winner or first, False


@dataclass(frozen=True)
class _ProgramCall:
    """A program on tensors, with any config."""

    program: Program
    tensors: tuple[Any, ...]
    timer: Timer

    def cloned(self) -> _ProgramCall:
        """The same on clones; a tensor that is passed twice is cloned once."""
        clones = {id(x): x.clone() for x in self.tensors if hasattr(x, "clone")}
        return _ProgramCall(
            self.program, tuple(clones.get(id(x), x) for x in self.tensors), self.timer
        )

    def run(self, config: Config) -> dict[str, Any]:
        """Its arguments after the launch, and what it returned."""
        returned = self.program.kernel(config)(*self.tensors)
        written = {f"argument {i}": x for i, x in enumerate(self.tensors) if hasattr(x, "clone")}
        return {**written, **_results(returned)}

    def expected(self, reference: Callable[..., Any]) -> dict[str, Any]:
        """The reference's values under the same names."""
        right = reference(*self.tensors)
        if isinstance(right, Mapping):
            return {f"argument {place}": value for place, value in right.items()}
        return _results(right)

    def time(self, config: Config) -> Sequence[float]:
        """Median, low and high in milliseconds."""
        kernel = self.program.kernel(config)
        return self.timer(lambda: kernel(*self.tensors))


class _Table:
    """Configs of a factory, in the order in which its author gave them."""

    def __init__(self, configs: Sequence[Mapping[str, Any]]) -> None:
        self._theirs = {Config.of(TEMPLATE, dict(values)): dict(values) for values in configs}
        self.all = tuple(self._theirs)
        self.parameters = frozenset().union(*self._theirs.values())

    def theirs(self, config: Config) -> dict[str, Any] | None:
        """The values of a config as the factory takes them; None for one that is none of these."""
        return self._theirs.get(config)


class _Same:
    """Configs of a program need no other form."""

    @staticmethod
    def theirs(config: Config) -> Config:
        """The config itself."""
        return config


def _results(returned: Any) -> dict[str, Any]:
    parts = returned if isinstance(returned, tuple | list) else (returned,)
    return {f"result {i}": part for i, part in enumerate(parts) if part is not None}


def _do_bench(call: Callable[[], object]) -> Sequence[float]:
    from triton.testing import do_bench

    found: Sequence[float] = do_bench(call, quantiles=(0.5, 0.2, 0.8))
    return found
