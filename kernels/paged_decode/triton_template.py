"""The Triton template of paged decode: what it supports, compiles and launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Config, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..triton_spec import TritonKernelSpec
from .problem import NVFP4, PagedDecodeProblem
from .triton_estimate import estimates
from .triton_specs import (
    KERNEL,
    MERGE_KERNEL,
    PagedDecodeTritonConfig,
    TensorTraits,
    kernel_specs,
)

if TYPE_CHECKING:
    # Compiling needs no torch, and a process that only compiles starts in half the time without.
    from .inputs import PagedDecodeInputs
    from .triton_launcher import PagedDecodeTritonLauncher

__all__ = ["PagedDecodeTriton"]

HEAD_DIMS = (64, 96, 128, 192, 256)
MAX_QUERY_LEN = 4096
MAX_PAGE_SIZE = 1024
MAX_BATCH = 65535


class PagedDecodeTriton(KernelTemplate):
    """Split-KV paged decode: gathering tiles of any width over pages of any size."""

    op = "paged_decode"
    name = "triton"
    backend = "triton"

    def supports(self, problem: PagedDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if problem.is_latent:
            return (
                f"head_dim_v={problem.head_dim_v} is not head_dim={problem.head_dim}: "
                "the template triton_mla serves such problems"
            )
        if problem.kv_dtype == NVFP4:
            return f"kv_dtype={NVFP4}: the template triton_nvfp4 serves such caches"
        return self._limit_passed(problem, device)

    def _limit_passed(self, problem: PagedDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or which size is out of range; the same for every kind of values in the cache."""
        limits = {
            "query_len": MAX_QUERY_LEN,
            "page_size": MAX_PAGE_SIZE,
            "batch": MAX_BATCH,  # the second axis of a CUDA grid
        }
        for name, limit in limits.items():
            if getattr(problem, name) > limit:
                return f"{name}={getattr(problem, name)} is above {limit}"
        if problem.head_dim not in HEAD_DIMS:
            return f"head_dim={problem.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if device.compute_capability < (9, 0):
            return f"compute capability {device.compute_capability_text} is below 9.0"
        return None

    def kernel_specs(
        self, problem: PagedDecodeProblem, config: Config
    ) -> tuple[TritonKernelSpec, ...]:
        """The attention kernel and, where a second launch merges, the merge kernel."""
        return kernel_specs(
            problem, PagedDecodeTritonConfig.of(config), TensorTraits(), batch=problem.batch
        )

    def build(
        self, problem: PagedDecodeProblem, config: Config, inputs: PagedDecodeInputs
    ) -> PagedDecodeTritonLauncher:
        """A launcher for inputs of these shapes, strides and this device.

        The lengths are read on the device: a captured launch serves any lengths as long as the page
        table does not outgrow ``inputs.kv_indices``.
        """
        from .triton_launcher import PagedDecodeTritonLauncher

        return PagedDecodeTritonLauncher(problem, PagedDecodeTritonConfig.of(config), inputs)

    def estimate(
        self, problem: PagedDecodeProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the attention launch and of the merge launch."""
        return estimates(problem, PagedDecodeTritonConfig.of(config), device)

    def source_hash(self) -> str:
        """Hash of the device code, of how it is launched and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        modules = (
            *(KERNEL, MERGE_KERNEL, "triton_kernel_partition"),
            *("triton_specs", "triton_launcher"),
        )
        return source_hash((*(f"{package}.{m}" for m in modules), f"{root}.triton_spec"))
