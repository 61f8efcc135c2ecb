"""A small operation without GPU or compiler, whose configs can be told to fail in every way.

y = 2 x over ``size`` floats on the CPU. Its time is a formula with a known optimum, so searches can
be judged; ``behaviour`` makes a config crash, hang, be wrong, and so on, in the process it runs in.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import ClassVar

from tilescout.errors import UsageError
from tilescout.kernels.base import (
    Comparison,
    CompiledBinary,
    Config,
    KernelTemplate,
    LaunchEstimate,
    Operation,
    Problem,
)
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.parameters import ActiveWhen, categorical, ordered, powers_of_two
from tilescout.search_spaces.space import SearchSpace

MODULE = "toy_op"
WORKLOAD = """
name = "toys"
description = "Two toy problems."
source = "made up"

[[problems]]
op = "toy"
label = "toy {size}"
size = [64, 4096]
"""


SLOW_BLOCK = "TOY_SLOW_BLOCK"
"""Environment variable: configs with this block_n compile slowly."""
SLOW_S = 1.5


@dataclass(frozen=True)
class ToyProblem(Problem):
    """``size`` floats to double."""

    op: ClassVar[str] = "toy"
    dynamic_fields: ClassVar[tuple[str, ...]] = ("size",)

    size: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"size={self.size!r} of a toy problem must be at least 1")

    @property
    def flops(self) -> int:
        return self.size

    @property
    def bytes_moved(self) -> int:
        return 8 * self.size

    @property
    def compute_dtype(self) -> str:
        return self.dtype


def toy_time_us(config: Config) -> float:
    """Made-up time with one optimum: block 64, 3 stages, split into 4."""
    time_us = 10.0
    time_us += abs(int(config["block_n"]).bit_length() - 7)
    time_us += 0.5 * abs(int(config["num_stages"]) - 3)
    if config["split_rule"] == "fixed":
        time_us += 0.25 * abs(int(config["num_splits"]) - 4)
    else:
        time_us += 2.0
    return time_us


def eat_memory() -> None:
    """Takes host memory until somebody stops it, or 6 GiB of it."""
    eaten = []
    for _ in range(96):
        eaten.append(b"x" * 2**26)
        time.sleep(0.01)
    raise RuntimeError(f"nobody stopped a process that took {len(eaten) * 64} MiB")


def _is_slow_block(config: Config) -> bool:
    return os.environ.get(SLOW_BLOCK) == str(config.get("block_n"))


@dataclass(frozen=True)
class ToySpec:
    """Compiles to nothing, or fails as ``behaviour`` says."""

    config: Config
    name: str = "toy_kernel"

    def compile(self, arch: int) -> CompiledBinary:
        behaviour = self.config.get("behaviour")
        if behaviour == "compile_error":
            raise RuntimeError("toy compiler: no such instruction")
        if behaviour == "compile_crash":
            os._exit(11)
        if behaviour == "compile_hang":
            time.sleep(3600)
        if behaviour == "compile_slowly" or _is_slow_block(self.config):
            time.sleep(SLOW_S)
        if behaviour == "compile_eat_memory":
            eat_memory()
        return CompiledBinary(self.name, b"", 128, 1024 * int(self.config["num_stages"]), 0)


@dataclass(frozen=True)
class ToyLauncher:
    config: Config

    def launch(self, inputs: dict, outputs: dict) -> None:
        behaviour = self.config.get("behaviour")
        if behaviour == "runtime_error":
            raise RuntimeError("toy launch failed")
        if behaviour == "out_of_memory":
            raise MemoryError("toy ran out of memory")
        if behaviour == "crash":
            os._exit(12)
        if behaviour == "hang":
            time.sleep(3600)
        if behaviour == "eat_memory":
            eat_memory()
        if behaviour == "nan":
            return
        outputs["y"].copy_(inputs["x"] * (3.0 if behaviour == "wrong" else 2.0))
        if behaviour == "unrepeatable":
            outputs["y"][0] += 1e-6 * (time.perf_counter_ns() % 1000 + 1)
        time.sleep(toy_time_us(self.config) * 1e-6)


class ToyTemplate(KernelTemplate):
    op = "toy"
    name = "triton"
    backend = "triton"

    def supports(self, problem, device) -> str | None:
        return None if problem.dtype == "float32" else f"dtype={problem.dtype!r} is not float32"

    def kernel_specs(self, problem, config):
        return (ToySpec(config),)

    def build(self, problem, config, inputs):
        return ToyLauncher(config)

    def estimate(self, problem, config, device):
        return (
            LaunchEstimate(
                kernel="toy_kernel",
                num_programs=max(1, problem.size // int(config["block_n"])),
                bytes_moved=problem.bytes_moved,
                flops=problem.flops,
                bytes_in_flight=int(config["block_n"]) * int(config["num_stages"]) * 4,
                serial_loads=1,
            ),
        )

    def source_hash(self) -> str:
        return "toy-1"


def toy_space(problem, device) -> SearchSpace:
    return SearchSpace(
        template="triton",
        parameters=(
            powers_of_two("block_n", 16, 256),
            ordered("num_stages", 1, 2, 3, 4),
            categorical("split_rule", "none", "fixed"),
            ordered("num_splits", 2, 4, 8, active_when=ActiveWhen("split_rule", ("fixed",))),
        ),
        constraints=(
            Constraint(
                "smem",
                lambda c: (
                    "too much shared memory"
                    if int(c["block_n"]) * int(c["num_stages"]) > 768
                    else None
                ),
            ),
        ),
        default=Config.of("triton", {"block_n": 16, "num_stages": 1, "split_rule": "none"}),
        seeds=(Config.of("triton", {"block_n": 128, "num_stages": 2, "split_rule": "none"}),),
    )


SPACES = {"triton": toy_space}


def make_inputs(problem, *, device, seed):
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return {"x": torch.rand(problem.size, generator=generator, device=device) + 1.0}


def make_outputs(problem, inputs):
    return {"y": inputs["x"].new_full((problem.size,), float("nan"))}


def compare(problem, inputs, outputs) -> Comparison:
    expected = 2.0 * inputs["x"]
    error = (outputs["y"] - expected).abs().max().item()
    is_right = error <= 1e-3  # NaN compares false
    reason = None if is_right else f"largest error {error:.3g} exceeds 1e-3"
    return Comparison(reason, error, error / 1.5)


OPERATION = Operation(
    name="toy",
    problem_type=ToyProblem,
    template_names=("triton",),
    load_template=lambda name: ToyTemplate(),
    make_inputs=make_inputs,
    make_validation_inputs=make_inputs,
    make_outputs=make_outputs,
    compare=compare,
    outputs_equal=lambda a, b: bool((a["y"] == b["y"]).all()),
)
