"""An immutable view of the winners in some databases, and the answers that were given from it.

Rows are checked and answers kept as they are first asked for, so an operation that is never looked
up is never imported, and a hit is one dictionary access. ``tiers`` owns the order in which winners
may serve.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NoWinnerError, UnsupportedError, UsageError
from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from ..kernels.registry import operation, operation_names
from ..search_spaces.registry import joint_space
from . import capture
from .dispatch_policy import current_policy
from .explain import Explanation, LookupResult
from .records import MeasurementPolicy, Provenance, Toolchain
from .tiers import (
    MAX_FACTOR,
    POLICIES,
    Policy,
    Query,
    Tier,
    TierStep,
    toolchain_differences,
    walk_tiers,
)
from .winner_index import WinnerIndex
from .winner_rows import (
    DatabaseRead,
    DatabaseSource,
    SkippedRow,
    Winner,
    database_file,
    read_database,
    unknown_operation,
)

if TYPE_CHECKING:
    from ..search_spaces.space import JointSpace

__all__ = ["Snapshot", "current_toolchain"]

MAX_HOT = 4096
"""Problem objects that are recognised by identity; beyond it they are forgotten together."""

_Question = tuple[
    Problem, tuple[str, int, int], Policy, bool, MeasurementPolicy | None, frozenset[str]
]
"""Problem; SKU, SMs and memory of the device; policy, leave for other toolchains, measurement;
templates left out."""

_HotKey = tuple[int, int, Policy, bool]
"""Identities of problem and device; policy, leave for other toolchains."""

_logger = logging.getLogger(f"{__package__}.dispatch")
_lock = threading.RLock()
"""Guards what is resolved for the first time, in every snapshot."""


def _renew_lock() -> None:
    """A fork while another thread resolves would leave the child a lock that nobody opens."""
    global _lock  # noqa: PLW0603 - the child's lock takes the place of the parent's
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Snapshot:
    """The winners as they stood when the databases were read; safe between threads and forks."""

    def __init__(self, reads: Sequence[DatabaseRead]) -> None:
        self.databases = tuple(reads)
        self._indexes: dict[str, WinnerIndex] = {}
        self._hot: dict[_HotKey, tuple[Problem, DeviceSpec, LookupResult]] = {}
        self._answers: dict[_Question, LookupResult] = {}
        self._misses: dict[_Question, LookupResult] = {}

    @classmethod
    def load(cls, databases: Sequence[str | Path]) -> Snapshot:
        """Reads exactly these databases, later ones over earlier.

        Raises:
            StoreError: a file is missing, corrupt, locked or of another schema.
            UsageError: a database URL that names no SQLite file.
        """
        sources = [DatabaseSource(database_file(d), "explicit") for d in databases]
        return cls([read_database(source) for source in sources])

    @property
    def skipped(self) -> tuple[SkippedRow, ...]:
        """Every row that this version of the code cannot hand out, with the reason."""
        known = operation_names()
        of_known = [s for op in self._ops() if op in known for s in self._index(op).skipped()]
        return (*of_known, *self._rows_of_unknown_ops())

    @property
    def misses(self) -> tuple[LookupResult, ...]:
        """The answers below ``exact``, one a problem and SKU, in the order they were asked for."""
        return tuple(self._misses.values())

    def lookup(
        self,
        problem: Problem,
        device: DeviceSpec,
        *,
        policy: Policy | None = None,
        allow_other_toolchain: bool = False,
        measurement: MeasurementPolicy | None = None,
        without: Collection[str] = frozenset(),
    ) -> LookupResult:
        """The config for the problem; from the second call on, one dictionary look-up.

        Counted where a capture is on.

        Args:
            problem: What will run.
            device: Where it will run.
            policy: ``nearest`` walks the tiers; ``strict`` takes only a winner that was measured
                for this very problem on this SKU with these versions; None: ``current_policy``.
            allow_other_toolchain: Lets ``strict`` take a winner found with other versions.
            measurement: How the winner must have been measured; None: the default policy.
            without: Templates that cannot serve the tensors at hand.

        Raises:
            NoWinnerError: ``strict`` found nothing.
            UnsupportedError: no template serves the problem on the device.
        """
        answer = self.answer(
            problem,
            device,
            policy=policy,
            allow_other_toolchain=allow_other_toolchain,
            measurement=measurement,
            without=without,
        )
        if capture.recorder is not None:
            capture.recorder.count(answer)
        return answer

    def answer(
        self,
        problem: Problem,
        device: DeviceSpec,
        *,
        policy: Policy | None = None,
        allow_other_toolchain: bool = False,
        measurement: MeasurementPolicy | None = None,
        without: Collection[str] = frozenset(),
    ) -> LookupResult:
        """What ``lookup`` gives, for callers that keep the answer and count its uses themselves."""
        # Hashing a problem takes longer than the rest of a look-up: the same object is recognised.
        policy = policy or current_policy()
        hot_key = (id(problem), id(device), policy, allow_other_toolchain)
        is_plain = measurement is None and not without
        if is_plain:
            hot = self._hot.get(hot_key)
            # Held by the entry, so that no other object can have taken its identity.
            if hot is not None and hot[0] is problem and hot[1] is device:
                return hot[2]
        device_key = (device.sku, device.num_sms, device.memory_bytes)
        key = (
            *(problem, device_key, policy, allow_other_toolchain, measurement),
            frozenset(without),
        )
        answer = self._answers.get(key)
        if answer is None:
            answer = self._resolve(key, device)
        if is_plain:
            if len(self._hot) >= MAX_HOT:
                self._hot.clear()
            self._hot[hot_key] = (problem, device, answer)
        return answer

    def explain(
        self,
        problem: Problem,
        device: DeviceSpec,
        *,
        policy: Policy = "nearest",
        allow_other_toolchain: bool = False,
        measurement: MeasurementPolicy | None = None,
        without: Collection[str] = frozenset(),
    ) -> Explanation:
        """The walk that ``lookup`` makes, with everything it saw; nothing is kept or counted.

        Raises:
            UnsupportedError: no template serves the problem on the device.
        """
        question = self._question(
            problem, device, policy, allow_other_toolchain, measurement, frozenset(without)
        )
        steps = self._walk(question)
        result = self._result(question, steps[-1])
        index = self._index(problem.op)
        return Explanation(
            problem=problem,
            gpu=device.sku,
            policy=policy,
            result=result,
            failure=None if result else self._failure(question, steps[-1]),
            steps=steps,
            databases=self.databases,
            skipped=(*index.skipped(), *self._rows_of_unknown_ops()),
            other_policy=sum(1 for w in index.all() if w.policy != question.measurement),
        )

    def peek(
        self,
        problem: Problem,
        device: DeviceSpec,
        *,
        measurement: MeasurementPolicy | None = None,
        without: Collection[str] = frozenset(),
    ) -> LookupResult | None:
        """What a look-up would give, neither kept nor counted as a miss; None for a refusal."""
        question = self._question(problem, device, "nearest", True, measurement, frozenset(without))
        return self._result(question, self._walk(question)[-1])

    def _question(  # noqa: PLR0917  (a look-up is these six)
        self,
        problem: Problem,
        device: DeviceSpec,
        policy: Policy,
        allow_other_toolchain: bool,
        measurement: MeasurementPolicy | None,
        without: frozenset[str],
    ) -> Query:
        if policy not in POLICIES:
            raise UsageError(f"policy={policy!r} is not one of {', '.join(POLICIES)}")
        return Query(
            problem=problem,
            device=device,
            space=_space_without(problem, device, without),
            policy=policy,
            measurement=str(measurement or MeasurementPolicy()),
            toolchain=current_toolchain(),
            allow_other_toolchain=allow_other_toolchain,
        )

    def _resolve(self, key: _Question, device: DeviceSpec) -> LookupResult:
        problem, _, policy, allow_other_toolchain, measurement, without = key
        with _lock:
            if key in self._answers:
                return self._answers[key]
            question = self._question(
                problem, device, policy, allow_other_toolchain, measurement, without
            )
            last = self._walk(question)[-1]
            result = self._result(question, last)
            if result is None:
                raise NoWinnerError(self._failure(question, last))
            if result.tier is not Tier.EXACT:
                self._misses[key] = result
                _logger.warning(
                    "no measured winner of %s %s on %s: tier %s serves (%s)",
                    problem.op,
                    problem,
                    device.sku,
                    result.tier,
                    last.detail,
                )
            self._answers[key] = result
            return result

    def _walk(self, question: Query) -> tuple[TierStep, ...]:
        """The tiers in order; rows of other problems are not read where this one's serve."""
        with _lock:
            index = self._index(question.problem.op)
            steps = walk_tiers(index.exact(question.problem), question)
            if steps[-1].tier is Tier.EXACT:
                return steps
            in_range = index.within(question.problem, MAX_FACTOR)
            num_farther = index.count_farther(question.problem, MAX_FACTOR, question.device)
        return walk_tiers(in_range, replace(question, num_farther=num_farther))

    def _result(self, question: Query, step: TierStep) -> LookupResult | None:
        winner = step.winner
        if winner is None and step.tier is not Tier.DEFAULT:
            return None
        config = winner.config if winner else question.space.default
        return LookupResult(
            op=question.problem.op,
            gpu=question.device.sku,
            problem=question.problem,
            config=config,
            template=config.template,
            tier=step.tier,
            provenance=(winner.provenance if winner else Provenance.DEFAULT).value,
            distance=step.distance,
            trial_id=winner.trial_id if winner else None,
            database=str(winner.database) if winner else None,
            notes=_notes(question, winner),
            time_us=winner.time_us if winner else None,
            decided_at=winner.decided_at if winner else None,
            versions=winner.toolchain if winner else Toolchain(),
        )

    def _failure(self, question: Query, step: TierStep) -> str:
        problem, sku = question.problem, question.device.sku
        is_other_toolchain = any("toolchain" in refusal.reason for refusal in step.refused)
        way_out = (
            "allow it with allow_other_toolchain (--allow-other-toolchain), or tune"
            if is_other_toolchain
            else "tune"
        )
        return (
            f"policy strict found no winner of {problem.op} {problem} on {sku}: {step.detail}; "
            f"{way_out} with `tilescout tune {_workload_with(problem)} --gpu {sku} --mode measure` "
            f"on that GPU"
        )

    def _index(self, op: str) -> WinnerIndex:
        with _lock:
            if op not in self._indexes:
                self._indexes[op] = WinnerIndex(self.databases, operation(op).problem_type)
            return self._indexes[op]

    def _ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(op) for read in self.databases for op in read.rows_by_op))

    def _rows_of_unknown_ops(self) -> tuple[SkippedRow, ...]:
        known = operation_names()
        return tuple(
            unknown_operation(read, position)
            for read in self.databases
            for op, positions in read.rows_by_op.items()
            if op not in known
            for position in positions
        )


@cache
def current_toolchain() -> Toolchain:
    """Versions at hand, the driver's included."""
    from .environment import toolchain

    return toolchain(with_driver=True)


def _space_without(problem: Problem, device: DeviceSpec, without: Collection[str]) -> JointSpace:
    space = joint_space(problem, device)
    if not without:
        return space
    remaining = tuple(part for part in space.spaces if part.template not in without)
    if not remaining:
        listing = ", ".join(sorted(without))
        raise UnsupportedError(f"no template of {problem.op} is left for {problem}: not {listing}")
    return replace(space, spaces=remaining)


def _notes(question: Query, winner: Winner | None) -> tuple[str, ...]:
    if winner is None:
        return ("nothing is known of this problem here: the default config is untuned",)
    notes = []
    if winner.problem != question.problem:
        names = question.problem.dynamic_fields
        tuned = " ".join(f"{name}={getattr(winner.problem, name)}" for name in names)
        notes.append(f"tuned for {tuned}")
    if winner.sku != question.device.sku:
        notes.append(f"tuned for SKU {winner.sku}")
    differences = toolchain_differences(winner, question.toolchain)
    if differences:
        notes.append(f"found with another toolchain: {', '.join(differences)}")
    return tuple(notes)


def _workload_with(problem: Problem) -> str:
    """A workload that holds the problem, else a placeholder for a file that the user writes."""
    from .catalog import workload, workload_names

    for name in workload_names():
        if any(entry.problem == problem for entry in workload(name).problems):
            return name
    return "FILE.toml"
