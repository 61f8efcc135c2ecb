"""Databases with winners made up for a test, written by the real store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilescout.kernels.base import Config, Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.registry import template
from tilescout.tuner.records import (
    Evaluation,
    MeasurementPolicy,
    Provenance,
    StudyKey,
    Timing,
    Toolchain,
    TrialStatus,
)
from tilescout.tuner.store.store import Store


@dataclass(frozen=True)
class MadeUpWinner:
    problem: Problem
    device: DeviceSpec
    config: Config
    provenance: Provenance = Provenance.MEASURED
    time_us: float = 12.5
    toolchain: Toolchain = field(default_factory=Toolchain)
    policy: MeasurementPolicy = field(default_factory=MeasurementPolicy)
    source_hash: str | None = None
    """None: the hash of the code as it is."""


def write_winners(path: Path, winners: Iterable[MadeUpWinner]) -> list[int]:
    """Writes the winners and returns the id of each one's trial."""
    with Store.open(path) as store:
        return [_write(store, winner) for winner in winners]


def _write(store: Store, made_up: MadeUpWinner) -> int:
    op, name = made_up.problem.op, made_up.config.template
    key = StudyKey(
        problem=made_up.problem,
        device=made_up.device,
        toolchain=made_up.toolchain,
        provenance=made_up.provenance,
        policy=made_up.policy,
        space_fingerprint="made-up",
        template_hashes=((name, made_up.source_hash or template(op, name).source_hash()),),
    )
    study = store.study(key, seed=0)
    time_us = made_up.time_us
    evaluation = Evaluation(
        config=made_up.config,
        status=TrialStatus.OK,
        provenance=made_up.provenance,
        timing=Timing(time_us, time_us, time_us, time_us, time_us),
    )
    trial = store.add_trial(study.study_id, evaluation)
    store.decide(study.study_id, [trial.evaluation])
    return trial.trial_id


def sibling_of(device: DeviceSpec, sku: str) -> DeviceSpec:
    """A GPU of the same compute capability with fewer SMs."""
    return replace(device, sku=sku, name=sku.upper(), num_sms=device.num_sms - 20)
