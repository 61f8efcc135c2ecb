"""The kernels of a config, specialised: what the compiler gets for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..fp4_attention.mma_kinds import CheckedTritonKernelSpec
from ..triton_spec import TritonKernelSpec
from .triton_config import DK, DKDV, DQ, DV, PREPARE, Fp4AttentionBwdTritonConfig

__all__ = [
    "AMAX_KERNEL",
    "DEVICE_MODULES",
    "GRADIENT_KERNELS",
    "OPERAND_KERNEL",
    "PART_KERNELS",
    "ROWS_KERNEL",
    "TURN_KERNEL",
    "TensorTraits",
    "part_specs",
]

_PREPARING = f"{__package__}.triton_kernel_prepare"
_MULTIPLYING = f"{__package__}.triton_kernel_gradients"
DEVICE_MODULES = (_PREPARING, _MULTIPLYING)

AMAX_KERNEL = "fp4_attention_bwd_amax_kernel"
ROWS_KERNEL = "fp4_attention_bwd_rows_kernel"
OPERAND_KERNEL = "fp4_attention_bwd_operand_kernel"
TURN_KERNEL = "fp4_attention_bwd_turn_kernel"
GRADIENT_KERNELS = {part: f"fp4_attention_bwd_{part}_kernel" for part in (DKDV, DK, DV, DQ)}
PART_KERNELS = {
    PREPARE: (AMAX_KERNEL, ROWS_KERNEL, OPERAND_KERNEL, TURN_KERNEL),
    **{part: (kernel,) for part, kernel in GRADIENT_KERNELS.items()},
}
"""Kernels of each part, in the order of their first launch."""

_TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_BLOCK_P = 128
"""Largest magnitudes that are read at once."""
_SIZES = ("query_len", "kv_len", "padded_rows", "padded_keys")


@dataclass(frozen=True)
class TensorTraits:
    """What of a call's tensors the kernels are specialised on, besides problem and config."""

    aligned: frozenset[str] = frozenset(("out", "grad_out", "dq", "dk", "dv"))
    """Those of these five that start at 16 bytes, with strides that are multiples of 16."""


def part_specs(
    config: Fp4AttentionBwdTritonConfig, part: str, traits: TensorTraits
) -> tuple[TritonKernelSpec, ...]:
    """The kernels of a part."""
    if part == PREPARE:
        return tuple(_prepare_spec(config, kernel, traits) for kernel in PART_KERNELS[PREPARE])
    return (_gradient_spec(config, part, traits),)


_PREPARE_ARGUMENTS = {
    AMAX_KERNEL: (
        *("grad_out", "partial_amax", "grad_out_stride_b", "grad_out_stride_h"),
        *("grad_out_stride_s", "query_len", "num_heads"),
    ),
    ROWS_KERNEL: (
        *("out", "grad_out", "lse", "v_scale", "partial_amax", "do", "do_t", "do_power", "shift"),
        *("dot_rows", "out_stride_b", "out_stride_h", "out_stride_s", "grad_out_stride_b"),
        *("grad_out_stride_h", "grad_out_stride_s", "query_len", "padded_rows", "num_heads"),
    ),
    OPERAND_KERNEL: ("codes", "scales", "values", "values_t", "num_rows", "padded_rows"),
    TURN_KERNEL: ("v_t", "v", "padded_keys"),
}
_Q, _K = ("q", "q_scales"), ("k", "k_scales")
_GRADIENT_ARGUMENTS = {
    DKDV: (
        *(*_Q, "q_t", "q_tensor_scale", *_K, "k_tensor_scale", "v", "v_scale", "do", "do_t"),
        *("do_power", "shift", "dot_rows", "dk", "dv", "logit_scale", "sm_scale"),
        *("dk_stride_b", "dk_stride_h", "dk_stride_s", "dv_stride_b", "dv_stride_h"),
        *("dv_stride_s", *_SIZES, "num_kv_heads"),
    ),
    DK: (
        *(*_Q, "q_t", "q_tensor_scale", *_K, "k_tensor_scale", "v", "v_scale", "do"),
        *("do_power", "shift", "dot_rows", "dk", "logit_scale", "sm_scale"),
        *("dk_stride_b", "dk_stride_h", "dk_stride_s", *_SIZES, "num_kv_heads"),
    ),
    DV: (
        *(*_Q, "q_tensor_scale", *_K, "k_tensor_scale", "do_t", "do_power", "shift", "dv"),
        *("logit_scale", "dv_stride_b", "dv_stride_h", "dv_stride_s", *_SIZES, "num_kv_heads"),
    ),
    DQ: (
        *(*_Q, "q_tensor_scale", *_K, "k_t", "k_tensor_scale", "v", "v_scale", "do", "do_power"),
        *("shift", "dot_rows", "dq", "logit_scale", "sm_scale", "dq_stride_b", "dq_stride_h"),
        *("dq_stride_s", *_SIZES, "num_heads"),
    ),
}
_SCRATCH = ("q", "k", "q_scales", "k_scales", "q_t", "k_t", "v", "v_t", "do", "do_t", "codes")
_OWN = (*_SCRATCH, "scales", "values", "values_t", "partial_amax", "shift", "dot_rows")


def _types(config: Fp4AttentionBwdTritonConfig) -> dict[str, str]:
    """Triton type of every argument of any kernel."""
    element = f"*{_TRITON_TYPES[config.problem.dtype]}"
    strides = [
        f"{n}_stride_{axis}" for n in ("out", "grad_out", "dq", "dk", "dv") for axis in "bhs"
    ]
    # Scales go to dot_scaled by their type, to the dequantiser as bytes.
    operand, scale = ("*u8", "*fp8e4nv") if config.is_native else ("*bf16", "*u8")
    return {
        **dict.fromkeys(("out", "grad_out", "dq", "dk", "dv"), element),
        **dict.fromkeys(("q", "k"), operand),
        **dict.fromkeys(("q_scales", "k_scales"), scale),
        **dict.fromkeys(("q_t", "k_t", "v", "v_t", "values_t"), "*fp8e4nv"),
        **dict.fromkeys(("do", "do_t"), "*fp8e5"),
        **dict.fromkeys(("codes", "scales"), "*u8"),
        "values": "*bf16",
        "partial_amax": "*i32",
        **dict.fromkeys(("lse", "v_scale", "do_power", "shift", "dot_rows"), "*fp32"),
        **dict.fromkeys(("q_tensor_scale", "k_tensor_scale"), "*fp32"),
        **dict.fromkeys(("logit_scale", "sm_scale"), "fp32"),
        **dict.fromkeys(strides, "i64"),
        **dict.fromkeys((*_SIZES, "num_rows", "num_heads", "num_kv_heads"), "i32"),
    }


def _aligned(names: tuple[str, ...], traits: TensorTraits) -> frozenset[str]:
    found = {*_OWN, "padded_rows", "padded_keys"}
    for name in traits.aligned:
        found |= {name, *(f"{name}_stride_{axis}" for axis in "bhs")}
    return frozenset(found & set(names))


def _prepare_spec(
    config: Fp4AttentionBwdTritonConfig, kernel: str, traits: TensorTraits
) -> TritonKernelSpec:
    constants: dict[str, Any] = {
        "HEAD_DIM": config.problem.head_dim,
        "BLOCK_M": config.number("prepare_block_m"),
    }
    if kernel == ROWS_KERNEL:
        group = {"GROUP_SIZE": config.problem.group_size}
        constants = {**group, **constants, "BLOCK_P": _BLOCK_P}
    if kernel == OPERAND_KERNEL:
        constants = {"STORE_VALUES": not config.is_native, **constants}
    names, types = _PREPARE_ARGUMENTS[kernel], _types(config)
    return TritonKernelSpec(
        module=_PREPARING,
        name=kernel,
        signature={name: types[name] for name in names},
        constexprs=constants,
        aligned=_aligned(names, traits),
        num_warps=config.number("prepare_num_warps"),
        num_stages=1,
    )


def _gradient_spec(
    config: Fp4AttentionBwdTritonConfig, part: str, traits: TensorTraits
) -> TritonKernelSpec:
    names, types = _GRADIENT_ARGUMENTS[part], _types(config)
    return CheckedTritonKernelSpec(
        module=_MULTIPLYING,
        name=GRADIENT_KERNELS[part],
        signature={name: types[name] for name in names},
        constexprs={
            "GROUP_SIZE": config.problem.group_size,
            "IS_CAUSAL": config.problem.is_causal,
            "NATIVE": config.is_native,
            "HEAD_DIM": config.problem.head_dim,
            "BLOCK_M": config.number(f"{part}_block_m"),
            "BLOCK_N": config.number(f"{part}_block_n"),
        },
        aligned=_aligned(names, traits),
        num_warps=config.number(f"{part}_num_warps"),
        num_stages=config.number(f"{part}_num_stages"),
        mma_kinds=frozenset({"nvfp4" if config.is_native else "16-bit", "fp8"}),
    )
