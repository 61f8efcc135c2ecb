"""Look-ups from a lock file alone: every rank resolves identically, whatever its databases hold."""

from __future__ import annotations

import json
from dataclasses import replace

from ..errors import DeviceError, StoreError
from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from .explain import LookupResult
from .lock_file import LockedWinner, LockFile
from .records import MeasurementPolicy, Provenance, Toolchain
from .sku_tolerance import MEMORY_TOLERANCE
from .snapshot import Snapshot, current_toolchain
from .tiers import Query, Tier, TierStep
from .winner_rows import DatabaseRead, DatabaseSource

__all__ = ["LockedSnapshot"]

_COLUMNS = (
    *("trial_id", "op", "problem", "sku", "compute_capability", "num_sms", "memory_bytes"),
    *("policy", "template", "template_hash", "parameters", "config_values", "provenance"),
    *("time_us", "triton", "tilelang", "torch", "cuda", "driver", "decided_at"),
)


class LockedSnapshot(Snapshot):
    """A snapshot whose only database is a lock.

    A problem of the lock gets its config and the tier that it had when the lock was written. Others
    go through the tiers over the measured and predicted winners of the lock.
    """

    def __init__(self, lock: LockFile, *, allow_other_toolchain: bool = False) -> None:
        """Holds the machine to the lock.

        Raises:
            StoreError: Triton, TileLang or torch differ from those that the lock was written with.
        """
        differences = lock.toolchain_differences(current_toolchain())
        if differences and not allow_other_toolchain:
            raise StoreError(
                f"lock {str(lock.path)!r} was written with {', '.join(differences)}: numerics may "
                "move; install that, write the lock again, or pass allow_other_toolchain=True"
            )
        super().__init__([_as_database(lock)])
        self.lock = lock
        self._pinned = {(w.problem.op, w.problem.key()): w for w in lock.winners}

    def _question(self, problem: Problem, device: DeviceSpec, *options: object) -> Query:
        self.require_gpu(device)
        return super()._question(problem, device, *options)  # type: ignore[arg-type]

    def _walk(self, question: Query) -> tuple[TierStep, ...]:
        pinned = self._pinned_for(question)
        if pinned is None:
            return super()._walk(question)
        reason = question.space.check(pinned.config)
        if reason is not None:
            raise StoreError(
                f"lock {str(self.lock.path)!r} pins a config of {pinned.problem.op} "
                f"{pinned.problem} that is not valid: {reason}; write it again with "
                "`tilescout lock`"
            )
        if question.policy == "strict" and pinned.tier is not Tier.EXACT:
            detail = f"the lock {str(self.lock.path)!r} pins one of tier {pinned.tier}"
            return (TierStep(Tier.EXACT, None, None, detail),)
        detail = f"pinned by lock {self.lock.lock_id}"
        return (TierStep(pinned.tier, None, pinned.distance, detail),)

    def _result(self, question: Query, step: TierStep) -> LookupResult | None:
        pinned = self._pinned_for(question)
        note = f"pinned by lock {self.lock.lock_id}"
        if pinned is None:
            result = super()._result(question, step)
            return result and replace(result, notes=(*result.notes, f"not {note}"))
        if step.tier is not pinned.tier:
            return None
        return LookupResult(
            op=pinned.problem.op,
            gpu=question.device.sku,
            problem=pinned.problem,
            config=pinned.config,
            template=pinned.config.template,
            tier=pinned.tier,
            provenance=pinned.provenance,
            distance=pinned.distance,
            trial_id=pinned.trial_id,
            database=str(self.lock.path),
            notes=(note,),
            time_us=pinned.time_us,
            decided_at=pinned.decided_at,
            versions=pinned.versions,
        )

    def _pinned_for(self, question: Query) -> LockedWinner | None:
        pinned = self._pinned.get((question.problem.op, question.problem.key()))
        if pinned is None or question.measurement != str(MeasurementPolicy()):
            return None
        names = {part.template for part in question.space.spaces}
        return pinned if pinned.config.template in names else None

    def require_gpu(self, device: DeviceSpec) -> None:
        """Raises DeviceError where the lock was written for a GPU that performs otherwise."""
        lock = self.lock
        is_same = (
            lock.compute_capability == device.compute_capability_text
            and lock.num_sms == device.num_sms
            and abs(lock.memory_bytes - device.memory_bytes)
            <= MEMORY_TOLERANCE * device.memory_bytes
        )
        if not is_same:
            raise DeviceError(
                f"lock {str(lock.path)!r} is for {lock.sku} (compute capability "
                f"{lock.compute_capability}, {lock.num_sms} SMs), this is {device.sku} "
                f"({device.compute_capability_text}, {device.num_sms} SMs): write a lock for it "
                f"with `tilescout lock WORKLOAD --gpu {device.sku}`"
            )


def _as_database(lock: LockFile) -> DatabaseRead:
    """The measured and predicted winners of a lock as rows, so that they are checked like rows."""
    usable = (Tier.EXACT, Tier.PREDICTED)
    measured = (Provenance.MEASURED.value, Provenance.PREDICTED.value)
    rows = [_row(lock, w) for w in lock.winners if w.tier in usable and w.provenance in measured]
    source = DatabaseSource(lock.path, "lock")
    return DatabaseRead(source, is_present=True, columns=_COLUMNS, values=tuple(rows))


def _row(lock: LockFile, winner: LockedWinner) -> tuple[object, ...]:
    versions: Toolchain = winner.versions
    config = winner.config
    return (
        *(winner.trial_id, winner.problem.op, winner.problem.key(), lock.sku),
        *(lock.compute_capability, lock.num_sms, lock.memory_bytes, str(MeasurementPolicy())),
        *(config.template, winner.template_hash),
        json.dumps([name for name, _ in config.values]),
        json.dumps([value for _, value in config.values]),
        *(winner.provenance, winner.time_us),
        *(versions.triton, versions.tilelang, versions.torch, versions.cuda, versions.driver),
        winner.decided_at or "",
    )
