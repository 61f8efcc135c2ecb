"""Configs of the Triton template of paged decode and the kernels that they compile."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Config
from ..triton_spec import TritonKernelSpec, eviction_policy
from .problem import PagedDecodeProblem

__all__ = ["KERNEL", "MERGE_KERNEL", "PagedDecodeTritonConfig", "TensorTraits", "kernel_specs"]

KERNEL, MERGE_KERNEL = "triton_kernel", "triton_kernel_merge"
_TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}
_MERGE_WARPS = 4


@dataclass(frozen=True)
class PagedDecodeTritonConfig:
    """One config, typed."""

    block_n: int
    """Tokens of one tile."""
    block_m: int
    """Rows of one tile: query tokens times query heads of one KV head."""
    split_rule: str
    """``none``; ``count``: ``num_splits`` runs a request; ``size``: runs of ``split_tokens``;
    ``stream``: a persistent grid whose programs own equal shares of all tiles."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline over tiles."""
    prefetch_pages: bool
    """Whether page ids are loaded one tile ahead."""
    swap_ab: bool
    """Whether tokens, not heads, are the rows of the matrix tiles."""
    kv_eviction: str
    """L2 policy of K and V loads: ``evict_first`` (each byte is read once), ``evict_normal``."""
    launch_pdl: bool = False
    """Whether launches are programmatic: blocks are in place before the launch before has ended."""
    num_splits: int = 1
    split_tokens: int = 0
    ctas_per_sm: int = 0
    """Programs of the persistent grid for every multiprocessor."""
    merge: str = "kernel"
    """``kernel``: a second launch; ``last_block``: the last block of a pair merges."""

    @classmethod
    def of(cls, config: Config) -> PagedDecodeTritonConfig:
        """The typed form of a config of this template."""
        return cls(**config.as_dict())  # type: ignore[arg-type]

    def row_tiles(self, problem: PagedDecodeProblem) -> int:
        """Tiles that the rows of one KV head take."""
        return -(-problem.rows_per_kv_head // self.block_m)

    def num_pairs(self, problem: PagedDecodeProblem) -> int:
        """Row tiles of a request over all KV heads: the fastest part of the grid."""
        return problem.num_kv_heads * self.row_tiles(problem)

    def num_streams(self, num_sms: int, num_pairs: int) -> int:
        """Programs of the persistent grid for each pair of a request."""
        return max(1, self.ctas_per_sm * num_sms // num_pairs)

    @property
    def is_split(self) -> bool:
        """Whether a pair may have more than one piece."""
        return self.split_rule != "none"

    @property
    def has_merge_kernel(self) -> bool:
        """Whether a second launch merges."""
        return self.is_split and self.merge != "last_block"

    @property
    def merge_block(self) -> int:
        """Partial results loaded at once by a merge; at head_dim 256, 32 of them are 32 KiB."""
        return min(32, _next_power_of_two(self.num_splits)) if self.split_rule == "count" else 16


@dataclass(frozen=True)
class TensorTraits:
    """What a kernel is specialised on besides the problem: a property of the tensors at hand."""

    is_aligned: bool = True
    """Pointers are multiples of 16 bytes and strides of 16 elements."""
    stores_lse: bool = False
    has_dense_table: bool = False
    has_equal_strides: bool = True
    """K's strides are V's."""
    has_device_scales: bool = False
    """The scales of K and V are read on the device."""


def kernel_specs(
    problem: PagedDecodeProblem,
    config: PagedDecodeTritonConfig,
    traits: TensorTraits,
    *,
    batch: int,
) -> tuple[TritonKernelSpec, ...]:
    """The kernels of a config, specialised for tensors of these traits and for ``batch``."""
    attention = _attention_spec(problem, config, traits, batch)
    if not config.has_merge_kernel:
        return (attention,)
    return attention, _merge_spec(problem, config, traits, batch)


def _attention_spec(
    problem: PagedDecodeProblem, config: PagedDecodeTritonConfig, traits: TensorTraits, batch: int
) -> TritonKernelSpec:
    dtype, kv_dtype = _TRITON_TYPES[problem.dtype], _TRITON_TYPES[problem.kv_dtype]
    strides = (
        *("q_stride_t", "q_stride_h"),
        *("k_stride_page", "k_stride_token", "k_stride_head"),
        *("v_stride_page", "v_stride_token", "v_stride_head"),
        *("out_stride_t", "out_stride_h"),
    )
    shared = _shared_constants(problem, config, traits, batch)
    names = ("PAGE_SIZE", "BLOCK_N", "BLOCK_M", "BLOCK_B", "BLOCK_S", "SPLIT_RULE")
    return TritonKernelSpec(
        module=f"{__package__}.{KERNEL}",
        name="paged_decode_kernel",
        signature={
            "q": f"*{dtype}",
            **dict.fromkeys(("k", "v"), f"*{kv_dtype}"),
            **dict.fromkeys(("indptr", "indices", "lengths"), "*i32"),
            "out": f"*{dtype}",
            **dict.fromkeys(("lse", "partial_out", "partial_lse"), "*fp32"),
            "arrivals": "*i32",
            **dict.fromkeys(("sinks", "alibi_slopes", "k_scale", "v_scale"), "*fp32"),
            **dict.fromkeys(("logit_scale", "out_scale", "lse_factor"), "fp32"),
            **dict.fromkeys(("cap_log2", "rope_theta", "rope_scale"), "fp32"),
            **dict.fromkeys(strides, "i64"),
            **dict.fromkeys(("table_stride", "window_left"), "i32"),
            **dict.fromkeys(("batch", "num_splits", "split_tokens"), "i32"),
        },
        constexprs={
            "NUM_QO_HEADS": problem.num_qo_heads,
            "GROUP_SIZE": problem.group_size,
            "QUERY_LEN": problem.query_len,
            "HEAD_DIM": problem.head_dim,
            "PADDED_DIM": _next_power_of_two(problem.head_dim),
            **{name: shared[name] for name in names},
            "MERGE": config.merge,
            "PREFETCH_PAGES": config.prefetch_pages,
            "SWAP_AB": config.swap_ab,
            "KV_EVICTION": eviction_policy(config.kv_eviction),
            "DENSE_TABLE": traits.has_dense_table,
            "SAME_STRIDES": traits.has_equal_strides,
            "SCALES_ON_DEVICE": traits.has_device_scales,
            "IS_CAUSAL": problem.is_causal,
            "HAS_WINDOW": problem.window_left >= 0,
            "HAS_SOFT_CAP": problem.has_soft_cap,
            "HAS_SINKS": problem.has_sinks,
            "HAS_ALIBI": problem.has_alibi,
            "HAS_ROPE": problem.has_rope,
            "STORE_LSE": traits.stores_lse,
            "PDL": config.launch_pdl,
        },
        aligned=_aligned(traits, ("q", "k", "v", "out", *strides)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=config.launch_pdl,
    )


def _merge_spec(
    problem: PagedDecodeProblem, config: PagedDecodeTritonConfig, traits: TensorTraits, batch: int
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
            "GROUP_SIZE": problem.group_size,
            "QUERY_LEN": problem.query_len,
            "HEAD_DIM_V": problem.head_dim,
            "PADDED_DIM_V": _next_power_of_two(problem.head_dim),
            **_shared_constants(problem, config, traits, batch),
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


def _shared_constants(
    problem: PagedDecodeProblem, config: PagedDecodeTritonConfig, traits: TensorTraits, batch: int
) -> dict[str, int | str]:
    del traits
    scans_requests = config.split_rule in ("size", "stream")
    return {
        "PAGE_SIZE": problem.page_size,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        # Elsewhere one binary serves every batch.
        "BLOCK_B": _next_power_of_two(batch) if scans_requests else 1,
        "BLOCK_S": config.merge_block,
        "SPLIT_RULE": config.split_rule if scans_requests else "count",
    }


def _aligned(traits: TensorTraits, names: tuple[str, ...]) -> frozenset[str]:
    """Scratch is aligned always."""
    return frozenset((*names, "partial_out") if traits.is_aligned else ("partial_out",))


def _next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
