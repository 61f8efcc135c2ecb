#!/usr/bin/env python3
"""Instructions that paged decode over an NVFP4 cache needs for a value, and what they allow.

Counted in the loop of the compiled kernel, for each way to dequantise and each place of V; needs
no GPU. A value of K or V takes so many lane operations; each of four schedulers of a multiprocessor
issues one instruction a cycle, for 32 lanes, and its integer pipe takes one every other cycle. The
table of docs/paged_decode.md is the output.

    python benchmarks/nvfp4_instructions.py --clock-ghz 1.755
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import template
from tilescout.search_spaces.paged_decode_nvfp4 import nvfp4_space
from tilescout.tuner.catalog import gpu
from tilescout.tuner.prediction.binary import cuobjdump_path, read_facts

PROBLEM = PagedDecodeProblem(64, 8192, 32, 8, 128, 16, "bfloat16", kv_dtype="nvfp4")
SCHEDULERS, LANES = 4, 32
TILES = (("registers", 32, 1, 168), ("registers", 64, 2, 128), ("shared", 128, 4, 168))
"""Place of V, tokens of a tile, warps, bound of registers."""
HALF_RATE = re.compile(
    r"(LOP3|SHF|PRMT|I?SETP|ISETP|FMNMX|FSETP|SEL|FSEL|VIADD\w*|IADD3|VIMNMX|LEA|PLOP3|F2FP|R2P)$"
)
"""Opcodes of the integer pipe: 64 lanes a cycle, by the throughput table of the CUDA C++
Programming Guide for compute capability 9.0 (integer, logic, shift, compare, byte permute)."""
COLUMNS = (
    *("SKU", "dequant", "V", "tokens x warps", "registers", "spill bytes", "shared KiB"),
    *("loop", "a value", "integer pipe, a value", "bound us", "bytes us"),
)
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.M
)


def loop_opcodes(cubin: bytes) -> list[str]:
    """Opcodes of the innermost loop that multiplies matrices."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [str(cuobjdump_path()), "--dump-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [
        (int(a, 16), name.partition(".")[0], rest) for a, name, rest in _INSTRUCTION.findall(text)
    ]
    loops = []
    for address, opcode, rest in found:
        target = re.search(r"0x([0-9a-f]+)\s*$", rest)
        if opcode == "BRA" and target and int(target[1], 16) < address:
            body = [name for a, name, _ in found if int(target[1], 16) <= a <= address]
            if any(name.endswith("MMA") for name in body):
                loops.append(body)
    return min(loops, key=len)


def bound_us(
    per_value: float, pipe_per_value: float, device: DeviceSpec, clock_ghz: float
) -> float:
    """Time of the problem where one of the two never rests."""
    problem = PROBLEM
    values = 2 * problem.tokens_read * problem.num_kv_heads * problem.head_dim
    lane_operations = values * max(per_value, 2 * pipe_per_value)
    return lane_operations / (device.num_sms * SCHEDULERS * LANES * clock_ghz * 1e3)


def row_of(config: Config, device: DeviceSpec, clock_ghz: float) -> tuple[str, ...]:
    """One line of the table."""
    (spec,) = template("paged_decode", "triton_nvfp4").kernel_specs(PROBLEM, config)
    binary = spec.compile(device.arch)
    facts, opcodes = read_facts(binary), loop_opcodes(binary.cubin)
    block_n, warps = int(config["block_n"]), int(config["num_warps"])
    lanes_a_value = warps * LANES / (2 * block_n * PROBLEM.head_dim)
    per_value = len(opcodes) * lanes_a_value
    pipe = sum(bool(HALF_RATE.match(name)) for name in opcodes) * lanes_a_value
    bytes_us = PROBLEM.bytes_moved / device.bandwidth_gbps / 1e3
    return (
        *(device.sku, str(config["dequant"]), str(config["v_operand"]), f"{block_n} x {warps}"),
        *(str(facts.registers), str(facts.spill_bytes), f"{facts.smem_bytes / 1024:.1f}"),
        *(str(len(opcodes)), f"{per_value:.2f}", f"{pipe:.2f}"),
        *(f"{bound_us(per_value, pipe, device, clock_ghz):.0f}", f"{bytes_us:.0f}"),
    )


def main() -> None:
    """Prints the table line by line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", nargs="+", default=["h200"])
    parser.add_argument("--clock-ghz", type=float, default=1.755, help="of the multiprocessors")
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for name in arguments.gpu:
        device = gpu(name)
        space = nvfp4_space(PROBLEM, device)
        variants = next(p.values for p in space.parameters if p.name == "dequant")
        seed = next(s for s in space.valid_seeds() if s["split_rule"] == "none")
        for dequant in (*variants, "arithmetic"):
            for v_operand, block_n, num_warps, maxnreg in TILES:
                config = seed.replace(
                    dequant=dequant,
                    v_operand=v_operand,
                    block_n=block_n,
                    num_warps=num_warps,
                    maxnreg=maxnreg,
                )
                print(f"| {' | '.join(row_of(config, device, arguments.clock_ghz))} |", flush=True)


if __name__ == "__main__":
    main()
