"""Studies and evaluations that store tests write; every field is set, every status occurs."""

from __future__ import annotations

from dataclasses import replace

import toy_op
from devices import H200
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

DEVICE = replace(
    H200,
    peak_tflops={"bfloat16": 989.5, "float32": 67.0},
    aliases=("h200 sxm",),
    sources={"num_sms": "data sheet"},
)
TOOLCHAIN = Toolchain("3.9.0", "0.1.15", "2.13.0", "13.0", "580.95")


def study_key(
    size: int = 1024,
    *,
    device: DeviceSpec = DEVICE,
    provenance: Provenance = Provenance.MEASURED,
    policy: MeasurementPolicy = MeasurementPolicy(),  # noqa: B008
    toolchain: Toolchain = TOOLCHAIN,
) -> StudyKey:
    """A study of the toy operation."""
    return StudyKey(
        problem=toy_op.ToyProblem(size),
        device=device,
        toolchain=toolchain,
        provenance=provenance,
        policy=policy,
        space_fingerprint="0123456789abcdef",
        template_hashes=(("tilelang", "hash-b"), ("triton", "hash-a")),
    )


def config(index: int, template: str = "triton") -> Config:
    """A different config for every index, with a value of every type."""
    return Config.of(template, {"block_n": index, "split_rule": "none", "is_wide": True})


def facts(kernel: str = "decode_kernel", registers: int = 96) -> BinaryFacts:
    """What a binary says of itself."""
    return BinaryFacts(
        kernel=kernel,
        threads_per_block=128,
        registers=registers,
        spill_bytes=16,
        smem_bytes=65536,
        tmem_columns=256,
        num_instructions=1734,
        mma_kind="HMMA.16816.F32.BF16",
        instruction_mix={"mma": 64, "load_global": 12, "store": 4},
        loop_instructions=210,
        loop_load_bytes=64,
    )


def timing(median_us: float, num_samples: int = 40) -> Timing:
    """A time with a spread, and samples that float32 cannot hold exactly."""
    samples = tuple(median_us * (1 + 0.01 * (i % 7 - 3) / 3) for i in range(num_samples))
    return Timing(
        median_us=median_us,
        p10_us=median_us * 0.991,
        p90_us=median_us * 1.0123,
        ci_low_us=median_us * 0.9987,
        ci_high_us=median_us * 1.0011,
        samples_us=samples,
        num_samples=num_samples,
    )


def measured(index: int, median_us: float = 0.0, *, template: str = "triton") -> Evaluation:
    """An ok trial."""
    return Evaluation(
        config=config(index, template),
        status=TrialStatus.OK,
        provenance=Provenance.MEASURED,
        timing=timing(median_us or 10 + index / 7),
        facts=(facts(), facts("merge_kernel", 40)),
        max_abs_error=1.0 / 3.0 * 1e-3,
        relative_rms_error=0.1 + 0.2,
        compile_s=0.7,
        measure_s=0.011,
    )


def failed(
    index: int, status: TrialStatus, provenance: Provenance = Provenance.MEASURED
) -> Evaluation:
    """A trial that ended otherwise, with its reason."""
    return Evaluation(
        config=config(index),
        status=status,
        provenance=provenance,
        reason=f"{status.value}: größer als erlaubt, 'quoted' \N{GREEK SMALL LETTER MU}s",
        timing=timing(99.0) if status is TrialStatus.PRUNED else None,
    )


def predicted(index: int, median_us: float) -> Evaluation:
    """A predicted time: no spread, no samples."""
    return Evaluation(
        config=config(index),
        status=TrialStatus.OK,
        provenance=Provenance.PREDICTED,
        timing=Timing(median_us, median_us, median_us, median_us, median_us),
        facts=(facts(),),
        compile_s=0.3,
    )


def rounded(evaluation: Evaluation) -> Evaluation:
    """The evaluation with times to 1 ns and durations to 1 ms, as the database keeps them."""
    found = replace(
        evaluation,
        compile_s=round(evaluation.compile_s * 1000) / 1000,
        measure_s=round(evaluation.measure_s * 1000) / 1000,
    )
    if found.timing is None:
        return found
    times = {
        name: round(getattr(found.timing, name) * 1000) / 1000
        for name in ("median_us", "p10_us", "p90_us", "ci_low_us", "ci_high_us")
    }
    return replace(found, timing=replace(found.timing, **times))


def without_samples(evaluation: Evaluation) -> Evaluation:
    """The evaluation as a trial that is no finalist keeps it."""
    kept = rounded(evaluation)
    if kept.timing is None:
        return kept
    return replace(kept, timing=replace(kept.timing, samples_us=()))
