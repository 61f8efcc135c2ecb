"""Host side of the TileLang templates: from a config to compiled kernels and scratch memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import UsageError
from ..base import Config, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..tilelang_spec import BoundTileLangKernel, TileLangKernelSpec
from .problem import DTYPE_BYTES, PagedDecodeProblem

if TYPE_CHECKING:
    # Compiling what the disk knows needs no torch.
    import torch

    from .reference import PagedDecodeInputs, PagedDecodeOutputs

__all__ = ["PagedDecodeTileLangGather", "PagedDecodeTileLangPage", "TileLangConfig"]

_MODULE = f"{__package__}.tilelang_kernel"
_MERGE_MODULE = f"{__package__}.tilelang_merge_kernel"
_ELEMENTS_PER_STRIDE = 8  # of the device code, which is not imported where it need not be compiled
_LOG2_E = math.log2(math.e)
_MERGE_THREADS = 128
_MAJOR_CAPABILITIES = (9, 10, 12)
"""Architectures that the programs compile for."""
MIN_ROWS = 16
"""Query rows (columns when swapped) of the smallest matrix tile that TileLang makes."""
WGMMA_ROWS = 64
"""Rows of the matrix tile of a warp group."""
MAX_BATCH = 65535
MAX_GROUP = 64


@dataclass(frozen=True)
class TileLangConfig:
    """One config of either template, typed."""

    block_n: int
    """Tokens of one tile."""
    block_h: int
    """Query heads of one KV head that share a tile."""
    threads: int
    """Threads that compute; ``tma_ws`` adds a warp group that only loads."""
    num_stages: int
    """Tiles of the ring in shared memory."""
    swap_ab: bool
    """Whether tokens, not heads, are the rows of the matrix tiles."""
    matmul: str
    """``mma`` (one warp a tile) or ``wgmma`` (four)."""
    split_rule: str
    """``none``; ``count``: ``num_splits`` runs a request."""
    num_splits: int = 1
    load: str = "rows"
    """How tiles reach shared memory: one of ``LOADS`` of the device code."""
    kv_eviction: str = "evict_normal"
    """L2 policy of TMA loads of K and V: ``evict_first`` (each byte is read once)."""

    @classmethod
    def of(cls, config: Config) -> TileLangConfig:
        """The typed form of a config of these templates."""
        return cls(**config.as_dict())  # type: ignore[arg-type]

    @property
    def is_split(self) -> bool:
        """Whether a request may have more than one run."""
        return self.split_rule != "none"

    @property
    def rows(self) -> int:
        """Query rows of the matrix tile (columns when swapped), ``block_h`` of them real."""
        if self.matmul == "wgmma" and not self.swap_ab:
            return WGMMA_ROWS
        return max(MIN_ROWS, self.block_h)

    def num_head_tiles(self, problem: PagedDecodeProblem) -> int:
        """Head tiles over all KV heads: the fastest part of the grid."""
        return problem.num_kv_heads * -(-problem.group_size // self.block_h)

    @property
    def merge_block(self) -> int:
        """Partial results that a merge reads at once: work for every thread, at most 32 KiB."""
        return min(32, max(8, 1 << (self.num_splits - 1).bit_length()))


class _PagedDecodeTileLang(KernelTemplate):
    """What both templates share."""

    op = "paged_decode"
    backend = "tilelang"
    head_dims: ClassVar[tuple[int, ...]]

    def supports(self, problem: PagedDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if problem.head_dim not in self.head_dims:
            listing = ", ".join(map(str, self.head_dims))
            return f"head_dim={problem.head_dim} is not one of {listing}"
        if problem.group_size > MAX_GROUP:
            return (
                f"{problem.group_size} query heads a KV head (num_qo_heads={problem.num_qo_heads}, "
                f"num_kv_heads={problem.num_kv_heads}); at most {MAX_GROUP}"
            )
        if problem.batch > MAX_BATCH:
            return f"batch={problem.batch} is above {MAX_BATCH}, the third axis of a CUDA grid"
        if device.compute_capability[0] not in _MAJOR_CAPABILITIES:
            listing = ", ".join(f"{major}.x" for major in _MAJOR_CAPABILITIES)
            return f"compute capability {device.compute_capability_text} is not one of {listing}"
        return _unsupported_semantics(problem)

    def supports_tensors(
        self,
        problem: PagedDecodeProblem,
        inputs: PagedDecodeInputs,
        outputs: PagedDecodeOutputs | None = None,
    ) -> str | None:
        """None, or why it cannot serve these tensors."""
        return _unsupported_tensors(inputs, outputs)

    def kernel_specs(
        self, problem: PagedDecodeProblem, config: Config
    ) -> tuple[TileLangKernelSpec, ...]:
        """The attention kernel and, for split requests, the merge kernel."""
        return _specs(problem, TileLangConfig.of(config), stores_lse=False)

    def build(
        self, problem: PagedDecodeProblem, config: Config, inputs: PagedDecodeInputs
    ) -> PagedDecodeTileLangLauncher:
        """A launcher for inputs of this batch on this device.

        The lengths are read on the device, so a captured launch serves any lengths.
        """
        return PagedDecodeTileLangLauncher(problem, TileLangConfig.of(config), inputs)

    def estimate(
        self, problem: PagedDecodeProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the attention launch and of the merge launch."""
        return _estimates(problem, TileLangConfig.of(config))

    def launch_key(self, problem: PagedDecodeProblem, config: Config) -> str:
        """Grids and scratch follow from the heads of a tile and the number of runs."""
        typed = TileLangConfig.of(config)
        return f"{typed.num_head_tiles(problem)} {typed.split_rule} {typed.num_splits}"

    def source_hash(self) -> str:
        """Hash of the device code, of this module and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        return source_hash(
            (_MODULE, _MERGE_MODULE, f"{package}.tilelang_template", f"{root}.tilelang_spec")
        )


def _unsupported_semantics(problem: PagedDecodeProblem) -> str | None:
    if problem.query_len != 1:
        return f"query_len={problem.query_len} is not 1"
    if problem.kv_dtype != problem.dtype:
        return f"kv_dtype={problem.kv_dtype} is not q's dtype {problem.dtype}"
    if problem.is_latent:
        return f"head_dim_v={problem.head_dim_v} is not head_dim={problem.head_dim}"
    if problem.has_alibi:
        return "has_alibi is true"
    return "has_rope is true" if problem.has_rope else None


def _unsupported_tensors(
    inputs: PagedDecodeInputs, outputs: PagedDecodeOutputs | None
) -> str | None:
    if inputs.kv_indptr is None:
        return "the page table is dense (seq_lens), not CSR (kv_indptr, kv_last_page_len)"
    scales = inputs.k_scale, inputs.v_scale
    if any(not isinstance(scale, float | int) or scale != 1.0 for scale in scales):
        return "k_scale and v_scale are not 1.0"
    strides = inputs.k_cache.stride(), inputs.v_cache.stride()
    if strides[0] != strides[1]:
        return f"k_cache and v_cache have different strides: {strides[0]} and {strides[1]}"
    tensors = [("q", inputs.q), ("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)]
    if outputs is not None:
        tensors.append(("out", outputs.out))
    reasons = (_misalignment(tensor, name) for name, tensor in tensors)
    return next((reason for reason in reasons if reason is not None), None)


class PagedDecodeTileLangGather(_PagedDecodeTileLang):
    """Tiles of any width over pages of any size: every row has a page id of its own."""

    name = "tilelang_gather"
    head_dims = (64, 96, 128, 192, 256)


class PagedDecodeTileLangPage(_PagedDecodeTileLang):
    """Tiles that lie within a page, or that are whole pages one after the other."""

    name = "tilelang_page"
    head_dims = (64, 128, 192, 256)

    def supports(self, problem: PagedDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        if problem.page_size % MIN_ROWS:
            return f"page_size={problem.page_size} is not a multiple of {MIN_ROWS}"
        return super().supports(problem, device)


def _specs(
    problem: PagedDecodeProblem, config: TileLangConfig, *, stores_lse: bool
) -> tuple[TileLangKernelSpec, ...]:
    shared: dict[str, Any] = {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "group_size": problem.group_size,
        "has_window": problem.window_left >= 0,
    }
    pass_configs: Mapping[str, Any] = {
        "tl.disable_wgmma": config.matmul == "mma",
        "tl.disable_warp_specialized": config.load != "tma_ws",
        # Asynchronous copies are under way where the planner of shared memory does not see them.
        "tl.disable_shared_memory_reuse": True,
    }
    attention = TileLangKernelSpec(
        module=_MODULE,
        factory="attention_program",
        program="paged_decode_attention",
        parameters={
            **shared,
            "page_size": problem.page_size,
            "block_n": config.block_n,
            "block_h": config.block_h,
            "rows": config.rows,
            "threads": config.threads,
            "num_stages": config.num_stages,
            "load": config.load,
            "kv_eviction": config.kv_eviction,
            "swap_ab": config.swap_ab,
            "uses_wgmma": config.matmul == "wgmma",
            "is_split": config.is_split,
            "has_soft_cap": problem.has_soft_cap,
            "has_sinks": problem.has_sinks and not config.is_split,
            "stores_lse": stores_lse and not config.is_split,
        },
        pass_configs=pass_configs,
    )
    if not config.is_split:
        return (attention,)
    merge = TileLangKernelSpec(
        module=_MERGE_MODULE,
        factory="merge_program",
        program="paged_decode_merge",
        sources=(_MODULE,),
        parameters={
            **shared,
            "block_s": config.merge_block,
            "threads": _MERGE_THREADS,
            "has_sinks": problem.has_sinks,
            "stores_lse": stores_lse,
        },
    )
    return attention, merge


class PagedDecodeTileLangLauncher:
    """Compiled kernels with their scratch memory; one stream at a time."""

    def __init__(
        self, problem: PagedDecodeProblem, config: TileLangConfig, inputs: PagedDecodeInputs
    ) -> None:
        import torch

        q = inputs.q
        self.problem, self.config = problem, config
        self.batch = q.shape[0]
        self.partial_out: torch.Tensor | None = None
        self.partial_lse: torch.Tensor | None = None
        if config.is_split:
            shape = (self.batch, config.num_splits, *q.shape[1:])
            self.partial_out = q.new_empty(shape, dtype=torch.float32)
            self.partial_lse = q.new_empty(shape[:3], dtype=torch.float32)
        major, minor = torch.cuda.get_device_capability(q.device)
        self.arch = int(10 * major + minor)
        self._kernels: dict[bool, tuple[BoundTileLangKernel, ...]] = {}
        self._bound(stores_lse=False)

    def _bound(self, stores_lse: bool) -> tuple[BoundTileLangKernel, ...]:
        """The kernels with or without LSE, compiled at first use."""
        if stores_lse not in self._kernels:
            specs = _specs(self.problem, self.config, stores_lse=stores_lse)
            self._kernels[stores_lse] = tuple(spec.bind(self.arch) for spec in specs)
        return self._kernels[stores_lse]

    @property
    def workspace_bytes(self) -> int:
        """Device memory held for partial results."""
        scratch = (self.partial_out, self.partial_lse)
        return sum(t.numel() * t.element_size() for t in scratch if t is not None)

    def launch(self, inputs: PagedDecodeInputs, outputs: PagedDecodeOutputs) -> None:
        """Enqueues the attention launch and, where the config splits, the merge launch.

        Raises:
            UsageError: the tensors are none that ``supports_tensors`` accepts.
        """
        reason = _unsupported_tensors(inputs, outputs)
        if reason is not None:
            raise UsageError(
                f"these tensors are not supported by paged_decode/tilelang: {reason}; use template "
                "'triton', or lay them out in rows that start at multiples of 16 bytes"
            )
        q, k, out = inputs.q, inputs.k_cache, outputs.out
        q_strides, kv_strides, out_strides = _units(q), _units(k), _units(out)
        is_split = self.config.is_split
        soft_cap = inputs.soft_cap
        scale = inputs.sm_scale / soft_cap if soft_cap > 0.0 else inputs.sm_scale * _LOG2_E
        lse_factor = 1.0 if outputs.lse_base == "2" else 1.0 / _LOG2_E
        sizes = (self.batch, k.shape[2])
        splits = (self.config.num_splits, inputs.window_left)
        kernels = self._bound(outputs.lse is not None)
        kernels[0](
            q,
            k,
            inputs.v_cache,
            inputs.kv_indptr,
            inputs.kv_indices,
            inputs.kv_last_page_len,
            None if is_split else inputs.sinks,
            None if is_split else out,
            None if is_split else outputs.lse,
            self.partial_out,
            self.partial_lse,
            scale,
            soft_cap * _LOG2_E,
            lse_factor,
            *q_strides,
            *kv_strides,
            *out_strides,
            *sizes,
            k.shape[0],
            inputs.kv_indices.shape[0],
            *splits,
        )
        for merge in kernels[1:]:
            merge(
                inputs.kv_indptr,
                inputs.kv_last_page_len,
                inputs.sinks,
                out,
                outputs.lse,
                self.partial_out,
                self.partial_lse,
                lse_factor,
                *out_strides,
                *sizes,
                *splits,
                k.shape[1],
                self.config.block_n,
            )


def _units(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides but the last in units of 16 bytes."""
    return tuple(stride // _ELEMENTS_PER_STRIDE for stride in tensor.stride()[:-1])


def _misalignment(tensor: torch.Tensor, name: str) -> str | None:
    """None, or why the rows of the tensor are not contiguous pieces of 16 bytes."""
    *strides, last = tensor.stride()
    if last != 1:
        return f"{name} has strides {tensor.stride()}; the last must be 1"
    if any(stride % _ELEMENTS_PER_STRIDE for stride in strides):
        return f"{name} has strides {tensor.stride()}, no multiples of {_ELEMENTS_PER_STRIDE}"
    if tensor.data_ptr() % 16:
        return f"{name} starts {tensor.data_ptr() % 16} bytes after a multiple of 16"
    return None


def _estimates(problem: PagedDecodeProblem, config: TileLangConfig) -> tuple[LaunchEstimate, ...]:
    element = DTYPE_BYTES[problem.dtype]
    tokens = problem.kv_len
    if problem.window_left >= 0:
        tokens = min(tokens, problem.window_left + 1)
    tiles = -(-tokens // config.block_n)
    tiles_per_run = -(-tiles // config.num_splits)
    runs = -(-tiles // tiles_per_run)
    partial_bytes = 0
    if config.is_split:
        partial_bytes = 4 * problem.batch * runs * problem.num_qo_heads * (problem.head_dim + 1)
    num_programs = problem.batch * runs * config.num_head_tiles(problem)
    tile_bytes = 2 * config.block_n * problem.head_dim * element
    # The page ids of a tile are a round trip of their own, ahead of the tile by the ring's depth.
    serial_loads = 3 + tiles_per_run // config.num_stages
    attention = LaunchEstimate(
        kernel="paged_decode_attention_kernel",
        num_programs=num_programs,
        bytes_moved=problem.bytes_moved + partial_bytes,
        flops=4 * num_programs * tiles_per_run * config.block_n * config.rows * problem.head_dim,
        bytes_in_flight=tile_bytes * (config.num_stages - 1),
        serial_loads=serial_loads,
        longest_share=tiles_per_run * runs / tiles,
    )
    if not config.is_split:
        return (attention,)
    merge = LaunchEstimate(
        kernel="paged_decode_merge_kernel",
        num_programs=problem.batch * problem.num_qo_heads,
        bytes_moved=partial_bytes,
        flops=2 * partial_bytes,
        bytes_in_flight=4 * config.merge_block * problem.head_dim,
        serial_loads=2 + runs // config.merge_block,
    )
    return attention, merge
