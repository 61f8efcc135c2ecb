"""Host side of the backward's Triton template: what it serves, its kernels and parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Config, KernelSpec, KernelTemplate, LaunchEstimate, Part
from ..device import DeviceSpec
from ..fp4_attention.machine_code_kinds import code_checked
from ..fp4_attention.problem import HEAD_DIMS
from ..source_hash import source_hash
from .problem import Fp4AttentionBwdProblem
from .triton_config import Fp4AttentionBwdTritonConfig
from .triton_estimates import launch_estimates
from .triton_specs import DEVICE_MODULES, PART_KERNELS, TensorTraits, part_specs

if TYPE_CHECKING:
    # Compiling needs no torch, and a process that only compiles starts in half the time without.
    from .inputs import Fp4AttentionBwdInputs, Fp4AttentionBwdOutputs
    from .triton_launcher import Fp4AttentionBwdTritonLauncher

__all__ = ["FP4_TENSOR_CORES", "Fp4AttentionBwdTriton"]

FP4_TENSOR_CORES = ((10, 0), (10, 3), (12, 0))
"""Compute capabilities for which ``tl.dot_scaled`` compiles to FP4 products, Triton 3.6 to 3.9."""
MAX_PROGRAMS = 2**31 - 1
_LEAST_BLOCK = 32


class Fp4AttentionBwdTriton(KernelTemplate):
    """Operands in FP8 both ways, then dK and dV by keys and dQ by queries; no atomics."""

    op = "fp4_attention_bwd"
    name = "triton"
    backend = "triton"

    def supports(self, problem: Fp4AttentionBwdProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if problem.products == "native" and device.compute_capability not in FP4_TENSOR_CORES:
            allowed = ", ".join(f"{major}.{minor}" for major, minor in FP4_TENSOR_CORES)
            return (
                f"compute capability {device.compute_capability_text} is not one of {allowed}, "
                "which have FP4 tensor cores that Triton compiles for: products='emulated' "
                "computes the same scores"
            )
        if device.compute_capability < (9, 0):
            return f"compute capability {device.compute_capability_text} is below 9.0"
        if problem.head_dim not in HEAD_DIMS:
            return f"head_dim={problem.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        longest = max(problem.padded_rows, problem.padded_keys)
        programs = problem.batch * problem.num_qo_heads * (longest // _LEAST_BLOCK)
        if programs > MAX_PROGRAMS:
            return f"{programs} tiles of {_LEAST_BLOCK} tokens are more than a grid holds"
        return None

    def supports_tensors(
        self,
        problem: Fp4AttentionBwdProblem,
        inputs: Fp4AttentionBwdInputs,
        outputs: Fp4AttentionBwdOutputs | None = None,
    ) -> str | None:
        """None, or why not these tensors: what was saved must be contiguous and plain."""
        saved = {"v": inputs.v, "v_scale": inputs.v_scale, "lse": inputs.lse}
        for name, operand in (("q", inputs.q), ("k", inputs.k)):
            if operand.scale_layout != "plain":
                return f"scales of {name} are {operand.scale_layout}: only plain ones are read"
            saved |= {f"codes of {name}": operand.codes, f"scales of {name}": operand.scales}
        for name, tensor in saved.items():
            if not tensor.is_contiguous():
                return f"{name}: not contiguous"
            if name not in ("v_scale", "lse") and tensor.data_ptr() % 16:
                return f"{name}: starts at no multiple of 16 bytes; clone it"
        rows = {"out": inputs.out, "grad_out": inputs.grad_out}
        if outputs is not None:
            rows |= {"dq": outputs.dq, "dk": outputs.dk, "dv": outputs.dv}
        for name, tensor in rows.items():
            if tensor.stride(-1) != 1:
                return f"the last axis of {name} is not contiguous"
        return None

    def kernel_specs(
        self, problem: Fp4AttentionBwdProblem, config: Config
    ) -> tuple[KernelSpec, ...]:
        """The kernels of all parts; with native scores, their machine code must show these."""
        typed = Fp4AttentionBwdTritonConfig(problem, config)
        specs = tuple(s for part in typed.parts for s in part_specs(typed, part, TensorTraits()))
        return tuple(map(code_checked, specs)) if typed.is_native else specs

    def build(
        self, problem: Fp4AttentionBwdProblem, config: Config, inputs: Fp4AttentionBwdInputs
    ) -> Fp4AttentionBwdTritonLauncher:
        """A launcher for inputs of these shapes on their device; scratch memory is its own."""
        from .triton_launcher import Fp4AttentionBwdTritonLauncher

        return Fp4AttentionBwdTritonLauncher(Fp4AttentionBwdTritonConfig(problem, config), inputs)

    def estimate(
        self, problem: Fp4AttentionBwdProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of each launch."""
        return launch_estimates(Fp4AttentionBwdTritonConfig(problem, config), device)

    def parts(self, problem: Fp4AttentionBwdProblem, config: Config) -> tuple[Part, ...]:
        """Preparing is one part; each product pass is one."""
        parts = Fp4AttentionBwdTritonConfig(problem, config).parts
        return tuple(Part(part, PART_KERNELS[part]) for part in parts)

    def source_hash(self) -> str:
        """Hash of the device code, of the host code and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        host = ("triton_config", "triton_specs", "triton_launcher")
        shared = ("fp4_attention.mma_kinds", "quantization.triton_kernel", "triton_spec")
        modules = (*DEVICE_MODULES, *(f"{package}.{name}" for name in host))
        return source_hash((*modules, *(f"{root}.{name}" for name in shared)))
