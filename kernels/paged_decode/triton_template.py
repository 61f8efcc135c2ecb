"""Host side of the Triton template: from a config to compiled kernels, grids and scratch memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..base import Config, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..triton_spec import BoundTritonKernel, TritonKernelSpec, eviction_policy
from .problem import DTYPE_BYTES, PagedDecodeProblem

if TYPE_CHECKING:
    # Compiling needs no torch, and a process that only compiles starts in half the time without.
    import torch

    from .reference import PagedDecodeInputs, PagedDecodeOutputs

__all__ = ["PagedDecodeTriton", "PagedDecodeTritonConfig", "PagedDecodeTritonLauncher"]

_MODULE = f"{__package__}.triton_kernel"
_TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16"}
_LOG2_E = math.log2(math.e)
_MERGE_WARPS = 4
MAX_BATCH = 65535


@dataclass(frozen=True)
class PagedDecodeTritonConfig:
    """One config, typed."""

    block_n: int
    """Tokens of one tile."""
    block_h: int
    """Query heads of one KV head that share a tile."""
    split_rule: str
    """``none``; ``count``: ``num_splits`` runs a request; ``size``: runs of ``split_tokens``."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline over tiles."""
    prefetch_pages: bool
    """Whether page ids are loaded one tile ahead."""
    swap_ab: bool
    """Whether tokens, not heads, are the rows of the matrix tiles."""
    kv_eviction: str
    """L2 policy of K and V loads: ``evict_first`` (each byte is read once), ``evict_normal``."""
    num_splits: int = 1
    split_tokens: int = 0
    merge: str = "kernel"
    """``kernel``: a second launch; ``last_block``: the last block of a request merges."""

    @classmethod
    def of(cls, config: Config) -> PagedDecodeTritonConfig:
        """The typed form of a config of this template."""
        return cls(**config.as_dict())  # type: ignore[arg-type]

    def num_head_tiles(self, problem: PagedDecodeProblem) -> int:
        """Head tiles over all KV heads: the fastest part of the grid."""
        return problem.num_kv_heads * -(-problem.group_size // self.block_h)

    def num_work_items(self, batch: int, max_tokens: int) -> int:
        """Upper bound of the runs of ``batch`` requests that hold ``max_tokens`` together."""
        if self.split_rule == "size":
            return batch + max_tokens // self.split_tokens
        return batch * self.num_splits

    @property
    def is_split(self) -> bool:
        """Whether a request may have more than one run."""
        return self.split_rule != "none"

    @property
    def has_merge_kernel(self) -> bool:
        """Whether a second launch merges."""
        return self.is_split and self.merge == "kernel"


class PagedDecodeTriton(KernelTemplate):
    """Split-KV paged decode: gathering tiles of any width over pages of any size."""

    op = "paged_decode"
    name = "triton"
    backend = "triton"

    def supports(self, problem: PagedDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if problem.head_dim not in (64, 128, 256):
            return f"head_dim={problem.head_dim} is not one of 64, 128, 256"
        if problem.group_size > 16:
            return (
                f"{problem.group_size} query heads a KV head (num_qo_heads={problem.num_qo_heads}, "
                f"num_kv_heads={problem.num_kv_heads}); at most 16"
            )
        if problem.page_size > 256:
            return f"page_size={problem.page_size} is above 256"
        if problem.batch > MAX_BATCH:
            return f"batch={problem.batch} is above {MAX_BATCH}, the second axis of a CUDA grid"
        if device.compute_capability < (9, 0):
            return f"compute capability {device.compute_capability_text} is below 9.0"
        return None

    def kernel_specs(
        self, problem: PagedDecodeProblem, config: Config
    ) -> tuple[TritonKernelSpec, ...]:
        """The attention kernel and, where a second launch merges, the merge kernel."""
        typed = PagedDecodeTritonConfig.of(config)
        return _specs(problem, typed, batch=problem.batch, is_aligned=True, stores_lse=False)

    def build(
        self, problem: PagedDecodeProblem, config: Config, inputs: PagedDecodeInputs
    ) -> PagedDecodeTritonLauncher:
        """A launcher for inputs of these shapes, strides and this device.

        The lengths are read on the device: a captured launch serves any lengths as long as the page
        table does not outgrow ``inputs.kv_indices``.
        """
        return PagedDecodeTritonLauncher(problem, PagedDecodeTritonConfig.of(config), inputs)

    def estimate(
        self, problem: PagedDecodeProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the attention launch and of the merge launch."""
        typed = PagedDecodeTritonConfig.of(config)
        return _estimates(problem, typed)

    def source_hash(self) -> str:
        """Hash of the device code, of this module and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        return source_hash((_MODULE, f"{package}.triton_template", f"{root}.triton_spec"))


def _specs(
    problem: PagedDecodeProblem,
    config: PagedDecodeTritonConfig,
    *,
    batch: int,
    is_aligned: bool,
    stores_lse: bool,
) -> tuple[TritonKernelSpec, ...]:
    dtype = _TRITON_TYPES[problem.dtype]
    tables = {"kv_indptr": "*i32", "kv_indices": "*i32", "kv_last_page_len": "*i32"}
    results = {"out": f"*{dtype}", "lse": "*fp32", "partial_out": "*fp32", "partial_lse": "*fp32"}
    split = {"batch": "i32", "num_splits": "i32", "split_tokens": "i32"}
    shared = {
        "PAGE_SIZE": problem.page_size,
        "BLOCK_N": config.block_n,
        # Only rule "size" scans the requests; elsewhere one binary serves every batch.
        "BLOCK_B": _next_power_of_two(batch) if config.split_rule == "size" else 1,
        "BLOCK_S": _merge_block(config),
        "SPLIT_RULE": "size" if config.split_rule == "size" else "count",
    }
    strides = ("q_stride_b", "q_stride_h", "kv_stride_page", "kv_stride_token", "kv_stride_head")
    out_strides = ("out_stride_b", "out_stride_h")
    pointers = ("q", "k", "v", "out", "partial_out")
    attention = TritonKernelSpec(
        module=_MODULE,
        name="paged_decode_kernel",
        signature={
            **dict.fromkeys(("q", "k", "v"), f"*{dtype}"),
            **tables,
            **results,
            "arrivals": "*i32",
            "scale_log2": "fp32",
            **dict.fromkeys((*strides, *out_strides), "i64"),
            **split,
        },
        constexprs={
            "NUM_QO_HEADS": problem.num_qo_heads,
            "GROUP_SIZE": problem.group_size,
            "HEAD_DIM": problem.head_dim,
            "PAGE_SIZE": shared["PAGE_SIZE"],
            "BLOCK_N": shared["BLOCK_N"],
            "BLOCK_H": config.block_h,
            "BLOCK_B": shared["BLOCK_B"],
            "BLOCK_S": shared["BLOCK_S"],
            "SPLIT_RULE": shared["SPLIT_RULE"],
            "MERGE": config.merge,
            "PREFETCH_PAGES": config.prefetch_pages,
            "SWAP_AB": config.swap_ab,
            "KV_EVICTION": eviction_policy(config.kv_eviction),
            "STORE_LSE": stores_lse,
        },
        aligned=frozenset((*pointers, *strides, *out_strides) if is_aligned else ("partial_out",)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if not config.has_merge_kernel:
        return (attention,)
    merge = TritonKernelSpec(
        module=_MODULE,
        name="merge_kernel",
        signature={
            "kv_indptr": "*i32",
            "kv_last_page_len": "*i32",
            **results,
            **dict.fromkeys(out_strides, "i64"),
            **split,
        },
        constexprs={
            "NUM_QO_HEADS": problem.num_qo_heads,
            "HEAD_DIM": problem.head_dim,
            **shared,
            "STORE_LSE": stores_lse,
        },
        aligned=frozenset(("out", "partial_out", *out_strides) if is_aligned else ("partial_out",)),
        num_warps=_MERGE_WARPS,
        num_stages=1,
    )
    return attention, merge


def _next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _merge_block(config: PagedDecodeTritonConfig) -> int:
    """Partial results loaded at once by a merge; at head_dim 256, 32 of them are 32 KiB."""
    if config.split_rule == "count":
        return min(32, _next_power_of_two(config.num_splits))
    return 16


class PagedDecodeTritonLauncher:
    """Compiled kernels with their grids and scratch memory; one stream at a time."""

    def __init__(
        self,
        problem: PagedDecodeProblem,
        config: PagedDecodeTritonConfig,
        inputs: PagedDecodeInputs,
    ) -> None:
        q, cache = inputs.q, inputs.k_cache
        self.problem, self.config = problem, config
        self.batch = q.shape[0]
        num_items = config.num_work_items(self.batch, inputs.kv_indices.numel() * cache.shape[1])
        heads, head_dim = q.shape[1:]
        scratch_items = num_items if config.is_split else 0
        lengths = inputs.kv_indptr
        self.partial_out = _new_float32(q, (scratch_items, heads, head_dim))
        self.partial_lse = _new_float32(q, (scratch_items, heads))
        head_tiles = config.num_head_tiles(problem)
        # Zero between launches: the last block of a request sets its counter back.
        self.arrivals = lengths.new_zeros(self.batch * head_tiles)
        self.grid = (head_tiles * num_items, 1, 1)
        self.merge_grid = (heads, self.batch, 1)
        self._kernels: dict[tuple[bool, bool], tuple[BoundTritonKernel, ...]] = {}
        self.arch = _arch_of(q.device)
        self._bound(_is_aligned(q, cache, q), stores_lse=False)

    def _bound(self, is_aligned: bool, stores_lse: bool) -> tuple[BoundTritonKernel, ...]:
        """The kernels for this alignment, compiled at first use."""
        key = (is_aligned, stores_lse)
        if key not in self._kernels:
            specs = _specs(
                self.problem,
                self.config,
                batch=self.batch,
                is_aligned=is_aligned,
                stores_lse=stores_lse,
            )
            self._kernels[key] = tuple(spec.bind(self.arch) for spec in specs)
        return self._kernels[key]

    @property
    def workspace_bytes(self) -> int:
        """Device memory held for partial results and counters."""
        scratch = (self.partial_out, self.partial_lse, self.arrivals)
        return sum(tensor.numel() * tensor.element_size() for tensor in scratch)

    def launch(self, inputs: PagedDecodeInputs, outputs: PagedDecodeOutputs) -> None:
        """Enqueues the attention launch and, where the config has one, the merge launch."""
        q, out = inputs.q, outputs.out
        k, v = inputs.k_cache, inputs.v_cache
        lse = outputs.lse if outputs.lse is not None else self.partial_lse
        stride_page, stride_token, stride_head = k.stride()[:3]
        kernels = self._bound(_is_aligned(q, inputs.k_cache, out), outputs.lse is not None)
        split = (self.batch, self.config.num_splits, self.config.split_tokens)
        kernels[0](
            self.grid,
            q,
            k,
            v,
            inputs.kv_indptr,
            inputs.kv_indices,
            inputs.kv_last_page_len,
            out,
            lse,
            self.partial_out,
            self.partial_lse,
            self.arrivals,
            inputs.sm_scale * _LOG2_E,
            q.stride(0),
            q.stride(1),
            stride_page,
            stride_token,
            stride_head,
            out.stride(0),
            out.stride(1),
            *split,
        )
        for merge in kernels[1:]:
            merge(
                self.merge_grid,
                inputs.kv_indptr,
                inputs.kv_last_page_len,
                out,
                lse,
                self.partial_out,
                self.partial_lse,
                out.stride(0),
                out.stride(1),
                *split,
            )


def _new_float32(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Uninitialised fp32 memory on the device of ``like``."""
    import torch

    return like.new_empty(shape, dtype=torch.float32)


def _arch_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0  # the interpreter: nothing is compiled
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)


def _is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether every pointer is a multiple of 16 bytes and every stride of 16 elements."""
    return all(
        tensor.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in tensor.stride()[:-1])
        for tensor in tensors
    )


def _serial_loads(config: PagedDecodeTritonConfig, runs: int, tiles_per_run: int) -> int:
    """Dependent round trips: table bounds, first page ids, first tile, and what the loop adds."""
    page_ids = 0 if config.prefetch_pages else tiles_per_run // config.num_stages
    last_block = 2 if runs > 1 and config.merge == "last_block" else 0
    return 3 + page_ids + last_block


def _estimates(
    problem: PagedDecodeProblem, config: PagedDecodeTritonConfig
) -> tuple[LaunchEstimate, ...]:
    element = DTYPE_BYTES[problem.dtype]
    if config.split_rule == "size":
        runs = -(-problem.kv_len // config.split_tokens)
        run = config.split_tokens
    else:
        tiles = -(-problem.kv_len // config.block_n)
        run = -(-tiles // config.num_splits) * config.block_n
        runs = -(-problem.kv_len // run)
    head_tiles = config.num_head_tiles(problem)
    # Head tiles of one KV head read the same tokens: the cache serves the later ones.
    partial_bytes = 0
    if runs > 1:
        partial_bytes = 4 * problem.batch * runs * problem.num_qo_heads * (problem.head_dim + 1)
    tiles_per_run = -(-min(run, problem.kv_len) // config.block_n)
    rows = max(config.block_h, 8 if config.swap_ab else 16)
    num_programs = problem.batch * runs * head_tiles
    tile_bytes = 2 * config.block_n * problem.head_dim * element
    attention = LaunchEstimate(
        kernel="paged_decode_kernel",
        num_programs=num_programs,
        bytes_moved=problem.bytes_moved + partial_bytes,
        flops=4 * num_programs * tiles_per_run * config.block_n * rows * problem.head_dim,
        bytes_in_flight=tile_bytes * max(1, config.num_stages - 1),
        serial_loads=_serial_loads(config, runs, tiles_per_run),
        longest_share=run * runs / problem.kv_len if runs > 1 else 1.0,
    )
    if not config.has_merge_kernel or runs == 1:
        return (attention,)
    merge = LaunchEstimate(
        kernel="merge_kernel",
        num_programs=problem.batch * problem.num_qo_heads,
        bytes_moved=partial_bytes,
        flops=2 * partial_bytes,
        bytes_in_flight=4 * _merge_block(config) * problem.head_dim,
        serial_loads=2 + runs // _merge_block(config),
    )
    return attention, merge
