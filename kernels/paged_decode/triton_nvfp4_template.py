"""The Triton template of paged decode for NVFP4 caches: what it supports, compiles and launches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..base import Config, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..triton_spec import TritonKernelSpec
from .problem import NVFP4, PagedDecodeProblem
from .triton_estimate import estimates
from .triton_nvfp4_specs import (
    DEQUANT_MODULE,
    KERNEL,
    KERNEL_NAME,
    Nvfp4Config,
    kernel_specs,
)
from .triton_specs import TensorTraits
from .triton_template import PagedDecodeTriton

if TYPE_CHECKING:
    # Compiling needs no torch, and a process that only compiles starts in half the time without.
    from .inputs import PagedDecodeInputs, PagedDecodeOutputs
    from .triton_nvfp4_launcher import Nvfp4Launcher

__all__ = ["PagedDecodeNvfp4"]

WORD_BYTES = 4
"""Codes are loaded in words of up to as many bytes."""


class PagedDecodeNvfp4(PagedDecodeTriton):
    """Split-KV paged decode that dequantises on the way: 16-bit products on every architecture."""

    name = "triton_nvfp4"

    def supports(self, problem: PagedDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if problem.kv_dtype != NVFP4:
            return f"kv_dtype={problem.kv_dtype}: this template reads {NVFP4} caches only"
        if problem.has_rope:
            return (
                "has_rope=True: a rotated row needs new block scales; rotate K before it is "
                "quantised, and q before the call"
            )
        return self._limit_passed(problem, device)

    def supports_tensors(
        self,
        problem: PagedDecodeProblem,
        inputs: PagedDecodeInputs,
        outputs: PagedDecodeOutputs | None = None,
    ) -> str | None:
        """None, or what of the tensors' alignment the kernel cannot read."""
        del outputs
        blocks = problem.head_dim // 16
        alignment = blocks & -blocks
        scales = (inputs.k_block_scales, inputs.v_block_scales)
        for name, codes in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
            if codes.data_ptr() % WORD_BYTES or any(s % WORD_BYTES for s in codes.stride()[:3]):
                return (
                    f"{name} lies at strides {codes.stride()} from an address that is "
                    f"{codes.data_ptr() % 16} past a multiple of 16: rows of codes must begin at "
                    f"multiples of {WORD_BYTES} bytes"
                )
        for name, pool in zip(("k_block_scales", "v_block_scales"), scales, strict=True):
            if pool is None:
                return f"{name} is missing"
            if pool.data_ptr() % alignment or any(s % blocks for s in pool.stride()[:3]):
                return (
                    f"{name} lies at strides {pool.stride()} from an address that is "
                    f"{pool.data_ptr() % 16} past a multiple of 16: strides must be multiples of "
                    f"the {blocks} scales of a row, and the address of {alignment} bytes"
                )
        return None

    def kernel_specs(
        self, problem: PagedDecodeProblem, config: Config
    ) -> tuple[TritonKernelSpec, ...]:
        """The attention kernel and, where a second launch merges, the merge kernel."""
        return kernel_specs(problem, Nvfp4Config.of(config), TensorTraits(), batch=problem.batch)

    def build(
        self, problem: PagedDecodeProblem, config: Config, inputs: PagedDecodeInputs
    ) -> Nvfp4Launcher:
        """A launcher for inputs of these shapes, strides and this device, lengths free."""
        from .triton_nvfp4_launcher import Nvfp4Launcher

        return Nvfp4Launcher(problem, Nvfp4Config.of(config), inputs)

    def estimate(
        self, problem: PagedDecodeProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the attention launch and of the merge launch."""
        attention, *merges = estimates(problem, Nvfp4Config.of(config), device)
        return replace(attention, kernel=KERNEL_NAME), *merges

    def source_hash(self) -> str:
        """Hash of the device code, of how it is launched and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        own = (KERNEL, DEQUANT_MODULE, "triton_nvfp4_specs", "triton_nvfp4_launcher")
        shared = ("triton_kernel", "triton_kernel_merge", "triton_kernel_partition")
        launched = ("triton_specs", "triton_launcher")
        modules = [f"{package}.{name}" for name in (*own, *shared, *launched)]
        return source_hash((*modules, f"{root}.fp4_attention.mma_kinds", f"{root}.triton_spec"))
