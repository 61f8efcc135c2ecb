"""Times of other libraries on the toy operation, as an import of published tables leaves them."""

from __future__ import annotations

from datetime import UTC, datetime

from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner.records import (
    BASELINE_TEMPLATE,
    Evaluation,
    MeasurementPolicy,
    Provenance,
    StudyKey,
    Timing,
    Toolchain,
    TrialStatus,
)
from tilescout.tuner.store import Store
from toy_op import ToyProblem

POLICY = MeasurementPolicy()
PUBLISHED_ON = datetime(2026, 8, 11, 12, tzinfo=UTC)


def add_baseline(
    store: Store,
    problem: ToyProblem,
    device: DeviceSpec,
    time_us: float,
    *,
    library: str = "rival",
    variant: str = "fast",
    version: str = "1.2",
    provenance: Provenance = Provenance.PUBLISHED,
    policy: MeasurementPolicy = POLICY,
    source: str = "a paper",
) -> None:
    """Stores one library's time."""
    key = StudyKey(
        problem=problem,
        device=device,
        toolchain=Toolchain(torch="2.12.1"),
        provenance=provenance,
        policy=policy,
        space_fingerprint="",
        template_hashes=((BASELINE_TEMPLATE, source),),
    )
    said = {"library": library, "variant": variant, "version": version}
    evaluation = Evaluation(
        Config.of(BASELINE_TEMPLATE, said),
        TrialStatus.OK,
        provenance,
        timing=Timing(time_us, time_us, time_us, time_us, time_us),
    )
    store.transaction(
        lambda writer: writer.trial(writer.study(key, 0, PUBLISHED_ON)[0], evaluation, PUBLISHED_ON)
    )
