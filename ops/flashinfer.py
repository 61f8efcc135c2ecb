"""FlashInfer's wrapper for batch decode, plan and run, over ``paged_decode``.

``from tilescout.ops.flashinfer import BatchDecodeWithPagedKVCacheWrapper`` takes the place of the
import from ``flashinfer``. An argument is honoured, or refused with the reason; those that only
choose among FlashInfer's own implementations are checked and have no other effect, since here the
winner of the database chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import UsageError
from .flashinfer_plan import Plan, PlanOptions, alibi_slopes, refuse, wrong
from .kv_cache import KV_LAYOUTS, KvCache
from .page_table import PageTable
from .paged_decode import paged_decode

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"]

_BACKENDS = ("auto", "fa2", "fa3", "cudnn", "trtllm-gen", "cute-dsl", "xqa")
"""Names that FlashInfer gives its implementations."""
_LEGACY_ORDER = (
    *("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"),
    *("o_data_type", "data_type", "sm_scale", "rope_scale", "rope_theta", "non_blocking"),
    *("block_tables", "seq_lens", "fixed_split_size", "disable_split_kv", "q_len_per_req"),
)
"""Arguments of ``plan`` after ``page_size``, in the order in which they may come by position."""


class BatchDecodeWithPagedKVCacheWrapper:
    """Decode attention of many requests over a paged KV cache: plan once, run for every layer."""

    def __init__(  # noqa: PLR0917  (FlashInfer's signature)
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Sequence[object] | None = None,
        jit_kwargs: dict[str, object] | None = None,
    ) -> None:
        """Keeps the device and, for CUDA graphs, the buffers; allocates nothing.

        Args:
            float_workspace_buffer: Says on which device to run; scratch memory is our own.
            kv_layout: ``NHD`` or ``HND``.
            use_cuda_graph: ``plan`` copies the page table into the three buffers, which a captured
                ``run`` reads.
            use_tensor_cores: No effect: the winner chooses.
            paged_kv_indptr_buffer: int32 ``[batch + 1]``, needed for CUDA graphs.
            paged_kv_indices_buffer: int32, as long as the longest page table, likewise.
            paged_kv_last_page_len_buffer: int32 ``[batch]``, likewise.
            backend: A name of FlashInfer's; no effect, likewise.
            jit_args: Refused: a custom attention variant is another operation.
            jit_kwargs: Refused, likewise.
        """
        if kv_layout not in KV_LAYOUTS:
            raise wrong("kv_layout", kv_layout, f"one of {', '.join(KV_LAYOUTS)}")
        if backend not in _BACKENDS:
            raise wrong("backend", backend, f"one of {', '.join(_BACKENDS)}")
        refuse("jit_args", jit_args, "a custom attention variant is another operation")
        refuse("jit_kwargs", jit_kwargs, "a custom attention variant is another operation")
        self._kv_layout = kv_layout
        self._backend = backend
        self._use_tensor_cores = use_tensor_cores
        self.device = float_workspace_buffer.device
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if use_cuda_graph:
            self._buffers = self._checked_buffers(
                paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            )
        self._plan: Plan | None = None

    @property
    def use_tensor_cores(self) -> bool:
        """As it was given."""
        return self._use_tensor_cores

    @property
    def resolved_backend(self) -> str:
        """``tilescout``: which template runs is in ``tilescout.ops.resolve_paged_decode``."""
        return "tilescout"

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether ``plan`` writes into buffers that a captured ``run`` reads."""
        return self._buffers is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Checks that the buffers lie on the same device; neither is used."""
        for name, buffer in (
            ("float_workspace_buffer", float_workspace_buffer),
            ("int_workspace_buffer", int_workspace_buffer),
        ):
            # FlashInfer lets the integers lie on the host.
            if buffer is not None and buffer.device != self.device and name.startswith("float"):
                raise wrong(f"device of {name}", str(buffer.device), repr(str(self.device)))

    def workspace_size(self, *arguments: object, **options: object) -> tuple[int, int]:
        """Bytes that the two workspace buffers must have: none."""
        del arguments, options
        return 0, 0

    def plan(  # noqa: PLR0917  (FlashInfer's signature)
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *legacy: Any,
        **options: Any,
    ) -> None:
        """Keeps the page table and what the runs after it have in common; launches nothing.

        Args:
            indptr: int32 ``[batch + 1]``, on the host or the device.
            indices: int32 page ids, on the device.
            last_page_len: int32 ``[batch]``, on the host or the device.
            num_qo_heads: Query heads.
            num_kv_heads: KV heads.
            head_dim: Of q, K and V.
            page_size: Tokens of a page.
            *legacy: The options by position, in FlashInfer's old order.
            **options: ``pos_encoding_mode`` (NONE, ROPE_LLAMA or ALIBI), ``window_left``,
                ``logits_soft_cap``, ``q_data_type``, ``kv_data_type``, ``data_type``, ``sm_scale``,
                ``rope_scale``, ``rope_theta``, ``non_blocking``, ``q_len_per_req`` and
                ``is_causal`` are honoured; ``block_tables`` with ``seq_lens`` are read in the
                place of the other table where CUDA graphs are off. ``o_data_type`` must be q's.
                ``fixed_split_size``, ``disable_split_kv``, ``window_right`` and
                ``use_token_head_sf`` are refused.

        Raises:
            UsageError: an argument has a wrong value, shape or dtype, or does not exist.
            UnsupportedError: an argument is refused.
        """
        if len(legacy) > len(_LEGACY_ORDER):
            raise wrong(
                "number of arguments of plan", 7 + len(legacy), f"at most {7 + len(_LEGACY_ORDER)}"
            )
        named = dict(zip(_LEGACY_ORDER, legacy, strict=False))
        twice = sorted(named.keys() & options.keys())
        if twice:
            raise UsageError(f"{', '.join(twice)} of plan is given twice: by position and by name")
        checked = PlanOptions.of({**named, **options})
        batch = last_page_len.shape[0]
        if indptr.shape[0] != batch + 1:
            raise wrong("shape of indptr", tuple(indptr.shape), f"[{batch + 1}], batch + 1")
        self._plan = Plan(
            table=self._table(indptr, indices, last_page_len, checked),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_len_per_req=checked.q_len_per_req,
            q_dtype=checked.q_dtype,
            kv_dtype=checked.kv_dtype,
            window_left=checked.window_left,
            logits_soft_cap=checked.logits_soft_cap or None,
            sm_scale=checked.sm_scale,
            is_causal=checked.is_causal is not False,
            rope=checked.rope,
            alibi_slopes=(
                alibi_slopes(num_qo_heads).to(self.device)
                if checked.pos_encoding_mode == "ALIBI"
                else None
            ),
        )

    begin_forward = plan

    def end_forward(self) -> None:
        """Does nothing; FlashInfer has it for older callers."""

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        *args: object,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: KvCache | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Args:
            q: ``[batch * q_len_per_req, num_qo_heads, head_dim]``.
            paged_kv_cache: ``[num_pages, 2, page_size, num_kv_heads, head_dim]``, or (K, V) without
                the second axis; heads before tokens where the layout is HND.
            *args: Refused: they belong to a custom attention variant.
            q_scale: Factor of q; None: 1.
            k_scale: Factor of K; a number, or fp32 of one element on the device.
            v_scale: Likewise of V.
            out: Where to write, like q.
            lse: Where to write the LSE, fp32 ``[batch * q_len_per_req, num_qo_heads]``.
            return_lse: Also return the base-2 logarithm of the sum of exponentials.
            enable_pdl: No effect: the winner chooses how launches follow each other.
            window_left: None, or the planned one.
            sinks: fp32 ``[num_qo_heads]``.
            q_len_per_req: None, or the planned one.
            skip_softmax_threshold_scale_factor: Refused: nothing here is approximate.
            kv_cache_sf: Block scales of an NVFP4 cache, which is uint8 and so planned: e4m3 or its
                bytes, like ``paged_kv_cache`` but head_dim / 16 wide, linear for K and V.

        Returns:
            ``out``, or ``(out, lse)``.

        Raises:
            UsageError: nothing is planned, or a tensor or value does not fit the plan.
            UnsupportedError: an argument is refused, or no template serves the problem.
        """
        del enable_pdl
        plan = self._plan
        if plan is None:
            raise UsageError("run needs a plan: call plan(indptr, indices, last_page_len, ...)")
        refuse("*args", args or None, "they belong to a custom attention variant")
        reason = "softmax here is exact; leave it out"
        threshold = skip_softmax_threshold_scale_factor
        refuse("skip_softmax_threshold_scale_factor", threshold, reason)
        for name, value, planned in (
            ("window_left", window_left, plan.window_left),
            ("q_len_per_req", q_len_per_req, plan.q_len_per_req),
        ):
            if value not in (None, planned):
                raise wrong(name, value, f"{planned}, as planned; plan again")
        self._check_planned(plan, q, paged_kv_cache)
        table = plan.table
        return paged_decode(
            q,
            paged_kv_cache,
            table.indptr,
            None if table.is_dense else table.indices,
            table.last_page_len,
            block_table=table.indices if table.is_dense else None,
            seq_lens=table.seq_lens,
            kv_layout=self._kv_layout,
            kv_block_scales=kv_cache_sf,
            sm_scale=plan.sm_scale,
            q_scale=1.0 if q_scale is None else q_scale,
            k_scale=1.0 if k_scale is None else k_scale,
            v_scale=1.0 if v_scale is None else v_scale,
            is_causal=plan.is_causal,
            window_left=plan.window_left,
            soft_cap=plan.logits_soft_cap,
            sinks=sinks,
            alibi_slopes=plan.alibi_slopes,
            rope=plan.rope,
            out=out,
            lse=lse,
            return_lse=return_lse,
        )

    def forward(
        self, q: torch.Tensor, paged_kv_cache: KvCache, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``run`` for older callers: options of ``plan`` replace the planned ones for good."""
        self._replan(options)
        return self.run(q, paged_kv_cache, **options)

    def forward_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``run_return_lse`` for older callers."""
        self._replan(options)
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``run`` with the LSE."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    def _replan(self, options: dict[str, Any]) -> None:
        """Moves what ``forward`` takes of ``plan``'s options from ``options`` into the plan."""
        if self._plan is None:
            raise UsageError("forward needs a plan: call plan(indptr, indices, ...)")
        plan = self._plan
        mode = options.pop("pos_encoding_mode", None)
        rope_scale, rope_theta = options.pop("rope_scale", None), options.pop("rope_theta", None)
        changes: dict[str, Any] = {}
        if mode is not None:
            rope = {"pos_encoding_mode": mode, "rope_scale": rope_scale, "rope_theta": rope_theta}
            changes["rope"] = PlanOptions.of(rope).rope
            slopes = alibi_slopes(plan.num_qo_heads).to(self.device) if mode == "ALIBI" else None
            changes["alibi_slopes"] = slopes
        for name in ("window_left", "logits_soft_cap", "sm_scale"):
            if name in options:
                changes[name] = options.pop(name)
        self._plan = replace(plan, **changes)

    def _checked_buffers(
        self, *buffers: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        names = ("indptr", "indices", "last_page_len")
        given = []
        for name, buffer in zip(names, buffers, strict=True):
            what = f"paged_kv_{name}_buffer"
            if buffer is None:
                raise UsageError(f"{what} is missing: use_cuda_graph=True needs the three buffers")
            if buffer.dtype != torch.int32:
                raise wrong(f"dtype of {what}", buffer.dtype, "torch.int32")
            if buffer.device != self.device:
                raise wrong(f"device of {what}", str(buffer.device), repr(str(self.device)))
            given.append(buffer)
        indptr, indices, last_page_len = given
        if indptr.shape[0] != last_page_len.shape[0] + 1:
            allowed = f"[{last_page_len.shape[0] + 1}], one more than last_page_len's"
            raise wrong("shape of paged_kv_indptr_buffer", tuple(indptr.shape), allowed)
        return indptr, indices, last_page_len

    def _table(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        options: PlanOptions,
    ) -> PageTable:
        is_async = options.non_blocking
        if self._buffers is None:
            if options.block_tables is not None and options.seq_lens is not None:
                dense = (options.block_tables, options.seq_lens)
                moved = [x.to(self.device, torch.int32, non_blocking=is_async) for x in dense]
                return PageTable.dense(moved[0], moved[1])
            given = (indptr, indices, last_page_len)
            moved = [x.to(self.device, torch.int32, non_blocking=is_async) for x in given]
            return PageTable.csr(*moved)
        to_indptr, to_indices, to_last = self._buffers
        if last_page_len.shape[0] != to_last.shape[0]:
            raise wrong(
                "batch of plan", last_page_len.shape[0], f"{to_last.shape[0]}, the buffers'"
            )
        if indices.shape[0] > to_indices.shape[0]:
            allowed = f"at most {to_indices.shape[0]}, the length of paged_kv_indices_buffer"
            raise wrong("length of indices", indices.shape[0], allowed)
        to_indptr.copy_(indptr, non_blocking=is_async)
        to_indices[: indices.shape[0]].copy_(indices, non_blocking=is_async)
        to_last.copy_(last_page_len, non_blocking=is_async)
        return PageTable.csr(to_indptr, to_indices, to_last)

    def _check_planned(self, plan: Plan, q: torch.Tensor, cache: KvCache) -> None:
        batch = plan.table.batch
        rows = (batch * plan.q_len_per_req, plan.num_qo_heads, plan.head_dim)
        if tuple(q.shape) != rows:
            raise wrong("shape of q", tuple(q.shape), f"{list(rows)}, as planned")
        if q.dtype != plan.q_dtype:
            raise wrong("dtype of q", q.dtype, f"{plan.q_dtype}, as planned with q_data_type")
        k = cache[:, 0] if isinstance(cache, torch.Tensor) else cache[0]
        if k.dtype != plan.kv_dtype:
            raise wrong("dtype of paged_kv_cache", k.dtype, f"{plan.kv_dtype}, as planned")
        order = (1, 2) if self._kv_layout == "NHD" else (2, 1)
        found = tuple(k.shape[axis] for axis in order) if k.dim() == 4 else ()
        if found != (plan.page_size, plan.num_kv_heads):
            allowed = f"{(plan.page_size, plan.num_kv_heads)}, as planned"
            raise wrong(f"(page_size, num_kv_heads) of a {self._kv_layout} cache", found, allowed)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper with buffers for a captured ``run``."""

    def __init__(  # noqa: PLR0917  (FlashInfer's signature)
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        """As ``BatchDecodeWithPagedKVCacheWrapper`` with ``use_cuda_graph=True``."""
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )
