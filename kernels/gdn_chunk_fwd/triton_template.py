"""Host side of the Triton template: what it serves, its kernels and parts, its launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Config, KernelTemplate, LaunchEstimate, Part
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..triton_spec import TritonKernelSpec
from .problem import GdnChunkProblem
from .triton_config import GdnChunkTritonConfig
from .triton_estimates import launch_estimates
from .triton_specs import DEVICE_MODULES, KERNELS, TensorTraits, part_spec

if TYPE_CHECKING:
    from .inputs import GdnChunkInputs
    from .triton_launcher import GdnChunkTritonLauncher

__all__ = ["HEAD_DIMS", "GdnChunkTriton"]

HEAD_DIMS = (64, 96, 128, 192, 256)


class GdnChunkTriton(KernelTemplate):
    """Chunks in parallel, states along the chunks in turn; every kernel is a part."""

    op = "gdn_chunk_fwd"
    name = "triton"
    backend = "triton"

    def supports(self, problem: GdnChunkProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        for name in ("head_dim_k", "head_dim_v"):
            if getattr(problem, name) not in HEAD_DIMS:
                allowed = ", ".join(map(str, HEAD_DIMS))
                return f"{name}={getattr(problem, name)} is not one of {allowed}"
        if device.compute_capability < (9, 0):
            return f"compute capability {device.compute_capability_text} is below 9.0"
        return None

    def kernel_specs(
        self, problem: GdnChunkProblem, config: Config
    ) -> tuple[TritonKernelSpec, ...]:
        """One kernel for each part."""
        typed, traits = GdnChunkTritonConfig(problem, config), TensorTraits.of(problem)
        return tuple(part_spec(typed, part, traits) for part in typed.parts)

    def build(
        self, problem: GdnChunkProblem, config: Config, inputs: GdnChunkInputs
    ) -> GdnChunkTritonLauncher:
        """A launcher for calls up to the size of the problem and of the inputs."""
        from .triton_launcher import GdnChunkTritonLauncher

        return GdnChunkTritonLauncher(
            GdnChunkTritonConfig(problem, config),
            inputs,
            max(problem.num_tokens, inputs.num_tokens),
            max(problem.num_sequences, inputs.num_sequences),
        )

    def estimate(
        self, problem: GdnChunkProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of each launch."""
        return launch_estimates(GdnChunkTritonConfig(problem, config))

    def parts(self, problem: GdnChunkProblem, config: Config) -> tuple[Part, ...]:
        """The kernels of the algorithm, each by itself."""
        parts = GdnChunkTritonConfig(problem, config).parts
        return tuple(Part(part, (KERNELS[part],)) for part in parts)

    def source_hash(self) -> str:
        """Hash of the device code, of the host code and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        host = ("triton_config", "triton_specs", "triton_launcher", "triton_template")
        modules = (*DEVICE_MODULES, *(f"{package}.{name}" for name in host))
        return source_hash((*modules, f"{root}.triton_spec"))
