"""Configs of the TileLang template of FP4 attention and the kernels that they compile."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Config, KernelSpec
from ..tilelang_spec import TileLangKernelSpec
from ..triton_spec import TritonKernelSpec
from .problem import P_MAPS, Fp4AttentionFwdProblem
from .triton_specs import dequantize_spec

__all__ = [
    "ATTENTION_KERNEL",
    "DEQUANTIZE_KEYS_BLOCK_M",
    "DEQUANTIZE_KEYS_KERNEL",
    "Fp4AttentionTileLangConfig",
    "all_specs",
    "attention_spec",
    "dequantize_keys_spec",
]

_MODULE = f"{__package__}.tilelang_kernel"
_PROGRAM = "fp4_attention_tilelang"
ATTENTION_KERNEL = f"{_PROGRAM}_kernel"
DEQUANTIZE_KEYS_KERNEL = "dequantize_keys_kernel"
DEQUANTIZE_KEYS_BLOCK_M = 32


@dataclass(frozen=True)
class Fp4AttentionTileLangConfig:
    """One config of the template, typed."""

    block_m: int
    """Query rows of one block; a warp group computes 64 of them."""
    block_n: int
    """Keys of one tile."""
    num_stages: int
    """Tiles of the ring in shared memory."""
    load: str
    """How tiles reach shared memory: one of ``LOADS`` of the device code."""

    @classmethod
    def of(cls, config: Config) -> Fp4AttentionTileLangConfig:
        """The typed form of a config."""
        return cls(**config.as_dict())  # type: ignore[arg-type]

    def row_tiles(self, problem: Fp4AttentionFwdProblem) -> int:
        """Blocks of one head."""
        return -(-problem.query_len // self.block_m)

    def num_programs(self, problem: Fp4AttentionFwdProblem) -> int:
        """Blocks of the attention launch."""
        return problem.batch * problem.num_qo_heads * self.row_tiles(problem)


def all_specs(
    problem: Fp4AttentionFwdProblem, config: Fp4AttentionTileLangConfig, *, stores_lse: bool
) -> tuple[KernelSpec, ...]:
    """The kernels in launch order: those that dequantise Q, K and V, and the attention."""
    v_format = problem.v_format
    formats = ["nvfp4"] if v_format is None else ["nvfp4", v_format.name]
    return (
        *(dequantize_spec(name) for name in dict.fromkeys(formats)),
        dequantize_keys_spec(problem),
        attention_spec(problem, config, stores_lse=stores_lse),
    )


def attention_spec(
    problem: Fp4AttentionFwdProblem, config: Fp4AttentionTileLangConfig, *, stores_lse: bool
) -> TileLangKernelSpec:
    """The attention kernel; batch, heads and lengths are run-time arguments."""
    slope, intercept = P_MAPS[problem.p_map] or (0.0, 0.0)
    return TileLangKernelSpec(
        module=_MODULE,
        factory="attention_program",
        program=_PROGRAM,
        parameters={
            "mode": problem.mode,
            "p_scale": problem.p_scale,
            "slope": slope,
            "intercept": intercept,
            "is_causal": problem.is_causal,
            "has_means": problem.q_mean != "none",
            "head_dim": problem.head_dim,
            "group_size": problem.group_size,
            "out_dtype": problem.out_dtype,
            "stores_lse": stores_lse,
            "block_m": config.block_m,
            "block_n": config.block_n,
            "num_stages": config.num_stages,
            "load": config.load,
        },
        pass_configs={"tl.disable_warp_specialized": config.load != "tma_ws"},
    )


def dequantize_keys_spec(problem: Fp4AttentionFwdProblem) -> TritonKernelSpec:
    """The kernel that writes K as bf16, head by head."""
    return TritonKernelSpec(
        module=f"{__package__}.triton_kernel_keys",
        name=DEQUANTIZE_KEYS_KERNEL,
        signature={
            **dict.fromkeys(("codes", "scales"), "*u8"),
            "out": "*bf16",
            **dict.fromkeys(("kv_len", "padded_keys"), "i32"),
        },
        constexprs={
            "PERMUTED": problem.mode == "fp8_p",
            "HEAD_DIM": problem.head_dim,
            "BLOCK_M": DEQUANTIZE_KEYS_BLOCK_M,
        },
        aligned=frozenset(("codes", "scales", "out", "padded_keys")),
        num_warps=4,
        num_stages=1,
    )
