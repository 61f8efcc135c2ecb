"""Studies of the toy operation in a real store, as a search would have left them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner.records import (
    BinaryFacts,
    Evaluation,
    MeasurementPolicy,
    Provenance,
    StudyKey,
    Timing,
    Toolchain,
    TrialStatus,
)
from tilescout.tuner.store import Store, StudyRecord
from toy_op import ToyProblem, toy_space

DEFAULT = Config.of("triton", {"block_n": 16, "num_stages": 1, "split_rule": "none"})
SMALL = Config.of("triton", {"block_n": 32, "num_stages": 2, "split_rule": "none"})
SPLIT = Config.of(
    "triton", {"block_n": 64, "num_stages": 3, "split_rule": "fixed", "num_splits": 4}
)
WIDE = Config.of("triton", {"block_n": 128, "num_stages": 2, "split_rule": "none"})
HUGE = Config.of("triton", {"block_n": 256, "num_stages": 1, "split_rule": "none"})

POLICY = MeasurementPolicy()
TOOLCHAIN = Toolchain(triton="3.7.1", torch="2.13.0", cuda="13.0", driver="580.95")


def b200_like(h200: DeviceSpec) -> DeviceSpec:
    """A device with other peaks than ``h200``."""
    return replace(
        h200,
        sku="b200",
        name="NVIDIA B200",
        architecture="blackwell",
        compute_capability=(10, 0),
        num_sms=148,
        bandwidth_gbps=8000.0,
        peak_tflops={"bfloat16": 2250.0, "float32": 75.0},
    )


@dataclass(frozen=True)
class Searched:
    """What a study is to be about."""

    problem: ToyProblem
    device: DeviceSpec
    provenance: Provenance = Provenance.MEASURED
    policy: MeasurementPolicy = POLICY
    toolchain: Toolchain = TOOLCHAIN

    @property
    def key(self) -> StudyKey:
        is_predicted = self.provenance is Provenance.PREDICTED
        return StudyKey(
            problem=self.problem,
            device=self.device,
            toolchain=replace(self.toolchain, driver="") if is_predicted else self.toolchain,
            provenance=self.provenance,
            policy=self.policy,
            space_fingerprint=toy_space(self.problem, self.device).fingerprint(),
            template_hashes=(("triton", "toy-1"),),
        )


def timed(searched: Searched, config: Config, time_us: float, status: str = "ok") -> Evaluation:
    """A trial with a time; a measured one has a spread of a per cent."""
    is_measured = searched.provenance is Provenance.MEASURED
    low, high = (0.99 * time_us, 1.02 * time_us) if is_measured else (time_us, time_us)
    return Evaluation(
        config,
        TrialStatus(status),
        searched.provenance,
        reason="" if status == "ok" else "clearly slower than the best",
        timing=Timing(
            median_us=time_us,
            p10_us=low,
            p90_us=high,
            ci_low_us=low,
            ci_high_us=high,
            num_samples=100 if is_measured else 0,
        ),
        facts=(
            BinaryFacts("toy_kernel", 128, 96, 0, 4096, 0, 700, "HMMA", {"mma": 8, "store": 2}),
        ),
        compile_s=0.5,
        measure_s=0.25,
    )


def failed(searched: Searched, config: Config, status: str, reason: str) -> Evaluation:
    """A trial without a time."""
    return Evaluation(config, TrialStatus(status), searched.provenance, reason=reason)


def typical_trials(searched: Searched, scale: float = 1.0) -> list[Evaluation]:
    """Default, a slower one, the best, one of each of two failures."""
    return [
        timed(searched, DEFAULT, 20.0 * scale),
        failed(searched, HUGE, "out_of_resources", "shared memory 262144 exceeds 232448 bytes"),
        timed(searched, SMALL, 30.0 * scale, status="pruned"),
        timed(searched, SPLIT, 12.5 * scale),
        failed(searched, WIDE, "incorrect", "largest error 0.3 exceeds 0.001"),
    ]


def add_study(
    store: Store,
    searched: Searched,
    evaluations: Sequence[Evaluation],
    finals: Sequence[Config] = (),
) -> StudyRecord:
    """Stores the trials and, where finals are named, the decision."""
    study = store.study(searched.key, seed=7)
    store.add_trials(study.study_id, evaluations)
    if finals:
        by_config = {evaluation.config: evaluation for evaluation in evaluations}
        store.decide(study.study_id, [by_config[config] for config in finals])
    return study
