"""Copying on the GPU with a Triton kernel whose configs can corrupt the CUDA context.

y = x over ``size`` floats. ``behaviour`` chooses what a config does beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from tilescout.kernels.base import Comparison, CompiledBinary, Config, KernelTemplate, Operation
from toy_op import ToyProblem


@triton.jit
def copy_kernel(x, y, size, offset, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < size)
    tl.store(y + offset + places, values, mask=places < size)


@triton.jit
def count_kernel(counter, y):
    seen = tl.atomic_add(counter, 1)
    tl.store(y, tl.load(y) + seen.to(tl.float32))


@triton.jit
def wait_kernel(flag):
    """Returns once the flag is set, which nobody does."""
    seen = tl.load(flag, volatile=True)
    while seen == 0:
        seen = tl.load(flag, volatile=True)


@dataclass(frozen=True)
class GpuToyProblem(ToyProblem):
    """Floats to copy."""

    op: ClassVar[str] = "gpu_toy"


@dataclass(frozen=True)
class GpuToySpec:
    """Stands for a compiled kernel; Triton compiles it at its first launch."""

    name: str = "copy_kernel"

    def compile(self, arch: int) -> CompiledBinary:
        return CompiledBinary(self.name, b"", 128, 0, 0)


class GpuToyLauncher:
    """One launch of the copy; ``stale_counter`` is right only while its counter is zero."""

    def __init__(self, config: Config, device) -> None:
        self._behaviour = config.get("behaviour")
        self._block = int(config["block"])
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._launches = 0

    def launch(self, inputs, outputs) -> None:
        x, y = inputs["x"], outputs["y"]
        # A terabyte past the end: no allocation is there.
        offset = 2**38 if self._behaviour == "illegal_access" else 0
        copy_kernel[(triton.cdiv(x.numel(), self._block),)](
            x, y, x.numel(), offset, BLOCK=self._block
        )
        if self._behaviour == "loop":
            wait_kernel[(1,)](self._counter)
        if self._behaviour == "stale_counter":
            count_kernel[(1,)](self._counter, y)
            self._launches += 1
            if self._launches <= 2:  # looks right as often as it is validated
                self._counter.zero_()
        if self._behaviour == "out_of_memory":
            torch.empty(2**50, dtype=torch.uint8, device=x.device)


class GpuToyTemplate(KernelTemplate):
    op = "gpu_toy"
    name = "triton"
    backend = "triton"

    def supports(self, problem, device) -> str | None:
        return None

    def kernel_specs(self, problem, config):
        return (GpuToySpec(),)

    def build(self, problem, config, inputs):
        return GpuToyLauncher(config, inputs["x"].device)

    def estimate(self, problem, config, device):
        return ()

    def source_hash(self) -> str:
        return "gpu-toy-1"


def make_inputs(problem, *, device, seed):
    generator = torch.Generator(device=device).manual_seed(seed)
    return {"x": torch.rand(problem.size, generator=generator, device=device)}


def make_outputs(problem, inputs):
    return {"y": torch.full_like(inputs["x"], float("nan"))}


def compare(problem, inputs, outputs) -> Comparison:
    error = (outputs["y"] - inputs["x"]).abs().max().item()
    reason = None if error == 0.0 else f"largest error {error:.3g} is not 0"
    return Comparison(reason, error, error)


OPERATION = Operation(
    name="gpu_toy",
    problem_type=GpuToyProblem,
    template_names=("triton",),
    load_template=lambda name: GpuToyTemplate(),
    make_inputs=make_inputs,
    make_validation_inputs=make_inputs,
    make_outputs=make_outputs,
    compare=compare,
    outputs_equal=lambda a, b: torch.equal(a["y"], b["y"]),
)
