"""The Triton template of paged decode for latent caches (MLA): config, support, kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..base import Config, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..triton_spec import TritonKernelSpec, eviction_policy
from .problem import PagedDecodeProblem
from .triton_template import PagedDecodeTritonConfig

if TYPE_CHECKING:
    # Compiling needs no torch, and a process that only compiles starts in half the time without.
    from .inputs import PagedDecodeInputs
    from .triton_mla_launcher import MlaLauncher

__all__ = ["MlaConfig", "MlaTraits", "PagedDecodeMla", "kernel_specs"]

_TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}
_KERNEL, _MERGE = "triton_mla_kernel", "triton_kernel_merge"
_MERGE_WARPS = 4
LATENT_DIMS = (64, 128, 256, 512)
ROPE_DIMS = (16, 32, 64, 128)
MAX_QUERY_LEN = 4096
MAX_BATCH = 65535
"""The second axis of a CUDA grid."""


@dataclass(frozen=True)
class MlaConfig(PagedDecodeTritonConfig):
    """One config, typed; ``block_m`` counts rows of q: query tokens times query heads."""

    page_tiles: bool = False
    """Whether a tile lies within one page, so that one page id serves it; no window."""

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


class PagedDecodeMla(KernelTemplate):
    """Split-KV decode for latent caches: each row of the cache is read once, as K and as V."""

    op = "paged_decode"
    name = "triton_mla"
    backend = "triton"

    def supports(self, problem: PagedDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if not problem.is_latent:
            return (
                f"head_dim_v={problem.head_dim_v} equals head_dim: K and V are stored apart; this "
                "template reads rows of which V is the first part"
            )
        if problem.has_alibi:
            return "has_alibi=True: latent rows hold rotated positions, no slopes are added"
        if device.compute_capability < (9, 0):
            return f"compute capability {device.compute_capability_text} is below 9.0"
        return _size_refusal(problem)

    def kernel_specs(
        self, problem: PagedDecodeProblem, config: Config
    ) -> tuple[TritonKernelSpec, ...]:
        """The attention kernel and, where a second launch merges, the merge kernel."""
        traits = MlaTraits(kv_stride_token=problem.head_dim)
        return kernel_specs(problem, MlaConfig.of(config), traits, batch=problem.batch)

    def build(
        self, problem: PagedDecodeProblem, config: Config, inputs: PagedDecodeInputs
    ) -> MlaLauncher:
        """A launcher for inputs of these shapes, strides and this device.

        The lengths are read on the device: a captured launch serves any lengths as long as the page
        table does not outgrow ``inputs.kv_indices``.

        Raises:
            UsageError: V is not the first part of the rows of K.
        """
        from .triton_mla_launcher import MlaLauncher

        return MlaLauncher(problem, MlaConfig.of(config), inputs)

    def estimate(
        self, problem: PagedDecodeProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the attention launch and of the merge launch.

        As where K and V are stored apart, but for the row that is read once.
        """
        from .triton_estimate import estimates

        attention, *merge = estimates(problem, MlaConfig.of(config), device)
        products = problem.head_dim + problem.head_dim_v
        attention = replace(
            attention,
            kernel="paged_decode_mla_kernel",
            flops=attention.flops * products // (2 * problem.head_dim),
            bytes_in_flight=attention.bytes_in_flight // 2,
        )
        return (attention, *merge)

    def source_hash(self) -> str:
        """Hash of the device code, of how it is launched and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        modules = (
            _KERNEL,
            _MERGE,
            "triton_kernel_partition",
            "triton_mla_template",
            "triton_mla_launcher",
        )
        return source_hash((*(f"{package}.{m}" for m in modules), f"{root}.triton_spec"))


def _size_refusal(problem: PagedDecodeProblem) -> str | None:
    rope_dim = problem.head_dim - problem.head_dim_v
    if problem.head_dim_v not in LATENT_DIMS:
        return f"head_dim_v={problem.head_dim_v} is not one of {_listed(LATENT_DIMS)}"
    if rope_dim not in ROPE_DIMS:
        return f"head_dim - head_dim_v={rope_dim} is not one of {_listed(ROPE_DIMS)}"
    for name, limit in {"query_len": MAX_QUERY_LEN, "batch": MAX_BATCH}.items():
        if getattr(problem, name) > limit:
            return f"{name}={getattr(problem, name)} is above {limit}"
    return None


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


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
        module=f"{__package__}.{_KERNEL}",
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
            "DENSE_TABLE": traits.has_dense_table,
            "SCALES_ON_DEVICE": traits.has_device_scales,
            "IS_CAUSAL": problem.is_causal,
            "HAS_WINDOW": problem.window_left >= 0,
            "HAS_SOFT_CAP": problem.has_soft_cap,
            "HAS_SINKS": problem.has_sinks,
            "STORE_LSE": traits.stores_lse,
        },
        aligned=_aligned(traits, ("q", "kv", "out", *strides)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _merge_spec(
    problem: PagedDecodeProblem, config: MlaConfig, traits: MlaTraits, batch: int
) -> TritonKernelSpec:
    strides = ("out_stride_t", "out_stride_h")
    return TritonKernelSpec(
        module=f"{__package__}.{_MERGE}",
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
            "WAIT": config.merge == "kernel_pdl",
        },
        aligned=_aligned(traits, ("out", *strides)),
        num_warps=_MERGE_WARPS,
        num_stages=1,
        launch_pdl=config.merge == "kernel_pdl",
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
