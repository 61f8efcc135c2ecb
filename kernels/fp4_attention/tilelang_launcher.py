"""Launches the kernels of the TileLang template: scratch memory and run-time arguments."""

from __future__ import annotations

import math

import torch

from ..quantization.block_tensor import BlockTensor
from ..tilelang_spec import BoundTileLangKernel
from ..triton_spec import BoundTritonKernel
from .inputs import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs
from .problem import Fp4AttentionFwdProblem
from .tilelang_specs import (
    DEQUANTIZE_KEYS_BLOCK_M,
    Fp4AttentionTileLangConfig,
    attention_spec,
    dequantize_keys_spec,
)
from .triton_specs import DEQUANTIZE_BLOCK_M, DEQUANTIZE_BLOCK_N, dequantize_spec

__all__ = ["ELEMENTS_PER_STRIDE", "Fp4AttentionTileLangLauncher"]

_LOG2_E = math.log2(math.e)
ELEMENTS_PER_STRIDE = 8  # of the device code, which is not imported where it need not be compiled


class Fp4AttentionTileLangLauncher:
    """Compiled kernels with their scratch memory; one stream at a time."""

    def __init__(
        self,
        problem: Fp4AttentionFwdProblem,
        config: Fp4AttentionTileLangConfig,
        inputs: Fp4AttentionFwdInputs,
    ) -> None:
        major, minor = torch.cuda.get_device_capability(inputs.device)
        self.arch = int(10 * major + minor)
        self.problem, self.config = problem, config
        q = inputs.q.codes
        self.q_values = _values_of(inputs.q)
        self.k_values = q.new_empty(
            (problem.batch, problem.num_kv_heads, problem.padded_keys, problem.head_dim),
            dtype=torch.bfloat16,
        )
        self.v_values = _values_of(inputs.v) if isinstance(inputs.v, BlockTensor) else None
        self._dequantize_keys = dequantize_keys_spec(problem).bind(self.arch)
        formats = {t.block_format.name for t in (inputs.q, inputs.v) if isinstance(t, BlockTensor)}
        self._dequantize: dict[str, BoundTritonKernel] = {
            name: dequantize_spec(name).bind(self.arch) for name in formats
        }
        self._attention: dict[bool, BoundTileLangKernel] = {}
        self._bound(stores_lse=True)

    def _bound(self, *, stores_lse: bool) -> BoundTileLangKernel:
        """The attention kernel with or without the logarithm, compiled at first use."""
        if stores_lse not in self._attention:
            spec = attention_spec(self.problem, self.config, stores_lse=stores_lse)
            self._attention[stores_lse] = spec.bind(self.arch)
        return self._attention[stores_lse]

    def launch(self, inputs: Fp4AttentionFwdInputs, outputs: Fp4AttentionFwdOutputs) -> None:
        """Enqueues the dequantising launches and the attention launch."""
        problem, out = self.problem, outputs.out
        self._fill(self.q_values, inputs.q)
        self._fill_keys(inputs.k)
        v = inputs.v
        if isinstance(v, BlockTensor):
            assert self.v_values is not None
            self._fill(self.v_values, v)
            v = self.v_values
        self._bound(stores_lse=outputs.lse is not None)(
            *(self.q_values, self.k_values, v),
            *(x.view(-1) for x in (inputs.q.tensor_scale, inputs.k.tensor_scale, inputs.v_scale)),
            *(inputs.delta, out, outputs.lse),
            inputs.sm_scale * _LOG2_E,
            *(stride // ELEMENTS_PER_STRIDE for stride in out.stride()[:3]),
            *(problem.batch, problem.num_qo_heads, problem.query_len),
            *(problem.kv_len, problem.padded_keys, problem.num_q_means),
        )

    def _fill(self, values: torch.Tensor, tensor: BlockTensor) -> None:
        """Enqueues the launch that writes the values of Q or V to scratch memory."""
        elements = values.shape[-1]
        rows = values.numel() // elements
        tiles = -(-rows // DEQUANTIZE_BLOCK_M) * -(-elements // DEQUANTIZE_BLOCK_N)
        kernel = self._dequantize[tensor.block_format.name]
        scales = tensor.scales.view(torch.uint8)
        kernel((tiles, 1, 1), tensor.codes, scales, values, rows, elements)

    def _fill_keys(self, k: BlockTensor) -> None:
        rows = self.k_values.numel() // self.problem.head_dim
        self._dequantize_keys(
            (rows // DEQUANTIZE_KEYS_BLOCK_M, 1, 1),
            *(k.codes, k.scales.view(torch.uint8), self.k_values),
            *(self.problem.kv_len, self.problem.padded_keys),
        )


def _values_of(tensor: BlockTensor) -> torch.Tensor:
    """Memory for the bf16 values of a tensor."""
    *rows, half = tensor.codes.shape
    return tensor.codes.new_empty((*rows, 2 * half), dtype=torch.bfloat16)
