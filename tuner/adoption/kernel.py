"""A kernel whose ``run`` looks the config up: what an adopted autotuner does in Triton's place.

Nothing is tuned unless asked for: by ``tuning()``, or by ``on_miss="tune"``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from ...errors import NoWinnerError, UsageError
from ...kernels.base import canonical_json
from ..dispatch import current_snapshot
from ..dispatch_policy import current_policy
from ..explain import LookupResult
from ..tiers import Tier
from .configs import ConfigTable
from .live_evaluator import LiveCall, LiveEvaluator, Reference
from .live_search import is_capturing, lookup_live, search_live
from .operation import KernelProblem, register_kernel, source_of

__all__ = ["ON_MISS", "AdoptedKernel", "OnMiss", "is_tuning", "plain", "tuning"]

OnMiss = Literal["default", "triton", "tune"]
ON_MISS: tuple[OnMiss, ...] = ("default", "triton", "tune")

_tunes: ContextVar[bool] = ContextVar("tilescout_tunes", default=False)
is_tuning = _tunes.get
"""Whether ``tuning`` is in force in this thread or task."""
_logger = logging.getLogger(__name__)


@contextmanager
def tuning() -> Iterator[None]:
    """Calls of adopted kernels inside tune what is not tuned yet, on the arguments at hand."""
    token = _tunes.set(True)
    try:
        yield
    finally:
        _tunes.reset(token)


class AdoptedKernel:
    """Stands in for the ``run`` of one ``triton.runtime.Autotuner``."""

    def __init__(
        self, autotuner: Any, *, reference: Reference | None = None, on_miss: OnMiss = "default"
    ) -> None:
        """Registers the kernel; the autotuner itself is not changed.

        Args:
            autotuner: What ``@triton.autotune`` made.
            reference: Says what is right while tuning; None: the author's first config does.
            on_miss: Where nothing is known of a call: ``default`` runs the author's first config
                that its pruning leaves, ``triton`` lets Triton tune, ``tune`` tunes ours.

        Raises:
            UsageError: ``on_miss`` is none of these.
        """
        if on_miss not in ON_MISS:
            raise UsageError(f"on_miss={on_miss!r} is not one of {', '.join(ON_MISS)}")
        self.autotuner = autotuner
        self.reference = reference
        self.on_miss = on_miss
        self.table = ConfigTable(autotuner.configs)
        function = autotuner.base_fn
        name = f"{function.__module__}:{function.__qualname__}"
        self.problem_type = register_kernel(name, autotuner.fn, self.table.all)
        self.op = self.problem_type.op
        self._triton_run = autotuner.run
        self._chosen: dict[tuple[Any, ...], Any] = {}
        self._snapshot: Any = None
        self._lock = threading.RLock()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launches with the winner's config; called as ``Autotuner.run`` is."""
        tuner = self.autotuner
        if len(tuner.configs) < 2:
            return self._triton_run(*args, **kwargs)
        snapshot = current_snapshot()
        if snapshot is not self._snapshot:  # a lock, or new databases
            self._chosen, self._snapshot = {}, snapshot
        key = (*self._key(args, kwargs), current_policy(), is_tuning())
        config = self._chosen.get(key)
        if config is None:
            call = LiveCall(tuner, args, kwargs)
            config = self._choose(call)
            if config is None:
                return self._triton_run(*args, **kwargs)
            # Tuning has made a new snapshot.
            self._snapshot = current_snapshot()
            self._chosen[key] = config
        if config.pre_hook is not None:
            names = dict(zip(tuner.arg_names, args, strict=False))
            config.pre_hook({**names, **kwargs, **config.all_kwargs()})
        # For readers of the attribute, as Triton has it; nothing here reads it.
        tuner.best_config = config
        return tuner.fn.run(*args, **kwargs, **config.all_kwargs())

    def problem_of(self, *args: Any, **kwargs: Any) -> KernelProblem:
        """The problem of a call: its key and the dtypes of its arguments."""
        values, dtypes = self._key(args, kwargs)
        names = [name for name in self.autotuner.keys if name in self._named(args, kwargs)]
        named = {n: plain(v) for n, v in zip(names, values, strict=True)}
        return self.problem_type(canonical_json(named), ",".join(dtypes))

    def lookup(self, *args: Any, **kwargs: Any) -> LookupResult:
        """What a call with these arguments gets.

        Raises:
            NoWinnerError: the policy is ``strict`` and nothing was measured for the problem.
        """
        return lookup_live(self.problem_of(*args, **kwargs))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = self.autotuner.arg_names
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return {name: value for name, value in given.items() if name in names}

    def _key(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Values of the key and dtypes, as Triton tells calls apart."""
        named = self._named(args, kwargs)
        values = tuple(named[name] for name in self.autotuner.keys if name in named)
        return values, tuple(str(v.dtype) for v in named.values() if hasattr(v, "dtype"))

    def _choose(self, call: LiveCall) -> Any | None:
        """The config for a call; None where Triton is to choose."""
        with self._lock:
            pruned = self._pruned(call)
            wants_tuning = (is_tuning() or self.on_miss == "tune") and len(pruned) > 1
            try:
                found = self.lookup(*call.args, **call.kwargs)
            except NoWinnerError:
                if not wants_tuning:
                    raise
                found = None
            known = self.table.theirs(found.config) if found else None
            if found is not None and found.tier is not Tier.DEFAULT and known in pruned:
                return known
            if wants_tuning and not is_capturing():
                return self._tune(call, pruned)
            if self.on_miss == "triton" and not is_capturing():
                return None
            return pruned[0]

    def _pruned(self, call: LiveCall) -> list[Any]:
        """The configs that the author's pruning leaves for these arguments."""
        tuner = self.autotuner
        tuner.nargs = dict(zip(tuner.arg_names, call.args, strict=False))
        try:
            pruned = list(tuner.prune_configs(dict(call.kwargs)))
        finally:
            tuner.nargs = None
        # Pruning may make configs of its own: they cannot be stored.
        return [config for config in pruned if self.table.ours(config) is not None] or pruned

    def _tune(self, call: LiveCall, pruned: list[Any]) -> Any:
        """Searches the pruned configs, keeps every trial, returns the winner."""
        ours = [config for config in map(self.table.ours, pruned) if config is not None]
        if not ours:
            return pruned[0]
        winner = search_live(
            self.problem_of(*call.args, **call.kwargs),
            ours,
            lambda: LiveEvaluator(call, self.table, pruned[0], self.reference),
            source_of(self.autotuner.fn),
        )
        if winner is None:
            _logger.warning("%s: no config works; the first one serves", self.op)
            return pruned[0]
        return self.table.theirs(winner)


def plain(value: Any) -> object:
    """A value as a problem keeps it."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
