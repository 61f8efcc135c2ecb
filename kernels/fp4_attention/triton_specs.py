"""Configs of the Triton templates of FP4 attention and the kernels that they compile."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Config
from ..triton_spec import TritonKernelSpec
from .mma_kinds import CheckedTritonKernelSpec, declared_kinds
from .problem import P_MAPS, Fp4AttentionFwdProblem

__all__ = [
    "DEQUANTIZE_KERNEL",
    "EMULATED_KERNEL",
    "NATIVE_KERNEL",
    "Fp4AttentionTritonConfig",
    "TensorTraits",
    "attention_spec",
    "dequantize_spec",
]

DEQUANTIZE_KERNEL = "dequantize_kernel"
EMULATED_KERNEL = "fp4_attention_emulated_kernel"
NATIVE_KERNEL = "fp4_attention_native_kernel"
_QUANTIZATION = f"{(__package__ or '').rpartition('.')[0]}.quantization.triton_kernel"
_TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DEQUANTIZE_BLOCK_M, DEQUANTIZE_BLOCK_N, _DEQUANTIZE_WARPS = 32, 128, 4


@dataclass(frozen=True)
class Fp4AttentionTritonConfig:
    """One config of either template, typed."""

    block_m: int
    """Query rows of one program."""
    block_n: int
    """Keys of one tile."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline over tiles of keys."""
    dequantize: str = ""
    """Emulated only. ``ahead``: K and V are dequantised to memory by launches before; ``tile``:
    each program dequantises the tiles that it reads."""
    conversion: str = ""
    """Native only. ``hardware``: P becomes codes by ``cvt.rn.satfinite.e2m1x2``; ``arithmetic``."""

    @classmethod
    def of(cls, config: Config) -> Fp4AttentionTritonConfig:
        """The typed form of a config."""
        return cls(**config.as_dict())  # type: ignore[arg-type]

    @property
    def is_ahead(self) -> bool:
        """Whether K and V are dequantised by launches of their own."""
        return self.dequantize == "ahead"

    def row_tiles(self, problem: Fp4AttentionFwdProblem) -> int:
        """Programs of one head."""
        return -(-problem.query_len // self.block_m)

    def num_programs(self, problem: Fp4AttentionFwdProblem) -> int:
        """Programs of the attention launch."""
        return problem.batch * problem.num_qo_heads * self.row_tiles(problem)


@dataclass(frozen=True)
class TensorTraits:
    """What a kernel is specialised on besides problem and config."""

    stores_lse: bool = True
    is_aligned: bool = True
    """The output starts at 16 bytes and its strides are multiples of 16 elements."""


def attention_spec(
    problem: Fp4AttentionFwdProblem, config: Fp4AttentionTritonConfig, traits: TensorTraits
) -> TritonKernelSpec:
    """The attention kernel."""
    is_native = problem.products == "native"
    # Scales go to dot_scaled by their type, to the emulation as bytes.
    scale = "*fp8e4nv" if is_native else "*u8"
    operand = "*bf16" if config.is_ahead else "*u8"
    v_operand = "*fp8e4nv" if problem.mode == "fp8_p" else operand
    v_scale = "*fp8e4nv" if is_native and problem.mode == "nvfp4" else "*u8"
    line = P_MAPS[problem.p_map] or (0.0, 0.0)
    out_strides = ("out_stride_b", "out_stride_h", "out_stride_s")
    operands = ("q_codes", "q_scales", "k", "k_scales", "v", "v_scales", "delta", "lse")
    return CheckedTritonKernelSpec(
        module=f"{__package__}.triton_kernel_{'native' if is_native else 'emulated'}",
        name=NATIVE_KERNEL if is_native else EMULATED_KERNEL,
        signature={
            "q_codes": "*u8",
            "q_scales": scale,
            "q_tensor_scale": "*fp32",
            "k": operand,
            "k_scales": scale,
            "k_tensor_scale": "*fp32",
            "v": v_operand,
            "v_scales": v_scale,
            **dict.fromkeys(("v_tensor_scale", "delta"), "*fp32"),
            "out": f"*{_TRITON_TYPES[problem.out_dtype]}",
            "lse": "*fp32",
            "logit_scale": "fp32",
            **dict.fromkeys(out_strides, "i64"),
            **dict.fromkeys(("query_len", "kv_len", "padded_keys"), "i32"),
            **dict.fromkeys(("num_heads", "num_deltas"), "i32"),
        },
        constexprs={
            "GROUP_SIZE": problem.group_size,
            "MODE": problem.mode,
            "IS_CAUSAL": problem.is_causal,
            "P_SCALE": problem.p_scale,
            "P_MAP": "exact" if problem.p_map == "exact" else "affine",
            "SLOPE": line[0],
            "SHIFT": line[1],
            "HAS_DELTA": problem.q_mean != "none",
            "STORE_LSE": traits.stores_lse,
            **(
                {"HARDWARE": config.conversion == "hardware"}
                if is_native
                else {"AHEAD": config.is_ahead}
            ),
            "HEAD_DIM": problem.head_dim,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
        },
        aligned=frozenset(
            (*operands, "padded_keys", *(("out", *out_strides) if traits.is_aligned else ()))
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        mma_kinds=declared_kinds(problem),
    )


def dequantize_spec(block_format: str) -> TritonKernelSpec:
    """The kernel that dequantises K, or V, to bf16 in memory."""
    return TritonKernelSpec(
        module=_QUANTIZATION,
        name=DEQUANTIZE_KERNEL,
        signature={
            **dict.fromkeys(("codes", "scales"), "*u8"),
            "out": "*bf16",
            **dict.fromkeys(("num_rows", "num_elements"), "i32"),
        },
        constexprs={
            "FORMAT": block_format,
            "BLOCK_M": DEQUANTIZE_BLOCK_M,
            "BLOCK_N": DEQUANTIZE_BLOCK_N,
        },
        aligned=frozenset(("codes", "scales", "out", "num_elements")),
        num_warps=_DEQUANTIZE_WARPS,
        num_stages=1,
    )
