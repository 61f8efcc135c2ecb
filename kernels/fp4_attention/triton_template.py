"""The Triton templates of FP4 attention: what each supports, compiles and launches."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from ..base import Config, KernelSpec, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..triton_spec import TritonKernelSpec
from .machine_code_kinds import code_checked
from .operand_checks import unsupported_operands
from .problem import HEAD_DIMS, OUT_DTYPE_BYTES, Fp4AttentionFwdProblem
from .triton_specs import (
    DEQUANTIZE_BLOCK_M,
    DEQUANTIZE_BLOCK_N,
    DEQUANTIZE_KERNEL,
    EMULATED_KERNEL,
    NATIVE_KERNEL,
    Fp4AttentionTritonConfig,
    TensorTraits,
    attention_spec,
    dequantize_spec,
)

if TYPE_CHECKING:
    # Compiling needs no torch, and a process that only compiles starts in half the time without.
    from .inputs import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs
    from .triton_launcher import Fp4AttentionTritonLauncher

__all__ = ["FP4_TENSOR_CORES", "Fp4AttentionEmulated", "Fp4AttentionNative"]

FP4_TENSOR_CORES = ((10, 0), (10, 3), (12, 0))
"""Compute capabilities for which ``tl.dot_scaled`` compiles to FP4 products, Triton 3.6 to 3.9."""
MAX_PROGRAMS = 2**31 - 1
_BF16_BYTES = 2


class _Fp4AttentionTriton(KernelTemplate):
    """What both templates share."""

    op = "fp4_attention_fwd"
    backend = "triton"

    @abstractmethod
    def _refusal(self, problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> str | None:
        """Why not, as far as the templates differ."""

    def supports(self, problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        reason = self._refusal(problem, device)
        if reason is not None:
            return reason
        if problem.head_dim not in HEAD_DIMS:
            return f"head_dim={problem.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        programs = problem.batch * problem.num_qo_heads * -(-problem.query_len // 64)
        if programs > MAX_PROGRAMS:
            return f"{programs} tiles of 64 query rows are more than a grid holds"
        return None

    def supports_tensors(
        self,
        problem: Fp4AttentionFwdProblem,
        inputs: Fp4AttentionFwdInputs,
        outputs: Fp4AttentionFwdOutputs | None = None,
    ) -> str | None:
        """None, or why these tensors cannot be served: operands must be contiguous and plain."""
        return unsupported_operands(inputs, outputs)

    def build(
        self, problem: Fp4AttentionFwdProblem, config: Config, inputs: Fp4AttentionFwdInputs
    ) -> Fp4AttentionTritonLauncher:
        """A launcher for inputs of these shapes on their device; scratch memory is its own."""
        from .triton_launcher import Fp4AttentionTritonLauncher

        return Fp4AttentionTritonLauncher(problem, Fp4AttentionTritonConfig.of(config), inputs)

    def source_hash(self) -> str:
        """Hash of the device code, of how it is launched and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        own = (f"triton_kernel_{self.name.removeprefix('triton_')}", "triton_specs")
        modules = [f"{package}.{name}" for name in (*own, "triton_launcher", "mma_kinds")]
        return source_hash((*modules, f"{root}.quantization.triton_kernel", f"{root}.triton_spec"))


class Fp4AttentionNative(_Fp4AttentionTriton):
    """Codes and scales go to FP4 tensor cores as they are."""

    name = "triton_native"

    def _refusal(self, problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> str | None:
        if problem.products != "native":
            return f"products={problem.products!r}: the template triton_emulated serves such"
        if device.compute_capability not in FP4_TENSOR_CORES:
            allowed = ", ".join(f"{major}.{minor}" for major, minor in FP4_TENSOR_CORES)
            return (
                f"compute capability {device.compute_capability_text} is not one of {allowed}, "
                "which have FP4 tensor cores that Triton compiles for: products='emulated' "
                "computes the same codes"
            )
        return None

    def kernel_specs(
        self, problem: Fp4AttentionFwdProblem, config: Config
    ) -> tuple[KernelSpec, ...]:
        """The one kernel; its machine code must show the products of the mode, as its PTX must."""
        typed = Fp4AttentionTritonConfig.of(config)
        return (code_checked(attention_spec(problem, typed, TensorTraits())),)

    def estimate(
        self, problem: Fp4AttentionFwdProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the one launch."""
        return (
            _attention_estimate(
                NATIVE_KERNEL, problem, Fp4AttentionTritonConfig.of(config), device
            ),
        )


class Fp4AttentionEmulated(_Fp4AttentionTriton):
    """Codes and scales are dequantised exactly, in the kernel or ahead of it."""

    name = "triton_emulated"

    def _refusal(self, problem: Fp4AttentionFwdProblem, device: DeviceSpec) -> str | None:
        if problem.products != "emulated":
            return f"products={problem.products!r}: the template triton_native serves such"
        if device.compute_capability < (9, 0):
            return f"compute capability {device.compute_capability_text} is below 9.0"
        return None

    def kernel_specs(
        self, problem: Fp4AttentionFwdProblem, config: Config
    ) -> tuple[TritonKernelSpec, ...]:
        """The dequantising kernel of each format, where the config has them, and the attention."""
        typed = Fp4AttentionTritonConfig.of(config)
        formats = dict.fromkeys(tensor for tensor, _ in _ahead(problem, typed))
        attention = attention_spec(problem, typed, TensorTraits())
        return (*(dequantize_spec(name) for name in formats), attention)

    def estimate(
        self, problem: Fp4AttentionFwdProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the dequantising launches and of the attention."""
        typed = Fp4AttentionTritonConfig.of(config)
        ahead = (
            LaunchEstimate(
                kernel=DEQUANTIZE_KERNEL,
                num_programs=max(1, elements // (DEQUANTIZE_BLOCK_M * DEQUANTIZE_BLOCK_N)),
                bytes_moved=elements * (_BF16_BYTES + 1) - elements // 2,
                flops=elements,
                bytes_in_flight=DEQUANTIZE_BLOCK_M * DEQUANTIZE_BLOCK_N // 2,
                serial_loads=1,
            )
            for _, elements in _ahead(problem, typed)
        )
        return (*ahead, _attention_estimate(EMULATED_KERNEL, problem, typed, device))


def _ahead(
    problem: Fp4AttentionFwdProblem, config: Fp4AttentionTritonConfig
) -> list[tuple[str, int]]:
    """Format and elements of each tensor that is dequantised to memory."""
    if not config.is_ahead:
        return []
    rows = problem.batch * problem.num_kv_heads * problem.head_dim
    found = [("nvfp4", rows * problem.kv_len)]
    if problem.v_format is not None:
        found.append((problem.v_format.name, rows * problem.padded_keys))
    return found


def _attention_estimate(
    kernel: str,
    problem: Fp4AttentionFwdProblem,
    config: Fp4AttentionTritonConfig,
    device: DeviceSpec,
) -> LaunchEstimate:
    """The attention launch: K and V come from L2 where the heads in flight fit into it."""
    row_tiles = config.row_tiles(problem)
    key_bytes = _BF16_BYTES if config.is_ahead else 0.5
    kv_bytes = int(2 * problem.head_dim * problem.kv_len * key_bytes)
    heads_in_flight = max(1, device.num_sms // row_tiles)
    reads = 1 if heads_in_flight * kv_bytes <= device.l2_bytes else row_tiles
    queries = problem.batch * problem.num_qo_heads * problem.query_len * problem.head_dim
    out_bytes = queries * OUT_DTYPE_BYTES[problem.out_dtype]
    tiles = -(-problem.kv_len // config.block_n)
    padded = config.block_m * row_tiles * tiles * config.block_n
    share = problem.num_pairs / (problem.query_len * problem.kv_len)
    flops = 4 * problem.batch * problem.num_qo_heads * problem.head_dim * padded * share
    longest = (2.0 if row_tiles > 1 else 1.0) if problem.is_causal else 1.0
    return LaunchEstimate(
        kernel=kernel,
        num_programs=config.num_programs(problem),
        bytes_moved=out_bytes + problem.batch * problem.num_kv_heads * kv_bytes * reads,
        flops=int(flops),
        bytes_in_flight=int(
            max(1, config.num_stages - 1) * 2 * config.block_n * problem.head_dim * key_bytes
        ),
        serial_loads=2,
        longest_share=longest,
    )
