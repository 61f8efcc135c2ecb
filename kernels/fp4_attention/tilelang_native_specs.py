"""Configs of the TileLang template for FP4 tensor cores and the kernel that they compile."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Config
from ..tilelang_spec import TileLangKernelSpec
from .problem import Fp4AttentionFwdProblem

__all__ = ["NATIVE_TILELANG_KERNEL", "Fp4AttentionTileLangNativeConfig", "native_attention_spec"]

_MODULE = f"{__package__}.tilelang_native_kernel"
_PROGRAM = "fp4_attention_tilelang_native"
NATIVE_TILELANG_KERNEL = f"{_PROGRAM}_kernel"


@dataclass(frozen=True)
class Fp4AttentionTileLangNativeConfig:
    """One config of the template, typed."""

    block_m: int
    """Query rows of one block, shared out evenly between its warps."""
    block_n: int
    """Keys of one tile."""
    threads: int
    """Threads of one block."""
    num_stages: int
    """Tiles of the ring in shared memory."""

    @classmethod
    def of(cls, config: Config) -> Fp4AttentionTileLangNativeConfig:
        """The typed form of a config."""
        return cls(**config.as_dict())  # type: ignore[arg-type]

    def row_tiles(self, problem: Fp4AttentionFwdProblem) -> int:
        """Blocks of one head."""
        return -(-problem.query_len // self.block_m)

    def num_programs(self, problem: Fp4AttentionFwdProblem) -> int:
        """Blocks of the launch."""
        return problem.batch * problem.num_qo_heads * self.row_tiles(problem)


def native_attention_spec(
    problem: Fp4AttentionFwdProblem, config: Fp4AttentionTileLangNativeConfig, *, stores_lse: bool
) -> TileLangKernelSpec:
    """The kernel; batch, heads and lengths are run-time arguments."""
    return TileLangKernelSpec(
        module=_MODULE,
        factory="native_attention_program",
        program=_PROGRAM,
        parameters={
            "is_causal": problem.is_causal,
            "has_means": problem.q_mean != "none",
            "head_dim": problem.head_dim,
            "group_size": problem.group_size,
            "out_dtype": problem.out_dtype,
            "stores_lse": stores_lse,
            "block_m": config.block_m,
            "block_n": config.block_n,
            "threads": config.threads,
            "num_stages": config.num_stages,
        },
        # The kernel has waits of its own.
        pass_configs={"tl.disable_warp_specialized": True},
    )
