"""A toy operation with two algorithms, one of which launches three independent kernels in turn.

y = 2 x + 1 over ``size`` floats on the CPU. ``algorithm=split`` scales, adds and stores in three
launches with parameters of their own; ``algorithm=fused`` does it in one. Times are formulas: those
of the parts add up to that of the split algorithm. ``behaviour`` belongs to no part.
"""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import toy_op
from tilescout.kernels.base import CompiledBinary, Config, LaunchEstimate, Part
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.parameters import ActiveWhen, categorical, ordered
from tilescout.search_spaces.space import SearchSpace

MODULE = "parts_toy_op"
PARTS = ("scale", "shift", "store")
SPLIT = ActiveWhen("algorithm", ("split",))
FUSED = ActiveWhen("algorithm", ("fused",))


@dataclass(frozen=True)
class PartsToyProblem(toy_op.ToyProblem):
    """Same as the toy's, under another name."""

    op: ClassVar[str] = "parts_toy"


def part_time_us(config: Config, part: str) -> float:
    """Made-up time of one part, from 4 to 12 us without order: only trying a config tells it."""
    own = sorted((name, value) for name, value in config.values if name.startswith(f"{part}_"))
    return 4.0 + zlib.crc32(repr(own).encode()) % 801 / 100


def time_us(config: Config) -> float:
    """Made-up time of the whole operation."""
    if config["algorithm"] == "split":
        return sum(part_time_us(config, part) for part in PARTS)
    return 16.0 + abs(int(config["fused_tile"]).bit_length() - 6)


@dataclass(frozen=True)
class PartsToySpec:
    """Compiles to nothing and writes its name into the file that TOY_COMPILED names."""

    name: str

    def compile(self, arch: int) -> CompiledBinary:
        if log := os.environ.get("TOY_COMPILED"):
            with Path(log).open("a") as file:
                file.write(f"{self.name}\n")
        return CompiledBinary(self.name, b"", 128, 1024, 0)


class PartsToyLauncher:
    """The intermediate results are scratch, as in a real template."""

    def __init__(self, config: Config, inputs: dict) -> None:
        self._config = config
        self._behaviour = config.get("behaviour")
        self._scaled = inputs["x"].new_empty(inputs["x"].shape)
        self._shifted = inputs["x"].new_empty(inputs["x"].shape)

    def launch(self, inputs: dict, outputs: dict) -> None:
        if self._config["algorithm"] == "fused":
            outputs["y"].copy_(2.0 * inputs["x"] + 1.0)
            time.sleep(time_us(self._config) * 1e-6)
            return
        for part in PARTS:
            self.launch_part(part, inputs, outputs)
        if self._behaviour == "idle":
            outputs["y"].copy_(2.0 * inputs["x"] + 1.0)

    def launch_part(self, part: str, inputs: dict, outputs: dict) -> None:
        if part == "scale":
            self._scaled.copy_((3.0 if self._behaviour == "wrong" else 2.0) * inputs["x"])
        elif part == "shift" and self._behaviour != "idle":
            self._shifted.copy_(self._scaled + 1.0)
            if self._behaviour == "in_place":
                self._scaled.add_(1.0)
        elif part == "store":
            outputs["y"].copy_(self._shifted)
        time.sleep(part_time_us(self._config, part) * 1e-6)


class PartsToyTemplate(toy_op.ToyTemplate):
    op = "parts_toy"

    def parts(self, problem, config):
        if config["algorithm"] == "fused":
            return ()
        return tuple(Part(part, (f"{part}_kernel",)) for part in PARTS)

    def kernel_specs(self, problem, config):
        names = PARTS if config["algorithm"] == "split" else ("fused",)
        return tuple(PartsToySpec(f"{name}_kernel") for name in names)

    def build(self, problem, config, inputs):
        return PartsToyLauncher(config, inputs)

    def estimate(self, problem, config, device):
        is_split = config["algorithm"] == "split"
        return tuple(
            LaunchEstimate(
                kernel=f"{name}_kernel",
                num_programs=8,
                # Bandwidth decides: the model then ranks as the formula does.
                bytes_moved=int(1e6 * us),
                flops=problem.flops,
                bytes_in_flight=2**16,
                serial_loads=1,
            )
            for name, us in (
                [(part, part_time_us(config, part)) for part in PARTS]
                if is_split
                else [("fused", time_us(config))]
            )
        )


def parts_space(problem, device) -> SearchSpace:
    """5 fused configs; 19, 40 and 20 configs of the three parts of the split algorithm."""

    def own(part: str) -> tuple:
        tiles = ordered(f"{part}_tile", 16, 32, 64, 128, 256, active_when=SPLIT, part=part)
        return tiles, ordered(f"{part}_depth", 1, 2, 3, 4, active_when=SPLIT, part=part)

    def fits(config: Config) -> str | None:
        too_much = config.get("scale_tile") == 256 and config.get("scale_depth") == 4
        return "scale needs too much shared memory" if too_much else None

    worst = {"scale_tile": 16, "scale_depth": 1, "shift_tile": 256, "shift_depth": 4}
    return SearchSpace(
        template="triton",
        parameters=(
            categorical("algorithm", "fused", "split"),
            *(parameter for part in PARTS for parameter in own(part)),
            categorical("shift_rule", "early", "late", active_when=SPLIT, part="shift"),
            ordered("fused_tile", 16, 32, 64, 128, 256, active_when=FUSED, part="all"),
        ),
        constraints=(Constraint("smem", fits),),
        default=Config.of("triton", {"algorithm": "fused", "fused_tile": 256}),
        seeds=(
            Config.of(
                "triton",
                {
                    "algorithm": "split",
                    "shift_rule": "late",
                    "store_tile": 16,
                    "store_depth": 1,
                    **worst,
                },
            ),
        ),
    )


SPACES = {"triton": parts_space}


def compare(problem, inputs, outputs):
    return toy_op.compare(problem, inputs, {"y": outputs["y"] - 1.0})


OPERATION = replace(
    toy_op.OPERATION,
    name="parts_toy",
    problem_type=PartsToyProblem,
    load_template=lambda name: PartsToyTemplate(),
    compare=compare,
)
"""Registered by tests as ``parts_toy``."""
