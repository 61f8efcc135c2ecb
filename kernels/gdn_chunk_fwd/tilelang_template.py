"""Host side of the TileLang template: Triton's kernels prepare the chunks, TileLang's scan them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..base import Config, KernelSpec, KernelTemplate, LaunchEstimate, Part
from ..device import DeviceSpec
from ..source_hash import source_hash
from .problem import GdnChunkProblem
from .tilelang_config import GdnChunkTileLangConfig
from .tilelang_specs import SCAN_KERNEL, SCAN_MODULE, SCAN_SOURCES, misalignment, scan_spec
from .triton_config import SCAN
from .triton_estimates import launch_estimates
from .triton_specs import DEVICE_MODULES, KERNELS, TensorTraits, part_spec
from .triton_template import HEAD_DIMS

if TYPE_CHECKING:
    from .inputs import GdnChunkInputs, GdnChunkOutputs
    from .tilelang_launcher import GdnChunkTileLangLauncher

__all__ = ["GdnChunkTileLang"]

_MAJOR_CAPABILITIES = (9, 10, 12)
"""Architectures that the scan compiles for."""
_DTYPES = ("bfloat16", "float16")


class GdnChunkTileLang(KernelTemplate):
    """Chunks in parallel by Triton's kernels; the scan by TileLang; every kernel is a part."""

    op = "gdn_chunk_fwd"
    name = "tilelang"
    backend = "tilelang"

    def supports(self, problem: GdnChunkProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if problem.dtype not in _DTYPES:
            return f"dtype={problem.dtype} is not one of {', '.join(_DTYPES)}"
        for name in ("head_dim_k", "head_dim_v"):
            if getattr(problem, name) not in HEAD_DIMS:
                allowed = ", ".join(map(str, HEAD_DIMS))
                return f"{name}={getattr(problem, name)} is not one of {allowed}"
        if device.compute_capability[0] not in _MAJOR_CAPABILITIES:
            listing = ", ".join(f"{major}.x" for major in _MAJOR_CAPABILITIES)
            return f"compute capability {device.compute_capability_text} is not one of {listing}"
        return None

    def supports_tensors(
        self,
        problem: GdnChunkProblem,
        inputs: GdnChunkInputs,
        outputs: GdnChunkOutputs | None = None,
    ) -> str | None:
        """None, or why it cannot serve these tensors."""
        # Normalised q and k are copies that lie as TMA wants them.
        given = () if problem.use_qk_l2norm else (("q", inputs.q), ("k", inputs.k))
        tensors = [*given, ("v", inputs.v)]
        if outputs is not None:
            tensors.append(("out", outputs.out))
        reasons = (misalignment(tensor, name) for name, tensor in tensors)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None and inputs.q.device.type != "cuda":
            return f"q is on device {inputs.q.device}, and TileLang has no interpreter"
        return reason

    def kernel_specs(self, problem: GdnChunkProblem, config: Config) -> tuple[KernelSpec, ...]:
        """One kernel for each part."""
        typed, traits = GdnChunkTileLangConfig(problem, config), TensorTraits.of(problem)
        prepared = (part_spec(typed, part, traits) for part in typed.parts)
        return (*prepared, scan_spec(typed, traits))

    def build(
        self, problem: GdnChunkProblem, config: Config, inputs: GdnChunkInputs
    ) -> GdnChunkTileLangLauncher:
        """A launcher for calls up to the size of the problem and of the inputs."""
        from .tilelang_launcher import GdnChunkTileLangLauncher

        return GdnChunkTileLangLauncher(
            GdnChunkTileLangConfig(problem, config),
            inputs,
            max(problem.num_tokens, inputs.num_tokens),
            max(problem.num_sequences, inputs.num_sequences),
        )

    def estimate(
        self, problem: GdnChunkProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of each launch; the scan's are those of Triton's fused scan."""
        *prepared, scan = launch_estimates(GdnChunkTileLangConfig(problem, config).with_scan)
        return (*prepared, replace(scan, kernel=SCAN_KERNEL))

    def parts(self, problem: GdnChunkProblem, config: Config) -> tuple[Part, ...]:
        """The kernels of the algorithm, each by itself."""
        parts = GdnChunkTileLangConfig(problem, config).parts
        return (*(Part(part, (KERNELS[part],)) for part in parts), Part(SCAN, (SCAN_KERNEL,)))

    def source_hash(self) -> str:
        """Hash of the device code, of the host code and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        host = ("triton_config", "triton_specs", "triton_launcher")
        own = ("tilelang_specs", "tilelang_launcher", "tilelang_template")
        modules = (
            *DEVICE_MODULES,
            SCAN_MODULE,
            *SCAN_SOURCES,
            *(f"{package}.{name}" for name in (*host, *own)),
        )
        return source_hash((*modules, f"{root}.triton_spec", f"{root}.tilelang_spec"))
