"""The TileLang template of FP4 attention for FP4 tensor cores: what it supports and launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Config, KernelSpec, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from .machine_code_kinds import CodeCheckedSpec
from .mma_kinds import declared_kinds
from .operand_checks import unaligned_rows, unsupported_operands
from .problem import HEAD_DIMS, OUT_DTYPE_BYTES, Fp4AttentionFwdProblem
from .tilelang_native_specs import (
    NATIVE_TILELANG_KERNEL,
    Fp4AttentionTileLangNativeConfig,
    native_attention_spec,
)
from .tilelang_template import above_grid

if TYPE_CHECKING:
    # Compiling needs no torch, and a process that only compiles starts in half the time without.
    from .inputs import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs
    from .tilelang_native_launcher import Fp4AttentionTileLangNativeLauncher

__all__ = ["Fp4AttentionTileLangNative"]

SM_120 = (12, 0)
_NVFP4_BYTES = 4.5 / 8
_MODE_REFUSALS = {
    "direct": "TileLang 0.1.15 has no product of MXFP4, of which P and V are",
    "fp8_p": "it multiplies P and V as NVFP4, not as FP8",
}


class Fp4AttentionTileLangNative(KernelTemplate):
    """Codes and scales go to the FP4 tensor cores of sm_120 as they are, P too."""

    op = "fp4_attention_fwd"
    name = "tilelang_native"
    backend = "tilelang"

    def supports(self, problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if problem.products != "native":
            return f"products={problem.products!r}: the template triton_emulated serves such"
        if device.compute_capability != SM_120:
            return (
                f"compute capability {device.compute_capability_text} is not 12.0, for which alone "
                "TileLang 0.1.15 has products of FP4 blocks with e4m3 scales"
            )
        if problem.mode in _MODE_REFUSALS:
            return (
                f"mode={problem.mode!r}: {_MODE_REFUSALS[problem.mode]}; "
                "the template triton_native serves such"
            )
        if problem.head_dim not in HEAD_DIMS:
            return f"head_dim={problem.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        return above_grid(problem)

    def supports_tensors(
        self,
        problem: Fp4AttentionFwdProblem,
        inputs: Fp4AttentionFwdInputs,
        outputs: Fp4AttentionFwdOutputs | None = None,
    ) -> str | None:
        """None, or why these tensors cannot be served: rows of the output must be aligned."""
        return unsupported_operands(inputs, outputs) or unaligned_rows(outputs)

    def kernel_specs(
        self, problem: Fp4AttentionFwdProblem, config: Config
    ) -> tuple[KernelSpec, ...]:
        """The one kernel, whose machine code is checked."""
        typed = Fp4AttentionTileLangNativeConfig.of(config)
        spec = native_attention_spec(problem, typed, stores_lse=True)
        return (CodeCheckedSpec(spec, declared_kinds(problem)),)

    def build(
        self, problem: Fp4AttentionFwdProblem, config: Config, inputs: Fp4AttentionFwdInputs
    ) -> Fp4AttentionTileLangNativeLauncher:
        """A launcher for inputs of these shapes on their device."""
        from .tilelang_native_launcher import Fp4AttentionTileLangNativeLauncher

        typed = Fp4AttentionTileLangNativeConfig.of(config)
        return Fp4AttentionTileLangNativeLauncher(problem, typed, inputs)

    def estimate(
        self, problem: Fp4AttentionFwdProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """The launch: K and V come from L2 where the heads in flight fit into it."""
        typed = Fp4AttentionTileLangNativeConfig.of(config)
        row_tiles = typed.row_tiles(problem)
        kv_bytes = int(2 * problem.head_dim * problem.padded_keys * _NVFP4_BYTES)
        heads_in_flight = max(1, device.num_sms // row_tiles)
        reads = 1 if heads_in_flight * kv_bytes <= device.l2_bytes else row_tiles
        heads = problem.batch * problem.num_qo_heads
        queries = heads * problem.query_len * problem.head_dim
        padded_keys = -(-problem.kv_len // typed.block_n) * typed.block_n
        padded = typed.block_m * row_tiles * padded_keys
        share = problem.num_pairs / (problem.query_len * problem.kv_len)
        tile_bytes = 2 * typed.block_n * problem.head_dim * _NVFP4_BYTES
        return (
            LaunchEstimate(
                kernel=NATIVE_TILELANG_KERNEL,
                num_programs=typed.num_programs(problem),
                bytes_moved=int(queries * (OUT_DTYPE_BYTES[problem.out_dtype] + _NVFP4_BYTES))
                + problem.batch * problem.num_kv_heads * kv_bytes * reads,
                flops=int(4 * heads * problem.head_dim * padded * share),
                bytes_in_flight=int(typed.num_stages * tile_bytes),
                serial_loads=2,
                longest_share=(2.0 if row_tiles > 1 else 1.0) if problem.is_causal else 1.0,
            ),
        )

    def source_hash(self) -> str:
        """Hash of the device code, of how it is launched and of how kernels are specialised."""
        package = __package__ or ""
        own = ("tilelang_native_kernel", "tilelang_native_specs", "tilelang_native_launcher")
        root = package.rpartition(".")[0]
        return source_hash((*(f"{package}.{name}" for name in own), f"{root}.tilelang_spec"))
