"""Hands out the config for a problem: a snapshot of the winners, then dictionary look-ups.

The databases are read once (shipped, then the user's, then those named) and never written. Imports
none of Optuna, SQLAlchemy and pandas. ``tiers`` owns the order in which winners may serve,
``winner_rows`` the reading and checking of rows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from ..errors import DeviceError, NoWinnerError, UnsupportedError, UsageError
from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from ..kernels.registry import operation_names
from ..search_spaces.registry import joint_space
from ..search_spaces.space import JointSpace
from .explain import Explanation, LookupResult
from .paths import shipped_database_path, user_database_path
from .records import MeasurementPolicy, Provenance, Toolchain
from .tiers import (
    Policy,
    Query,
    Tier,
    TierStep,
    toolchain_differences,
    walk_tiers,
)
from .winner_rows import (
    DatabaseRead,
    DatabaseSource,
    SkippedRow,
    Winner,
    check_rows,
    read_database,
)

__all__ = [
    "Explanation",
    "LookupResult",
    "Policy",
    "Snapshot",
    "Tier",
    "current_snapshot",
    "explain",
    "find_device",
    "lookup",
    "refresh",
]

POLICIES: tuple[Policy, ...] = ("nearest", "strict")

_Question = tuple[
    Problem, tuple[str, int, int], Policy, bool, MeasurementPolicy | None, frozenset[str]
]
"""Problem; SKU, SMs and memory of the device; policy, leave for other toolchains, measurement;
templates left out."""

_logger = logging.getLogger(__name__)
_lock = threading.RLock()
_snapshots: dict[tuple[str, ...], Snapshot] = {}


class Snapshot:
    """The winners as they stood when the databases were read; safe to share between threads.

    Nothing in it changes what a look-up gives: rows are checked and answers kept as they are first
    asked for, so that an operation which is never looked up is never imported.
    """

    def __init__(self, reads: Sequence[DatabaseRead]) -> None:
        self.databases = tuple(reads)
        self._lock = threading.RLock()
        self._checked: dict[str, tuple[tuple[Winner, ...], tuple[SkippedRow, ...]]] = {}
        self._answers: dict[_Question, LookupResult] = {}
        self._misses: dict[_Question, LookupResult] = {}

    @classmethod
    def load(cls, databases: Sequence[str | Path] | None = None) -> Snapshot:
        """Reads exactly these databases, later ones over earlier; None: shipped, then the user's.

        Raises:
            StoreError: a file is missing, corrupt, locked or of another schema.
            UsageError: a database URL that names no SQLite file.
        """
        if databases is None:
            return cls([read_database(source) for source in _sources(())])
        return cls([read_database(DatabaseSource(_file(d), "explicit")) for d in databases])

    @property
    def skipped(self) -> tuple[SkippedRow, ...]:
        """Every row that this version of the code cannot hand out, with the reason."""
        ops = dict.fromkeys(str(row.get("op")) for read in self.databases for row in read.rows)
        return tuple(skipped for op in ops for skipped in self._rows_of(op)[1])

    @property
    def misses(self) -> tuple[LookupResult, ...]:
        """The answers below ``exact``, one a problem and SKU, in the order they were asked for."""
        return tuple(self._misses.values())

    def lookup(
        self,
        problem: Problem,
        device: DeviceSpec,
        *,
        policy: Policy = "nearest",
        allow_other_toolchain: bool = False,
        measurement: MeasurementPolicy | None = None,
        without: Collection[str] = frozenset(),
    ) -> LookupResult:
        """The config for the problem; from the second call on, one dictionary look-up.

        Args:
            problem: What will run.
            device: Where it will run.
            policy: ``nearest`` walks the tiers; ``strict`` takes only a winner that was measured
                for this very problem on this SKU with these versions.
            allow_other_toolchain: Lets ``strict`` take a winner found with other versions.
            measurement: How the winner must have been measured; None: the default policy.
            without: Templates that cannot serve the tensors at hand.

        Raises:
            NoWinnerError: ``strict`` found nothing.
            UnsupportedError: no template serves the problem on the device.
        """
        # Fields that tell two devices apart for dispatch; hashing all of a spec costs more than
        # the rest of the look-up.
        device_key = (device.sku, device.num_sms, device.memory_bytes)
        key = (
            *(problem, device_key, policy, allow_other_toolchain, measurement),
            frozenset(without),
        )
        answer = self._answers.get(key)
        return answer if answer is not None else self._resolve(key, device)

    def _resolve(self, key: _Question, device: DeviceSpec) -> LookupResult:
        problem, _, policy, allow_other_toolchain, measurement, without = key
        with self._lock:
            if key in self._answers:
                return self._answers[key]
            explanation = self.explain(
                problem,
                device,
                policy=policy,
                allow_other_toolchain=allow_other_toolchain,
                measurement=measurement,
                without=without,
            )
            result = explanation.result
            if result is None:
                raise NoWinnerError(explanation.failure)
            if result.tier is not Tier.EXACT:
                self._misses[key] = result
                _logger.warning(
                    "no measured winner of %s %s on %s: tier %s serves (%s)",
                    problem.op,
                    problem,
                    device.sku,
                    result.tier,
                    explanation.steps[-1].detail,
                )
            self._answers[key] = result
            return result

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
        if policy not in POLICIES:
            raise UsageError(f"policy={policy!r} is not one of {', '.join(POLICIES)}")
        winners, skipped = self._rows_of(problem.op)
        measured_as = str(measurement or MeasurementPolicy())
        query = Query(
            problem=problem,
            device=device,
            space=_space_without(problem, device, without),
            policy=policy,
            measurement=measured_as,
            toolchain=_current_toolchain(),
            allow_other_toolchain=allow_other_toolchain,
        )
        steps = walk_tiers(winners, query)
        result = _result(query, steps[-1])
        return Explanation(
            problem=problem,
            gpu=device.sku,
            policy=policy,
            result=result,
            failure=None if result else _failure(query, steps[-1]),
            steps=steps,
            databases=self.databases,
            skipped=(*skipped, *self._rows_of_unknown_ops()),
            other_policy=sum(1 for w in winners if w.policy != measured_as),
        )

    def _rows_of(self, op: str) -> tuple[tuple[Winner, ...], tuple[SkippedRow, ...]]:
        with self._lock:
            if op not in self._checked:
                self._checked[op] = check_rows(self.databases, op)
            return self._checked[op]

    def _rows_of_unknown_ops(self) -> tuple[SkippedRow, ...]:
        known = operation_names()
        ops = dict.fromkeys(str(row.get("op")) for read in self.databases for row in read.rows)
        return tuple(s for op in ops if op not in known for s in self._rows_of(op)[1])


def lookup(
    problem: Problem,
    *,
    gpu: str | DeviceSpec | None = None,
    policy: Policy = "nearest",
    databases: Sequence[str | Path] | None = None,
    allow_other_toolchain: bool = False,
) -> LookupResult:
    """The config for a problem on a GPU, from the databases as they were first read.

    Args:
        problem: What will run.
        gpu: SKU name or spec; None: the GPU at hand.
        policy: ``nearest`` or ``strict``; see ``Snapshot.lookup``.
        databases: Files to lay over the shipped and the user's database.
        allow_other_toolchain: Lets ``strict`` take a winner found with other versions.

    Raises:
        NoWinnerError: ``strict`` found nothing.
        UnsupportedError: no template serves the problem on the GPU.
        StoreError: a database cannot be read.
        DeviceError: no GPU was named and none is at hand.
    """
    return current_snapshot(databases).lookup(
        problem, find_device(gpu), policy=policy, allow_other_toolchain=allow_other_toolchain
    )


def explain(
    problem: Problem,
    *,
    gpu: str | DeviceSpec | None = None,
    policy: Policy = "nearest",
    databases: Sequence[str | Path] | None = None,
    allow_other_toolchain: bool = False,
) -> Explanation:
    """Why ``lookup`` gives what it gives; the arguments are those of ``lookup``."""
    return current_snapshot(databases).explain(
        problem, find_device(gpu), policy=policy, allow_other_toolchain=allow_other_toolchain
    )


def current_snapshot(databases: Sequence[str | Path] | None = None) -> Snapshot:
    """The snapshot of the shipped and the user's database with these over them, read once.

    Raises:
        StoreError: a database cannot be read.
    """
    key = tuple(map(str, databases)) if databases else ()
    found = _snapshots.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _snapshots:
            _snapshots[key] = Snapshot([read_database(s) for s in _sources(databases or ())])
        return _snapshots[key]


def refresh() -> None:
    """Forgets what was read, so that the next look-up reads the databases again."""
    with _lock:
        _snapshots.clear()


def _sources(explicit: Sequence[str | Path]) -> tuple[DatabaseSource, ...]:
    sources = [
        DatabaseSource(shipped_database_path(), "shipped"),
        DatabaseSource(user_database_path(), "user"),
        *(DatabaseSource(_file(database), "explicit") for database in explicit),
    ]
    # A file named twice is read once, at its last place.
    last = {source.path.resolve(): source for source in sources}
    return tuple(s for s in sources if last[s.path.resolve()] is s)


def _file(database: str | Path) -> Path:
    text = str(database)
    if text.startswith("sqlite:///"):
        return Path(text.removeprefix("sqlite:///"))
    if "://" in text:
        raise UsageError(
            f"database {text!r} is not a file: look-ups read SQLite files only; write one with "
            "`tilescout export --db URL | tilescout import - --db FILE`"
        )
    return Path(text).expanduser()


def find_device(gpu: str | DeviceSpec | None) -> DeviceSpec:
    """The SKU of that name, the spec itself, or the GPU at hand for None.

    Raises:
        UnknownNameError: no such SKU.
        DeviceError: there is no GPU.
    """
    if isinstance(gpu, DeviceSpec):
        return gpu
    return _current_device() if gpu is None else _named_device(gpu)


@cache
def _named_device(sku: str) -> DeviceSpec:
    from .catalog import gpu as find_gpu

    return find_gpu(sku)


@cache
def _current_device() -> DeviceSpec:
    from .catalog import gpu_names
    from .environment import current_device

    device = current_device()
    if device is None:
        names = ", ".join(gpu_names())
        raise DeviceError(f"no NVIDIA GPU is at hand: name one with gpu= (--gpu), of {names}")
    return device


@cache
def _current_toolchain() -> Toolchain:
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
    return JointSpace(remaining)


def _result(query: Query, step: TierStep) -> LookupResult | None:
    winner = step.winner
    if winner is None and step.tier is not Tier.DEFAULT:
        return None
    config = winner.config if winner else query.space.default
    return LookupResult(
        op=query.problem.op,
        gpu=query.device.sku,
        problem=query.problem,
        config=config,
        template=config.template,
        tier=step.tier,
        provenance=(winner.provenance if winner else Provenance.DEFAULT).value,
        distance=step.distance,
        trial_id=winner.trial_id if winner else None,
        database=str(winner.database) if winner else None,
        notes=_notes(query, winner),
    )


def _notes(query: Query, winner: Winner | None) -> tuple[str, ...]:
    if winner is None:
        return ("nothing is known of this problem here: the default config is untuned",)
    notes = []
    if winner.problem != query.problem:
        names = query.problem.dynamic_fields
        tuned = " ".join(f"{name}={getattr(winner.problem, name)}" for name in names)
        notes.append(f"tuned for {tuned}")
    if winner.sku != query.device.sku:
        notes.append(f"tuned for SKU {winner.sku}")
    differences = toolchain_differences(winner, query.toolchain)
    if differences:
        notes.append(f"found with another toolchain: {', '.join(differences)}")
    return tuple(notes)


def _failure(query: Query, step: TierStep) -> str:
    problem, sku = query.problem, query.device.sku
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


def _workload_with(problem: Problem) -> str:
    """A workload that holds the problem, else a placeholder for a file that the user writes."""
    from .catalog import workload, workload_names

    for name in workload_names():
        if any(entry.problem == problem for entry in workload(name).problems):
            return name
    return "FILE.toml"
