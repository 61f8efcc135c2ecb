"""What a block has to do, read from facts and estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tilescout.kernels.base import LaunchEstimate
from tilescout.tuner.prediction.block_work import BlockWork
from tilescout.tuner.prediction.constants import CONSTANTS
from tilescout.tuner.prediction.matrix_instructions import flops_per_warp
from tilescout.tuner.records import BinaryFacts

FACTS = BinaryFacts(
    kernel="k",
    threads_per_block=128,
    registers=64,
    spill_bytes=0,
    smem_bytes=96 * 1024,
    tmem_columns=0,
    num_instructions=1000,
    mma_kind="HMMA.16816.F32.BF16",
    instruction_mix={"async_copy": 32, "mma": 32},
    loop_instructions=400,
    loop_load_bytes=256,
)
# Four blocks; each streams ten passes of 32 KiB with 32 matrix instructions of four warps.
PASS_BYTES = 256 * 128
PASS_FLOPS = 32 * 4 * 2 * 16 * 8 * 16
ESTIMATE = LaunchEstimate(
    kernel="k",
    num_programs=4,
    bytes_moved=4 * 10 * PASS_BYTES,
    flops=4 * 10 * PASS_FLOPS,
    bytes_in_flight=2 * PASS_BYTES,
    serial_loads=3,
)


@pytest.mark.parametrize(
    ("mma_kind", "flops"),
    [
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 2 * 16 * 8 * 8),
        ("IMMA.16832.S8.S8", 2 * 16 * 8 * 32),
        ("DMMA.8x8x4", 2 * 8 * 8 * 4 / 4),
        ("HGMMA.64x256x16.F32.BF16", 2 * 64 * 256 * 16 / 4),
        ("QGMMA.64x8x32.F32.E4M3.E4M3", 2 * 64 * 8 * 32 / 4),
        ("UTCHMMA.2CTA", 0),
        ("none", 0),
    ],
)
def test_operations_of_a_matrix_instruction(mma_kind, flops):
    assert flops_per_warp(mma_kind) == flops


def test_passes_by_bytes_and_by_matrix_instructions_agree():
    assert BlockWork(ESTIMATE, FACTS).num_passes == pytest.approx(10)


@pytest.mark.parametrize(
    "estimate",
    [replace(ESTIMATE, bytes_moved=ESTIMATE.bytes_moved // 2), replace(ESTIMATE, flops=0)],
    ids=["shared-bytes", "repeated-matrix-instructions"],
)
def test_either_count_of_passes_may_be_too_low(estimate):
    work = BlockWork(estimate, FACTS)
    assert work.num_passes == pytest.approx(10)
    assert work.bytes_taken_in == pytest.approx(10 * PASS_BYTES)
    assert work.num_instructions == pytest.approx(4 * (1000 + 9 * 400))


def test_bytes_that_the_code_around_the_loop_can_move_ask_for_no_passes():
    """As in a recurrent step: the state is loaded before the loop over tokens and stored after."""
    mix = {"load_global": 20, "store_global": 16}
    facts = replace(FACTS, mma_kind="none", instruction_mix=mix, loop_load_bytes=8)
    around_the_loop = (36 * 16 - 8) * 128
    fits = replace(ESTIMATE, bytes_moved=4 * around_the_loop)
    assert BlockWork(fits, facts).num_passes == 1
    more = replace(ESTIMATE, bytes_moved=4 * around_the_loop + 4)
    assert BlockWork(more, facts).num_passes > around_the_loop / (8 * 128)


def test_code_without_widths_is_counted_once_and_takes_in_what_it_moves():
    work = BlockWork(ESTIMATE, replace(FACTS, loop_load_bytes=0, loop_instructions=0))
    assert work.num_passes == 1
    assert work.bytes_taken_in == 10 * PASS_BYTES
    assert work.passes_in_flight == 1


def test_plain_loads_have_room_in_registers_only():
    plain = replace(FACTS, instruction_mix={"load_global": 32})
    assert BlockWork(ESTIMATE, FACTS).passes_in_flight == 2
    assert BlockWork(ESTIMATE, plain).bytes_in_flight == 128 * 64 * 4
    without_code = replace(plain, registers=0, instruction_mix={})
    assert BlockWork(ESTIMATE, without_code).bytes_in_flight == ESTIMATE.bytes_in_flight


def test_chain_is_the_longer_of_loads_and_instructions_or_both_without_overlap():
    clock_mhz = 1000.0
    once_us = 600 * CONSTANTS.cycles_per_instruction / clock_mhz
    loop_us = 10 * 400 * CONSTANTS.cycles_per_instruction / clock_mhz
    load_us = 10 * CONSTANTS.stream_latency_us / 2
    serial_us = 3 * CONSTANTS.serial_latency_us
    found = BlockWork(ESTIMATE, FACTS).chain_us(CONSTANTS, clock_mhz)
    assert found == pytest.approx(serial_us + once_us + max(loop_us, load_us))
    plain = replace(FACTS, registers=128, instruction_mix={"load_global": 32})
    found = BlockWork(ESTIMATE, plain).chain_us(CONSTANTS, clock_mhz)
    assert found == pytest.approx(serial_us + once_us + loop_us + load_us)
