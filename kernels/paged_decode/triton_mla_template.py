"""The Triton template of paged decode for latent caches (MLA): what it supports and builds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..base import Config, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..triton_spec import TritonKernelSpec
from .problem import PagedDecodeProblem
from .triton_mla_specs import KERNEL, MERGE_KERNEL, MlaConfig, MlaTraits, kernel_specs

if TYPE_CHECKING:
    # Compiling needs no torch, and a process that only compiles starts in half the time without.
    from .inputs import PagedDecodeInputs
    from .triton_mla_launcher import MlaLauncher

__all__ = ["PagedDecodeMla"]

LATENT_DIMS = (64, 128, 256, 512)
ROPE_DIMS = (16, 32, 64, 128)
MAX_QUERY_LEN = 4096
MAX_BATCH = 65535
"""The second axis of a CUDA grid."""


class PagedDecodeMla(KernelTemplate):
    """Split-KV decode for latent caches: each row of the cache is read once, as K and as V."""

    op = "paged_decode"
    name = "triton_mla"
    backend = "triton"

    def supports(self, problem: PagedDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if not problem.is_latent:
            return (
                f"head_dim_v={problem.head_dim_v} equals head_dim: K and V are stored apart; this "
                "template reads rows of which V is the first part"
            )
        if problem.has_alibi:
            return "has_alibi=True: latent rows hold rotated positions, no slopes are added"
        if device.compute_capability < (9, 0):
            return f"compute capability {device.compute_capability_text} is below 9.0"
        return _size_refusal(problem)

    def kernel_specs(
        self, problem: PagedDecodeProblem, config: Config
    ) -> tuple[TritonKernelSpec, ...]:
        """The attention kernel and, where a second launch merges, the merge kernel."""
        traits = MlaTraits(kv_stride_token=problem.head_dim)
        return kernel_specs(problem, MlaConfig.of(config), traits, batch=problem.batch)

    def build(
        self, problem: PagedDecodeProblem, config: Config, inputs: PagedDecodeInputs
    ) -> MlaLauncher:
        """A launcher for inputs of these shapes, strides and this device.

        The lengths are read on the device: a captured launch serves any lengths as long as the page
        table does not outgrow ``inputs.kv_indices``.

        Raises:
            UsageError: V is not the first part of the rows of K.
        """
        from .triton_mla_launcher import MlaLauncher

        return MlaLauncher(problem, MlaConfig.of(config), inputs)

    def estimate(
        self, problem: PagedDecodeProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the attention launch and of the merge launch.

        As where K and V are stored apart, but for the row that is read once.
        """
        from .triton_estimate import estimates

        attention, *merge = estimates(problem, MlaConfig.of(config), device)
        products = problem.head_dim + problem.head_dim_v
        attention = replace(
            attention,
            kernel="paged_decode_mla_kernel",
            flops=attention.flops * products // (2 * problem.head_dim),
            bytes_in_flight=attention.bytes_in_flight // 2,
        )
        return (attention, *merge)

    def source_hash(self) -> str:
        """Hash of the device code, of how it is launched and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        modules = (
            KERNEL,
            MERGE_KERNEL,
            "triton_kernel_partition",
            "triton_specs",
            "triton_mla_specs",
            "triton_mla_template",
            "triton_mla_launcher",
        )
        return source_hash((*(f"{package}.{m}" for m in modules), f"{root}.triton_spec"))


def _size_refusal(problem: PagedDecodeProblem) -> str | None:
    rope_dim = problem.head_dim - problem.head_dim_v
    if problem.head_dim_v not in LATENT_DIMS:
        return f"head_dim_v={problem.head_dim_v} is not one of {_listed(LATENT_DIMS)}"
    if rope_dim not in ROPE_DIMS:
        return f"head_dim - head_dim_v={rope_dim} is not one of {_listed(ROPE_DIMS)}"
    for name, limit in {"query_len": MAX_QUERY_LEN, "batch": MAX_BATCH}.items():
        if getattr(problem, name) > limit:
            return f"{name}={getattr(problem, name)} is above {limit}"
    return None


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
