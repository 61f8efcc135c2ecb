"""The kernels of a config, specialised: what the compiler gets for each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..triton_spec import TritonKernelSpec
from .problem import GdnChunkProblem
from .triton_config import (
    GATE,
    INTRA,
    NORM,
    OUTPUT,
    SCAN,
    STITCH,
    TRANSITION,
    GdnChunkTritonConfig,
    next_power_of_two,
)

__all__ = ["DEVICE_MODULES", "KERNELS", "TRITON_TYPES", "TensorTraits", "part_spec"]

TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_PACKAGE = __package__ or ""
_PREPARE = f"{_PACKAGE}.triton_kernel"
_INTRA = f"{_PACKAGE}.triton_kernel_intra"
_INTRA_BLOCKS = f"{_PACKAGE}.triton_kernel_intra_blocks"
_SCAN = f"{_PACKAGE}.triton_kernel_scan"
_STITCH = f"{_PACKAGE}.triton_kernel_stitch"
_OUTPUT = f"{_PACKAGE}.triton_kernel_output"
DEVICE_MODULES = (_PREPARE, _INTRA, _INTRA_BLOCKS, _SCAN, _STITCH, _OUTPUT)

KERNELS = {part: f"gdn_chunk_{part}_kernel" for part in (GATE, NORM, INTRA, TRANSITION, STITCH)}
KERNELS |= {part: f"gdn_chunk_{part}_kernel" for part in (SCAN, OUTPUT)}
"""The kernel of each part."""

_BLOCK_N = 64
"""Bounds of sequences that are read at once."""
_ZERO_BLOCK = 64
"""Columns of the output that are zeroed at once."""
_MAX_REGISTERS = 255
_INVERSE_BASE = 16
"""Rows of the blocks that substitution inverts; 16 is also the least chunk."""

_TENSORS = ("q", "k", "v", "out", "w", "u", "inverse", "scores", "chunk_state", "errors")
_STATES = ("initial_state", "entry_state", "segment_state", "final_state")
_GATES = ("total_decay", "beta_rows", "a_log", "dt_bias")
_HEADS = ("num_heads", "num_v_heads")
_STRIDES = tuple(f"{name}_stride_{axis}" for name in ("q", "k", "v", "out") for axis in ("t", "h"))


@dataclass(frozen=True)
class TensorTraits:
    """What of the tensors of a call the kernels are compiled for, beside the problem."""

    gate_type: str
    beta_type: str
    seqlen_type: str = "i32"
    is_varlen: bool = True
    has_initial_state: bool = True
    has_final_state: bool = True
    has_beta_sigmoid: bool = False
    beta_scale: float = 1.0
    aligned: frozenset[str] = frozenset(("q", "k", "v", "out"))
    """Which of these four have pointers and strides that are multiples of 16."""

    @classmethod
    def of(cls, problem: GdnChunkProblem) -> TensorTraits:
        """Those of the inputs that are timed."""
        return cls(
            gate_type=TRITON_TYPES[problem.gate_dtype],
            beta_type=TRITON_TYPES[problem.beta_dtype],
            has_initial_state=problem.has_initial_state,
            has_final_state=problem.has_final_state,
            has_beta_sigmoid=problem.gate == "fused",
        )


def part_spec(config: GdnChunkTritonConfig, part: str, traits: TensorTraits) -> TritonKernelSpec:
    """The one kernel of a part."""
    module, arguments, constants = _PARTS[part]
    if part == INTRA and config.has_intra_blocks:
        module = _INTRA_BLOCKS
    problem = config.problem
    types = _argument_types(problem, traits)
    element = TRITON_TYPES[problem.dtype]
    if part == NORM:
        types |= {"x": f"*{element}", "normalised": f"*{element}"}
    values = constants(config, traits)
    return TritonKernelSpec(
        module=module,
        name=KERNELS[part],
        signature={name: types[name] for name in arguments},
        constexprs=values,
        aligned=_aligned(config, part, traits) & set(arguments),
        num_warps=config.number(f"{part}_num_warps"),
        num_stages=int(config.config.get(f"{part}_num_stages", 1) or 1),
        maxnreg=_maxnreg(config, part),
    )


def _maxnreg(config: GdnChunkTritonConfig, part: str) -> int | None:
    """Upper bound of registers; the hardware's own needs no word."""
    bound = int(config.config.get(f"{part}_maxnreg", _MAX_REGISTERS) or _MAX_REGISTERS)
    return bound if bound < _MAX_REGISTERS else None


def _argument_types(problem: GdnChunkProblem, traits: TensorTraits) -> dict[str, str]:
    element = TRITON_TYPES[problem.dtype]
    return {
        **dict.fromkeys(_TENSORS, f"*{element}"),
        **dict.fromkeys((*_STATES, *_GATES), "*fp32"),
        "gate": f"*{traits.gate_type}",
        "beta": f"*{traits.beta_type}",
        "cu_seqlens": f"*{traits.seqlen_type}",
        "table": "*i32",
        "scale": "fp32",
        **dict.fromkeys(("num_tokens", "num_sequences", "tokens_each", "num_rows"), "i32"),
        **dict.fromkeys(_HEADS, "i32"),
        **dict.fromkeys((*_STRIDES, "scratch_tokens", "stride_t", "stride_h"), "i64"),
    }


def _aligned(config: GdnChunkTritonConfig, part: str, traits: TensorTraits) -> frozenset[str]:
    """Scratch memory always is; normalised q and k are scratch behind the part that writes them."""
    given = set(traits.aligned)
    if config.problem.use_qk_l2norm:
        given |= {"q", "k"}
    names = {*_TENSORS[4:], *_STATES, "total_decay", "beta_rows", "table", "scratch_tokens"}
    for name in given:
        names |= {name, f"{name}_stride_t", f"{name}_stride_h"}
    if part == NORM:
        names.add("normalised")
        if {"q", "k"} <= traits.aligned:
            names |= {"x", "stride_t", "stride_h"}
    return frozenset(names)


def _sizes(config: GdnChunkTritonConfig) -> dict[str, Any]:
    problem = config.problem
    return {
        "HEAD_DIM_K": problem.head_dim_k,
        "HEAD_DIM_V": problem.head_dim_v,
        "CHUNK": config.chunk,
    }


def _gate_constants(config: GdnChunkTritonConfig, traits: TensorTraits) -> dict[str, Any]:
    problem = config.problem
    return {
        "HEAD_DIM_V": problem.head_dim_v,
        "CHUNK": config.chunk,
        "BLOCK_H": config.number("gate_block_h"),
        "BLOCK_N": _BLOCK_N,
        "BLOCK_V": _ZERO_BLOCK,
        "GATE": problem.gate,
        "BETA": "sigmoid" if traits.has_beta_sigmoid else "given",
        "BETA_SCALE": traits.beta_scale,
        "IS_VARLEN": traits.is_varlen,
    }


def _norm_constants(config: GdnChunkTritonConfig, traits: TensorTraits) -> dict[str, Any]:
    del traits
    return {
        "HEAD_DIM": config.problem.head_dim_k,
        "BLOCK_D": config.block_k,
        "BLOCK_R": config.number("norm_block_r"),
    }


def _intra_constants(config: GdnChunkTritonConfig, traits: TensorTraits) -> dict[str, Any]:
    del traits
    if config.has_intra_blocks:
        whole: dict[str, Any] = {}
    else:
        whole = {
            "INVERSE_GATE": config.word("inverse_gate"),
            "INVERSE": config.word("inverse"),
            "INVERSE_BASE": _INVERSE_BASE,
            "PRECISION": config.precision,
        }
    return {
        **_sizes(config),
        "BLOCK_K": min(config.number("intra_block_k"), config.block_k),
        "BLOCK_V": min(
            config.number("intra_block_k"), next_power_of_two(config.problem.head_dim_v)
        ),
        "FORM": config.form,
        "HAS_SCORES": config.has_scores,
        "INVERSE_PRECISION": config.word("inverse_precision"),
        **whole,
    }


def _scan_constants(config: GdnChunkTritonConfig, traits: TensorTraits) -> dict[str, Any]:
    return {
        **_sizes(config),
        "SEGMENT": config.segment,
        "BLOCK_K": config.block_k,
        "BLOCK_V": config.number("scan_block_v"),
        "BLOCK_N": _BLOCK_N,
        "FORM": config.form,
        "HAS_SCORES": config.has_scores,
        "RESULT": "output" if config.algorithm == "fused" else "states",
        "ORDER": config.config.get("scan_order", "given"),
        "STATE_LAYOUT": config.problem.state_layout,
        "HAS_INITIAL_STATE": traits.has_initial_state,
        "HAS_FINAL_STATE": traits.has_final_state,
        "IS_VARLEN": traits.is_varlen,
        "PRECISION": config.precision,
        "NUM_STAGES": config.number("scan_num_stages"),
    }


def _transition_constants(config: GdnChunkTritonConfig, traits: TensorTraits) -> dict[str, Any]:
    return {
        **_sizes(config),
        "SEGMENT": config.segment,
        "BLOCK_K": config.block_k,
        "BLOCK_V": config.number("transition_block_v"),
        "BLOCK_N": _BLOCK_N,
        "FORM": config.form,
        "FORGET_BITS": config.number("transition_forget_bits"),
        "STATE_LAYOUT": config.problem.state_layout,
        "HAS_INITIAL_STATE": traits.has_initial_state,
        "IS_VARLEN": traits.is_varlen,
        "PRECISION": config.precision,
        "NUM_STAGES": config.number("transition_num_stages"),
    }


def _stitch_constants(config: GdnChunkTritonConfig, traits: TensorTraits) -> dict[str, Any]:
    return {
        **_sizes(config),
        "SEGMENT": config.segment,
        "BLOCK_K": config.block_k,
        "BLOCK_V": config.number("stitch_block_v"),
        "BLOCK_N": _BLOCK_N,
        "IS_VARLEN": traits.is_varlen,
        "PRECISION": config.word("stitch_precision"),
        "NUM_STAGES": config.number("stitch_num_stages"),
    }


def _output_constants(config: GdnChunkTritonConfig, traits: TensorTraits) -> dict[str, Any]:
    del traits
    return {
        **_sizes(config),
        "BLOCK_K": min(config.number("output_block_k"), config.block_k),
        "BLOCK_V": config.number("output_block_v"),
        "HAS_SCORES": config.has_scores,
        "PRECISION": config.precision,
    }


_QK_STRIDES = ("q_stride_t", "q_stride_h", "k_stride_t", "k_stride_h")
_V_STRIDES = ("v_stride_t", "v_stride_h")
_OUT_STRIDES = ("out_stride_t", "out_stride_h")

_Constants = Callable[[GdnChunkTritonConfig, TensorTraits], Mapping[str, Any]]
_PARTS: dict[str, tuple[str, tuple[str, ...], _Constants]] = {
    GATE: (
        _PREPARE,
        (
            *("gate", "beta", "a_log", "dt_bias", "cu_seqlens", "table", "total_decay"),
            *("beta_rows", "out", "num_tokens", "num_sequences", "tokens_each"),
            *("scratch_tokens", *_OUT_STRIDES, "num_v_heads"),
        ),
        _gate_constants,
    ),
    NORM: (
        _PREPARE,
        ("x", "normalised", "num_rows", "stride_t", "stride_h", "num_heads"),
        _norm_constants,
    ),
    INTRA: (
        _INTRA,
        (
            *("q", "k", "v", "table", "total_decay", "beta_rows", "inverse", "w", "u", "scores"),
            *("scale", *_QK_STRIDES, *_V_STRIDES, "scratch_tokens", *_HEADS),
        ),
        _intra_constants,
    ),
    TRANSITION: (
        _SCAN,
        (
            *("k", "v", "cu_seqlens", "total_decay", "inverse", "w", "u", "initial_state"),
            *("segment_state", "num_sequences", "tokens_each", "k_stride_t", "k_stride_h"),
            *(*_V_STRIDES, "scratch_tokens", *_HEADS),
        ),
        _transition_constants,
    ),
    STITCH: (
        _STITCH,
        ("cu_seqlens", "segment_state", "entry_state", "tokens_each", "num_v_heads"),
        _stitch_constants,
    ),
    SCAN: (
        _SCAN,
        (
            *("q", "k", "v", "cu_seqlens", "total_decay", "inverse", "w", "u", "scores"),
            *("initial_state", "entry_state", "chunk_state", "errors", "out", "final_state"),
            *("scale", "num_sequences", "tokens_each", *_QK_STRIDES, *_V_STRIDES, *_OUT_STRIDES),
            *("scratch_tokens", *_HEADS),
        ),
        _scan_constants,
    ),
    OUTPUT: (
        _OUTPUT,
        (
            *("q", "k", "table", "total_decay", "chunk_state", "errors", "scores", "out"),
            *("scale", *_QK_STRIDES, *_OUT_STRIDES, "scratch_tokens", *_HEADS),
        ),
        _output_constants,
    ),
}
"""Module, run-time arguments in order and compile-time arguments of the kernel of each part."""
