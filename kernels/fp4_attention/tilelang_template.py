"""The TileLang template of FP4 attention: what it supports, compiles and launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Config, KernelSpec, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from .machine_code_kinds import CodeCheckedSpec
from .mma_kinds import declared_kinds
from .operand_checks import unaligned_rows, unsupported_operands
from .problem import HEAD_DIMS, OUT_DTYPE_BYTES, Fp4AttentionFwdProblem
from .tilelang_specs import (
    ATTENTION_KERNEL,
    DEQUANTIZE_KEYS_BLOCK_M,
    DEQUANTIZE_KEYS_KERNEL,
    Fp4AttentionTileLangConfig,
    all_specs,
)
from .triton_specs import DEQUANTIZE_BLOCK_M, DEQUANTIZE_BLOCK_N, DEQUANTIZE_KERNEL

if TYPE_CHECKING:
    # Compiling needs no torch, and a process that only compiles starts in half the time without.
    from .inputs import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs
    from .tilelang_launcher import Fp4AttentionTileLangLauncher

__all__ = ["Fp4AttentionTileLang", "above_grid"]

HOPPER = (9, 0)
MAX_GRID_AXIS = 65535
_BF16_BYTES = 2
_NVFP4_BYTES = 4.5 / 8


class Fp4AttentionTileLang(KernelTemplate):
    """Codes and scales are dequantised exactly ahead of a warp-specialised kernel for Hopper."""

    op = "fp4_attention_fwd"
    name = "tilelang_emulated"
    backend = "tilelang"

    def supports(self, problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if problem.products != "emulated":
            return (
                f"products={problem.products!r}: TileLang 0.1.15 multiplies blocks of FP4 on "
                "sm_120 only and with e4m3 scales only; the template triton_native serves such"
            )
        if device.compute_capability != HOPPER:
            return (
                f"compute capability {device.compute_capability_text} is not 9.0, whose "
                "instructions (wgmma) it is written for"
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
        """The dequantising kernels and the attention, whose machine code is checked."""
        typed = Fp4AttentionTileLangConfig.of(config)
        *ahead, attention = all_specs(problem, typed, stores_lse=True)
        return (*ahead, CodeCheckedSpec(attention, declared_kinds(problem)))

    def build(
        self, problem: Fp4AttentionFwdProblem, config: Config, inputs: Fp4AttentionFwdInputs
    ) -> Fp4AttentionTileLangLauncher:
        """A launcher for inputs of these shapes on their device; scratch memory is its own."""
        from .tilelang_launcher import Fp4AttentionTileLangLauncher

        return Fp4AttentionTileLangLauncher(problem, Fp4AttentionTileLangConfig.of(config), inputs)

    def estimate(
        self, problem: Fp4AttentionFwdProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the dequantising launches and of the attention."""
        typed = Fp4AttentionTileLangConfig.of(config)
        return (*_dequantize_estimates(problem), _attention_estimate(problem, typed, device))

    def source_hash(self) -> str:
        """Hash of the device code, of how it is launched and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        own = (
            *("tilelang_kernel", "tilelang_specs", "tilelang_launcher", "triton_kernel_keys"),
            "triton_specs",
        )
        shared = ("quantization.triton_kernel", "triton_spec", "tilelang_spec")
        return source_hash(
            (*(f"{package}.{name}" for name in own), *(f"{root}.{name}" for name in shared))
        )


def above_grid(problem: Fp4AttentionFwdProblem) -> str | None:
    """None, or which size is more than an axis of the grid holds."""
    for axis in ("batch", "num_qo_heads"):
        value = getattr(problem, axis)
        if value > MAX_GRID_AXIS:
            return f"{axis}={value} is above {MAX_GRID_AXIS}, an axis of a CUDA grid"
    return None


def _dequantize_estimates(problem: Fp4AttentionFwdProblem) -> tuple[LaunchEstimate, ...]:
    """One a tensor, in launch order."""
    kv_rows = problem.batch * problem.num_kv_heads
    queries = problem.batch * problem.num_qo_heads * problem.query_len * problem.head_dim
    tile = DEQUANTIZE_BLOCK_M * DEQUANTIZE_BLOCK_N
    padded = kv_rows * problem.padded_keys * problem.head_dim
    launches = [
        (DEQUANTIZE_KERNEL, queries, tile),
        (DEQUANTIZE_KEYS_KERNEL, padded, DEQUANTIZE_KEYS_BLOCK_M * problem.head_dim),
    ]
    if problem.v_format is not None:
        launches.append((DEQUANTIZE_KERNEL, padded, tile))
    return tuple(
        LaunchEstimate(
            kernel=kernel,
            num_programs=max(1, elements // per_program),
            bytes_moved=int(elements * (_BF16_BYTES + _NVFP4_BYTES)),
            flops=elements,
            bytes_in_flight=per_program // 2,
            serial_loads=1,
        )
        for kernel, elements, per_program in launches
    )


def _attention_estimate(
    problem: Fp4AttentionFwdProblem, config: Fp4AttentionTileLangConfig, device: DeviceSpec
) -> LaunchEstimate:
    """The attention launch: K and V come from L2 where the heads in flight fit into it."""
    row_tiles = config.row_tiles(problem)
    v_bytes = 1 if problem.mode == "fp8_p" else _BF16_BYTES
    kv_bytes = problem.head_dim * problem.padded_keys * (_BF16_BYTES + v_bytes)
    heads_in_flight = max(1, device.num_sms // row_tiles)
    reads = 1 if heads_in_flight * kv_bytes <= device.l2_bytes else row_tiles
    heads = problem.batch * problem.num_qo_heads
    queries = heads * problem.query_len * problem.head_dim
    padded = config.block_m * row_tiles * -(-problem.kv_len // config.block_n) * config.block_n
    share = problem.num_pairs / (problem.query_len * problem.kv_len)
    return LaunchEstimate(
        kernel=ATTENTION_KERNEL,
        num_programs=config.num_programs(problem),
        bytes_moved=queries * (OUT_DTYPE_BYTES[problem.out_dtype] + _BF16_BYTES)
        + problem.batch * problem.num_kv_heads * kv_bytes * reads,
        flops=int(4 * heads * problem.head_dim * padded * share),
        bytes_in_flight=config.num_stages
        * config.block_n
        * problem.head_dim
        * (_BF16_BYTES + v_bytes),
        serial_loads=2,
        longest_share=(2.0 if row_tiles > 1 else 1.0) if problem.is_causal else 1.0,
    )
