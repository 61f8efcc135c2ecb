"""Launches the NVFP4 kernels of paged decode with the grids of the other Triton template."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..triton_spec import BoundTritonKernel
from .inputs import PagedDecodeInputs, PagedDecodeOutputs
from .problem import PagedDecodeProblem
from .triton_launcher import PagedDecodeTritonLauncher, _traits
from .triton_nvfp4_specs import Nvfp4Config, kernel_specs
from .triton_specs import TensorTraits

__all__ = ["Nvfp4Launcher"]

_LOG2_E = math.log2(math.e)


class Nvfp4Launcher(PagedDecodeTritonLauncher):
    """Compiled kernels with their grids and scratch memory; one stream at a time."""

    config: Nvfp4Config

    def __init__(
        self, problem: PagedDecodeProblem, config: Nvfp4Config, inputs: PagedDecodeInputs
    ) -> None:
        if inputs.q.device.type != "cuda":
            config = replace(config, dequant="arithmetic")  # the interpreter runs no assembly
        super().__init__(problem, config, inputs)

    def _bound(self, traits: TensorTraits) -> tuple[BoundTritonKernel, ...]:
        """The kernels for tensors of these traits, compiled at first use."""
        if traits not in self._kernels:
            specs = kernel_specs(self.problem, self.config, traits, batch=self.batch)
            self._kernels[traits] = tuple(spec.bind(self.arch) for spec in specs)
        return self._kernels[traits]

    def launch(self, inputs: PagedDecodeInputs, outputs: PagedDecodeOutputs) -> None:
        """Enqueues the attention launch and, where the config has one, the merge launch."""
        q, k, v, out = inputs.q, inputs.k_cache, inputs.v_cache, outputs.out
        k_blocks, v_blocks = inputs.k_block_scales, inputs.v_block_scales
        assert k_blocks is not None
        assert v_blocks is not None
        traits = _traits(inputs, out, stores_lse=outputs.lse is not None)
        attention, *merges = self._bound(traits)
        indptr, lengths = inputs.kv_indptr, inputs.kv_last_page_len
        if inputs.seq_lens is not None:
            indptr = lengths = inputs.seq_lens
        lse = outputs.lse if outputs.lse is not None else self.partial_lse
        lse_factor = 1.0 if outputs.lse_base == "2" else 1.0 / _LOG2_E
        unused = self.partial_lse
        k_scale: float | torch.Tensor = unused
        v_scale: float | torch.Tensor = unused
        logit_scale, out_scale = inputs.sm_scale, 1.0
        if traits.has_device_scales:
            k_scale, v_scale = inputs.k_scale, inputs.v_scale
        else:
            logit_scale, out_scale = logit_scale * float(inputs.k_scale), float(inputs.v_scale)
        cap = inputs.soft_cap
        logit_scale *= 1.0 / cap if cap > 0.0 else _LOG2_E
        table_stride = inputs.kv_indices.stride(0) if traits.has_dense_table else 0
        scratch = (self.partial_out, self.partial_lse)
        splits = (self.batch, self.num_splits, self.config.split_tokens)
        out_strides = out.stride()[:2]
        # Strides of scales count rows.
        row = k_blocks.shape[3]
        scale_strides = (s // row for pool in (k_blocks, v_blocks) for s in pool.stride()[:3])
        attention(
            self.grid,
            *(q, k, v, k_blocks, v_blocks),
            *(indptr, inputs.kv_indices, lengths),
            *(out, lse, *scratch, self.arrivals),
            unused if inputs.sinks is None else inputs.sinks,
            unused if inputs.alibi_slopes is None else inputs.alibi_slopes,
            *(k_scale, v_scale, logit_scale, out_scale, lse_factor, cap * _LOG2_E),
            *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *scale_strides, *out_strides),
            *(table_stride, inputs.window_left, *splits),
        )
        for merge in merges:
            merge(
                self.merge_grid,
                *(indptr, lengths, out, lse, *scratch, lse_factor),
                *(*out_strides, inputs.window_left, *splits),
            )
