"""Studies and evaluations that store tests write; every field is set, every status occurs."""

from __future__ import annotations

import random
from dataclasses import replace

import toy_op
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

DEVICE = DeviceSpec(
    sku="h200",
    name="NVIDIA H200",
    architecture="hopper",
    compute_capability=(9, 0),
    num_sms=132,
    memory_bytes=141 * 10**9,
    l2_bytes=60 * 2**20,
    smem_per_block_bytes=227 * 1024,
    smem_per_sm_bytes=228 * 1024,
    registers_per_sm=65536,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    bandwidth_gbps=4800.0,
    peak_tflops={"bfloat16": 989.5, "float32": 67.0},
    clock_mhz=1980.0,
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


def without_samples(evaluation: Evaluation) -> Evaluation:
    """The evaluation as a trial that is no finalist keeps it."""
    if evaluation.timing is None:
        return evaluation
    return replace(evaluation, timing=replace(evaluation.timing, samples_us=()))


def as_final(rng: random.Random, evaluation: Evaluation) -> Evaluation:
    """The trial measured again, with samples that tick like a GPU's timer, in about 32 ns."""
    assert evaluation.timing is not None
    ticks = evaluation.timing.median_us / 0.032
    samples = tuple(round(rng.gauss(ticks, 16)) * 0.032 for _ in range(300))
    return replace(evaluation, timing=replace(evaluation.timing, samples_us=samples))


def synthetic_trial(rng: random.Random, index: int) -> Evaluation:
    """One of a mix like that of a real search, configs and binaries shared between studies."""
    chosen = Config.of(
        "triton",
        {
            "block_n": 16 << index % 4,
            "group_heads": 1 << index // 4 % 4,
            "merge": ("kernel", "atomic")[index // 16 % 2],
            "num_splits": 1 << index // 32 % 6,
            "num_stages": 1 + index // 192 % 5,
            "num_warps": 1 << index // 960 % 4,
            "split_rule": ("none", "fixed", "balanced")[index // 3840 % 3],
        },
    )
    fate = rng.random()
    if fate < 0.15:
        status = rng.choice([TrialStatus.OUT_OF_RESOURCES, TrialStatus.COMPILE_ERROR])
        reason = f"needs {1024 * (index % 300)} bytes of shared memory, 232448 are allowed"
        return Evaluation(chosen, status, Provenance.MEASURED, reason, compile_s=rng.random())
    status = TrialStatus.PRUNED if fate < 0.45 else TrialStatus.OK
    median_us = rng.uniform(5, 500)
    mix = {"mma": index % 64, "load_global": index % 32, "store": 4, "async_copy": index % 16}
    return Evaluation(
        chosen,
        status,
        Provenance.MEASURED,
        "slower than the best" if status is TrialStatus.PRUNED else "",
        timing=Timing(
            median_us,
            median_us * rng.uniform(0.97, 1),
            median_us * rng.uniform(1, 1.03),
            median_us * rng.uniform(0.99, 1),
            median_us * rng.uniform(1, 1.01),
            num_samples=300,
        ),
        facts=(
            BinaryFacts(
                "paged_decode_kernel",
                128,
                index % 255,
                0,
                1024 * (index % 96),
                0,
                700 + index % 5760,
                "HMMA.16816.F32.BF16",
                mix,
                index % 200,
                64,
            ),
            facts("merge_kernel", 30 + index % 5),
        ),
        max_abs_error=rng.random() * 1e-2,
        relative_rms_error=rng.random() * 1e-3,
        compile_s=rng.random(),
        measure_s=rng.random(),
    )
