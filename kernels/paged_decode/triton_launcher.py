"""Launches the Triton kernels of paged decode: grids, scratch memory and run-time arguments."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..triton_spec import BoundTritonKernel
from .inputs import PagedDecodeInputs, PagedDecodeOutputs, Rope
from .problem import PagedDecodeProblem
from .triton_specs import PagedDecodeTritonConfig, TensorTraits, kernel_specs

__all__ = ["PagedDecodeTritonLauncher"]

_LOG2_E = math.log2(math.e)
_INTERPRETED_SMS = 3
"""Multiprocessors that a persistent grid finds in Triton's interpreter."""


class PagedDecodeTritonLauncher:
    """Compiled kernels with their grids and scratch memory; one stream at a time."""

    def __init__(
        self,
        problem: PagedDecodeProblem,
        config: PagedDecodeTritonConfig,
        inputs: PagedDecodeInputs,
    ) -> None:
        q = inputs.q
        self.arch, num_sms = _device_facts(q.device)
        if self.arch == 0:
            config = replace(config, launch_pdl=False)  # the interpreter runs one kernel at a time
        self.problem, self.config = problem, config
        self.batch = inputs.batch
        pairs = config.num_pairs(problem)
        if config.split_rule == "stream":
            self.num_splits = config.num_streams(num_sms, pairs)
            num_programs = self.num_splits * pairs
            num_slots = num_programs + self.batch * pairs
        else:
            self.num_splits = config.num_splits
            num_programs = pairs * self._num_items(inputs)
            num_slots = num_programs if config.is_split else 0
        rows = num_slots * config.block_m
        self.partial_out = q.new_empty((rows, problem.head_dim), dtype=torch.float32)
        self.partial_lse = q.new_empty((rows,), dtype=torch.float32)
        # Zero between launches: the last block of a pair sets its counter back.
        self.arrivals = q.new_zeros((self.batch * pairs,), dtype=torch.int32)
        self.grid = (num_programs, 1, 1)
        self.merge_grid = (pairs * config.block_m, self.batch, 1)
        self._kernels: dict[TensorTraits, tuple[BoundTritonKernel, ...]] = {}
        self._bound(_traits(inputs, inputs.q, stores_lse=False))

    def _num_items(self, inputs: PagedDecodeInputs) -> int:
        """Upper bound of the pieces of all requests with one pair each."""
        if self.config.split_rule != "size":
            return self.batch * self.config.num_splits
        max_tokens = inputs.kv_indices.numel() * inputs.page_size
        return self.batch + max_tokens // self.config.split_tokens

    def _bound(self, traits: TensorTraits) -> tuple[BoundTritonKernel, ...]:
        """The kernels for tensors of these traits, compiled at first use."""
        if traits not in self._kernels:
            specs = kernel_specs(self.problem, self.config, traits, batch=self.batch)
            self._kernels[traits] = tuple(spec.bind(self.arch) for spec in specs)
        return self._kernels[traits]

    def launch(self, inputs: PagedDecodeInputs, outputs: PagedDecodeOutputs) -> None:
        """Enqueues the attention launch and, where the config has one, the merge launch."""
        q, k, v, out = inputs.q, inputs.k_cache, inputs.v_cache, outputs.out
        traits = _traits(inputs, out, stores_lse=outputs.lse is not None)
        attention, *merges = self._bound(traits)
        indptr, lengths = inputs.kv_indptr, inputs.kv_last_page_len
        if inputs.seq_lens is not None:
            indptr = lengths = inputs.seq_lens
        lse = outputs.lse if outputs.lse is not None else self.partial_lse
        lse_factor = 1.0 if outputs.lse_base == "2" else 1.0 / _LOG2_E
        unused = self.partial_lse
        k_scale, v_scale, logit_scale, out_scale = unused, unused, inputs.sm_scale, 1.0
        if isinstance(inputs.k_scale, torch.Tensor) and isinstance(inputs.v_scale, torch.Tensor):
            k_scale, v_scale = inputs.k_scale, inputs.v_scale
        else:
            logit_scale, out_scale = logit_scale * float(inputs.k_scale), float(inputs.v_scale)
        cap = inputs.soft_cap
        logit_scale *= 1.0 / cap if cap > 0.0 else _LOG2_E
        rope = inputs.rope or Rope()
        table_stride = inputs.kv_indices.stride(0) if traits.has_dense_table else 0
        scratch = (self.partial_out, self.partial_lse)
        splits = (self.batch, self.num_splits, self.config.split_tokens)
        out_strides = out.stride()[:2]
        attention(
            self.grid,
            *(q, k, v),
            *(indptr, inputs.kv_indices, lengths),
            *(out, lse, *scratch, self.arrivals),
            unused if inputs.sinks is None else inputs.sinks,
            unused if inputs.alibi_slopes is None else inputs.alibi_slopes,
            *(k_scale, v_scale, logit_scale, out_scale, lse_factor),
            *(cap * _LOG2_E, rope.theta, rope.scale),
            *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *out_strides),
            *(table_stride, inputs.window_left, *splits),
        )
        for merge in merges:
            merge(
                self.merge_grid,
                *(indptr, lengths, out, lse, *scratch, lse_factor),
                *(*out_strides, inputs.window_left, *splits),
            )


def _device_facts(device: torch.device) -> tuple[int, int]:
    """(architecture, multiprocessors); (0, a few) where Triton's interpreter runs."""
    if device.type != "cuda":
        return 0, _INTERPRETED_SMS
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def _traits(inputs: PagedDecodeInputs, out: torch.Tensor, *, stores_lse: bool) -> TensorTraits:
    q, k, v = inputs.q, inputs.k_cache, inputs.v_cache
    return TensorTraits(
        is_aligned=all(
            t.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in t.stride()[:-1])
            for t in (q, k, v, out)
        ),
        stores_lse=stores_lse,
        has_dense_table=inputs.seq_lens is not None,
        has_equal_strides=k.stride() == v.stride(),
        has_device_scales=isinstance(inputs.k_scale, torch.Tensor),
    )
