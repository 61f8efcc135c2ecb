"""Configs of the MLA template of paged decode, and the kernels that they compile to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..base import Config
from ..triton_spec import TritonKernelSpec, eviction_policy
from .problem import PagedDecodeProblem
from .triton_specs import PagedDecodeTritonConfig

__all__ = ["KERNEL", "MERGE_KERNEL", "MlaConfig", "MlaTraits", "kernel_specs"]

KERNEL, MERGE_KERNEL = "triton_mla_kernel", "triton_kernel_merge"
"""Modules of the device code."""
_TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}
_MERGE_WARPS = 4


@dataclass(frozen=True)
class MlaConfig(PagedDecodeTritonConfig):
    """One config, typed; ``block_m`` counts rows of q: query tokens times query heads."""

    page_tiles: bool = False
    """Whether a tile lies within one page, so that one page id serves it; no window."""

    loop_body: str = "flat"
    """``flat``: loads follow the tile that is computed; ``branch``: they go ahead of it;
    ``two_branches``: and warp groups share the scores of a tile instead of computing all twice."""

    @classmethod
    def of(cls, config: Config) -> MlaConfig:
        """The typed form of a config of this template."""
        return cls(**config.as_dict())  # type: ignore[arg-type]

    def merge_rows(self, head_dim_v: int) -> int:
        """Rows that the last block merges at once: 32 fp32 values a thread."""
        return max(1, min(self.block_m, 32 * 32 * self.num_warps // head_dim_v))


@dataclass(frozen=True)
class MlaTraits:
    """What a kernel is specialised on besides the problem: a property of the tensors at hand."""

    kv_stride_token: int
    """Elements from a row of the cache to the next."""
    is_aligned: bool = True
    """Pointers are multiples of 16 bytes and strides of 16 elements."""
    stores_lse: bool = False
    has_dense_table: bool = False
    has_device_scales: bool = False
    """The scales of K and V are read on the device."""


def kernel_specs(
    problem: PagedDecodeProblem, config: MlaConfig, traits: MlaTraits, *, batch: int
) -> tuple[TritonKernelSpec, ...]:
    """The kernels of a config, specialised for tensors of these traits and for ``batch``."""
    attention = _attention_spec(problem, config, traits, batch)
    if not config.has_merge_kernel:
        return (attention,)
    return attention, _merge_spec(problem, config, traits, batch)


def _attention_spec(
    problem: PagedDecodeProblem, config: MlaConfig, traits: MlaTraits, batch: int
) -> TritonKernelSpec:
    dtype = _TRITON_TYPES[problem.dtype]
    strides = ("q_stride_t", "q_stride_h", "kv_stride_page", "out_stride_t", "out_stride_h")
    constants = _shared_constants(problem, config, batch)
    names = ("BLOCK_N", "BLOCK_M", "BLOCK_B", "BLOCK_S")
    return TritonKernelSpec(
        module=f"{__package__}.{KERNEL}",
        name="paged_decode_mla_kernel",
        signature={
            "q": f"*{dtype}",
            "kv": f"*{_TRITON_TYPES[problem.kv_dtype]}",
            **dict.fromkeys(("indptr", "indices", "lengths"), "*i32"),
            "out": f"*{dtype}",
            **dict.fromkeys(("lse", "partial_out", "partial_lse"), "*fp32"),
            "arrivals": "*i32",
            **dict.fromkeys(("sinks", "k_scale", "v_scale"), "*fp32"),
            **dict.fromkeys(("logit_scale", "out_scale", "lse_factor", "cap_log2"), "fp32"),
            **dict.fromkeys(strides, "i64"),
            **dict.fromkeys(("table_stride", "window_left"), "i32"),
            **dict.fromkeys(("batch", "num_splits", "split_tokens"), "i32"),
        },
        constexprs={
            "NUM_QO_HEADS": problem.num_qo_heads,
            "QUERY_LEN": problem.query_len,
            "HEAD_DIM_V": problem.head_dim_v,
            "ROPE_DIM": problem.head_dim - problem.head_dim_v,
            "PAGE_SIZE": problem.page_size,
            "KV_STRIDE_TOKEN": traits.kv_stride_token,
            **{name: constants[name] for name in names},
            "MERGE_ROWS": config.merge_rows(problem.head_dim_v),
            "SPLIT_RULE": constants["SPLIT_RULE"],
            "MERGE": config.merge,
            "PAGE_TILES": config.page_tiles,
            "PREFETCH_PAGES": config.prefetch_pages,
            "SWAP_AB": config.swap_ab,
            "KV_EVICTION": eviction_policy(config.kv_eviction),
            "LOOP_BODY": config.loop_body,
            "NUM_STAGES": config.num_stages,
            "DENSE_TABLE": traits.has_dense_table,
            "SCALES_ON_DEVICE": traits.has_device_scales,
            "IS_CAUSAL": problem.is_causal,
            "HAS_WINDOW": problem.window_left >= 0,
            "HAS_SOFT_CAP": problem.has_soft_cap,
            "HAS_SINKS": problem.has_sinks,
            "STORE_LSE": traits.stores_lse,
            "PDL": config.launch_pdl,
        },
        aligned=_aligned(traits, ("q", "kv", "out", *strides)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=config.launch_pdl,
    )


def _merge_spec(
    problem: PagedDecodeProblem, config: MlaConfig, traits: MlaTraits, batch: int
) -> TritonKernelSpec:
    strides = ("out_stride_t", "out_stride_h")
    return TritonKernelSpec(
        module=f"{__package__}.{MERGE_KERNEL}",
        name="merge_kernel",
        signature={
            **dict.fromkeys(("indptr", "lengths"), "*i32"),
            "out": f"*{_TRITON_TYPES[problem.dtype]}",
            **dict.fromkeys(("lse", "partial_out", "partial_lse"), "*fp32"),
            "lse_factor": "fp32",
            **dict.fromkeys(strides, "i64"),
            **dict.fromkeys(("window_left", "batch", "num_splits", "split_tokens"), "i32"),
        },
        constexprs={
            "NUM_QO_HEADS": problem.num_qo_heads,
            "GROUP_SIZE": problem.num_qo_heads,
            "QUERY_LEN": problem.query_len,
            "HEAD_DIM_V": problem.head_dim_v,
            "PADDED_DIM_V": problem.head_dim_v,
            **_shared_constants(problem, config, batch),
            "DENSE_TABLE": traits.has_dense_table,
            "HAS_WINDOW": problem.window_left >= 0,
            "STORE_LSE": traits.stores_lse,
            "WAIT": config.launch_pdl,
        },
        aligned=_aligned(traits, ("out", *strides)),
        num_warps=_MERGE_WARPS,
        num_stages=1,
        launch_pdl=config.launch_pdl,
    )


def _shared_constants(problem: PagedDecodeProblem, config: MlaConfig, batch: int) -> dict[str, Any]:
    scans_requests = config.split_rule in ("size", "stream")
    return {
        "PAGE_SIZE": problem.page_size,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        # Elsewhere one binary serves every batch.
        "BLOCK_B": 1 << max(0, batch - 1).bit_length() if scans_requests else 1,
        "BLOCK_S": config.merge_block,
        "SPLIT_RULE": config.split_rule if scans_requests else "count",
    }


def _aligned(traits: MlaTraits, names: tuple[str, ...]) -> frozenset[str]:
    """Scratch is aligned always."""
    return frozenset((*names, "partial_out") if traits.is_aligned else ("partial_out",))
