"""The model's times: finite, and moving the right way with each cause."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilescout.kernels.base import LaunchEstimate
from tilescout.tuner.prediction.constants import CONSTANTS
from tilescout.tuner.prediction.cost_model import predict
from tilescout.tuner.prediction.roofline import memory_us, roofline_us, share_of_roofline
from tilescout.tuner.records import BinaryFacts, TrialStatus

FACTS = BinaryFacts(
    kernel="k",
    threads_per_block=128,
    registers=96,
    spill_bytes=0,
    smem_bytes=48 * 1024,
    tmem_columns=0,
    num_instructions=800,
    mma_kind="HGMMA.64x64x16.F32.BF16",
    instruction_mix={"async_copy": 16},
    loop_instructions=200,
    loop_load_bytes=128,
)
ESTIMATE = LaunchEstimate(
    kernel="k",
    num_programs=1056,
    bytes_moved=200_000_000,
    flops=4_000_000_000,
    bytes_in_flight=32 * 1024,
    serial_loads=3,
)


@pytest.fixture
def problem(toy):
    return toy.ToyProblem(size=25_000_000, dtype="bfloat16")


def time_us(problem, device, estimate=ESTIMATE, facts=FACTS) -> float:
    prediction = predict(problem, device, [estimate], [facts])
    assert prediction.status is TrialStatus.OK, prediction.reason
    return prediction.time_us


def test_streaming_kernel_comes_near_the_roofline_but_not_above_it(problem, h200):
    found = time_us(problem, h200)
    assert memory_us(ESTIMATE.bytes_moved, h200) < found
    assert found < 1.4 * memory_us(ESTIMATE.bytes_moved, h200)


@pytest.mark.parametrize(
    "slower",
    [
        replace(ESTIMATE, bytes_moved=300_000_000),
        replace(ESTIMATE, bytes_in_flight=1024),
        replace(ESTIMATE, flops=10**12),
        replace(ESTIMATE, serial_loads=30),
        replace(ESTIMATE, longest_share=2.0),
        replace(ESTIMATE, num_programs=8),
        replace(ESTIMATE, num_programs=4 * 132 + 1),
    ],
    ids=["bytes", "in-flight", "flops", "serial-loads", "imbalance", "few-blocks", "tail"],
)
def test_launch_that_loads_the_device_more_is_slower(problem, h200, slower):
    assert time_us(problem, h200, slower) > 1.02 * time_us(problem, h200)


@pytest.mark.parametrize(
    "slower",
    [
        replace(FACTS, spill_bytes=128),
        replace(FACTS, loop_instructions=2000),
        replace(FACTS, smem_bytes=200 * 1024),
        replace(FACTS, instruction_mix={"load_global": 16}),
        replace(FACTS, instruction_mix={"async_copy": 16, "atomic": 1}),
    ],
    ids=["spills", "instructions", "occupancy", "loads-that-wait", "atomics"],
)
def test_binary_that_needs_more_is_slower(problem, h200, slower):
    estimate = replace(ESTIMATE, bytes_in_flight=8 * 1024)
    assert time_us(problem, h200, estimate, slower) > time_us(problem, h200, estimate)


def test_matrix_instruction_counts(problem, h200):
    matrix_bound = replace(ESTIMATE, flops=10**12)
    group = time_us(problem, h200, matrix_bound)
    warp = time_us(problem, h200, matrix_bound, replace(FACTS, mma_kind="HMMA.16816.F32.BF16"))
    none = time_us(problem, h200, matrix_bound, replace(FACTS, mma_kind="none"))
    assert group < warp < none
    # The warp-level instruction is all that a consumer Blackwell has: no discount there.
    consumer = replace(h200, compute_capability=(12, 0))
    assert time_us(problem, consumer, matrix_bound, replace(FACTS, mma_kind="HMMA.16816.F32")) == (
        pytest.approx(group)
    )


def test_faster_device_is_faster(problem, h200):
    assert time_us(problem, replace(h200, bandwidth_gbps=8000.0)) < time_us(problem, h200)
    slow_clock = replace(h200, clock_mhz=200.0)
    assert time_us(problem, slow_clock) > time_us(problem, h200)


def test_launches_add_up(problem, h200):
    second = replace(ESTIMATE, kernel="merge", bytes_moved=1_000_000, num_programs=16)
    merge = replace(FACTS, kernel="merge", mma_kind="none")
    both = predict(problem, h200, [ESTIMATE, second], [FACTS, merge])
    assert [launch.kernel for launch in both.launches] == ["k", "merge"]
    alone = time_us(problem, h200) + time_us(problem, h200, second, merge)
    assert both.time_us == pytest.approx(alone)
    # A kernel that is compiled but not launched costs nothing.
    assert predict(problem, h200, [ESTIMATE], [FACTS, merge]).time_us == time_us(problem, h200)


def test_what_cannot_launch_is_out_of_resources(problem, h200):
    found = predict(problem, h200, [ESTIMATE], [replace(FACTS, smem_bytes=300 * 1024)])
    assert found.status is TrialStatus.OUT_OF_RESOURCES
    assert "shared memory" in found.reason


def test_heavy_spills_are_refused_and_light_ones_are_not(problem, h200):
    limit = CONSTANTS.max_spill_bytes
    assert predict(problem, h200, [ESTIMATE], [replace(FACTS, spill_bytes=limit)]).status == "ok"
    found = predict(problem, h200, [ESTIMATE], [replace(FACTS, spill_bytes=limit + 4)])
    assert found.status is TrialStatus.INVALID
    assert f"spills {limit + 4} bytes" in found.reason


def test_device_wide_figures_of_the_sku_count(problem, h200):
    few_sms = replace(h200, num_sms=66)
    assert time_us(problem, few_sms) > 1.2 * time_us(problem, h200)
    chain = replace(ESTIMATE, num_programs=16, bytes_moved=16 * 10**6, bytes_in_flight=2048)
    faster_memory = replace(h200, bandwidth_gbps=2 * h200.bandwidth_gbps)
    # 16 blocks wait for latency: bandwidth cannot help them much.
    assert time_us(problem, faster_memory, chain) > 0.95 * time_us(problem, h200, chain)


def test_one_pass_in_flight_leaves_memory_idle(problem, h200):
    """One block on an SM: loads and instructions hide behind each other only with more passes."""
    one_pass = FACTS.loop_load_bytes * FACTS.threads_per_block
    facts = replace(FACTS, smem_bytes=160 * 1024, loop_instructions=800)
    estimate = replace(ESTIMATE, num_programs=132, bytes_in_flight=one_pass)
    deep = replace(estimate, bytes_in_flight=4 * one_pass)
    assert time_us(problem, h200, estimate, facts) > 1.1 * time_us(problem, h200, deep, facts)


def test_room_for_answers_bounds_what_is_in_flight(problem, h200):
    """The estimate may claim more than the compiler made room for."""
    claimed = replace(ESTIMATE, num_programs=132, bytes_in_flight=128 * 1024)
    small = replace(FACTS, smem_bytes=16 * 1024)
    true_estimate = replace(claimed, bytes_in_flight=16 * 1024)
    assert time_us(problem, h200, claimed, small) == time_us(problem, h200, true_estimate, small)
    assert time_us(problem, h200, claimed, small) > 1.5 * time_us(
        problem, h200, claimed, replace(FACTS, smem_bytes=128 * 1024)
    )


def test_bound_is_named(problem, h200):
    def bound(estimate, facts=FACTS):
        return predict(problem, h200, [estimate], [facts]).launches[0].bound

    assert bound(ESTIMATE) == "memory"
    assert bound(replace(ESTIMATE, bytes_in_flight=512)) == "latency"
    assert bound(replace(ESTIMATE, flops=10**13)) == "matrix"
    assert bound(ESTIMATE, replace(FACTS, loop_instructions=20_000)) == "issue"
    # Blocks that share their bytes: each SM takes in far more than the memory gives.
    shared = replace(ESTIMATE, bytes_moved=10**7, flops=4 * 10**11)
    repeats = replace(FACTS, instruction_mix={"async_copy": 16, "mma": 1}, loop_instructions=1)
    assert bound(shared, repeats) == "intake"


@settings(max_examples=200, deadline=None)
@given(
    num_programs=st.integers(0, 10**6),
    bytes_moved=st.integers(0, 10**12),
    flops=st.integers(0, 10**15),
    bytes_in_flight=st.integers(0, 2**18),
    serial_loads=st.integers(0, 1000),
    registers=st.integers(0, 255),
    threads=st.sampled_from([32, 64, 128, 256]),
    more=st.integers(1, 10**9),
)
def test_finite_positive_and_monotone(
    num_programs, bytes_moved, flops, bytes_in_flight, serial_loads, registers, threads, more
):
    from toy_op import ToyProblem
    from toy_study import toy_device

    device, problem = toy_device(), ToyProblem(size=64)
    facts = replace(FACTS, registers=registers, threads_per_block=threads)
    estimate = LaunchEstimate("k", num_programs, bytes_moved, flops, bytes_in_flight, serial_loads)
    found = time_us(problem, device, estimate, facts)
    assert math.isfinite(found)
    assert found >= CONSTANTS.launch_us
    for slower in (
        replace(estimate, bytes_moved=bytes_moved + more),
        replace(estimate, flops=flops + more),
        replace(estimate, serial_loads=serial_loads + 1),
        replace(estimate, bytes_in_flight=bytes_in_flight // 2),
    ):
        assert time_us(problem, device, slower, facts) >= found * (1 - 1e-9)
    wider = replace(device, bandwidth_gbps=2 * device.bandwidth_gbps)
    assert time_us(problem, wider, estimate, facts) <= found * (1 + 1e-9)


def test_roofline_is_the_longer_of_bytes_and_flops(toy, h200):
    problem = toy.ToyProblem(size=10**9)
    assert roofline_us(problem, h200) == pytest.approx(8e9 / 4.8e12 * 1e6)
    assert share_of_roofline(problem, h200, 2 * roofline_us(problem, h200)) == pytest.approx(0.5)
    slow = replace(h200, peak_tflops={"float32": 1e-3})
    assert roofline_us(problem, slow) == pytest.approx(1e9 / 1e9 * 1e6)


def test_type_without_a_peak_is_computed_in_a_wider_one(toy, h200):
    problem = replace(toy.ToyProblem(size=10**9), dtype="float4_e2m1fn_x2")
    no_bandwidth_limit = replace(h200, bandwidth_gbps=1e12)
    expected = problem.flops / (h200.peak_tflops["bfloat16"] * 1e6)
    assert roofline_us(problem, no_bandwidth_limit) == pytest.approx(expected)
