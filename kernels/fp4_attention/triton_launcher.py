"""Launches the Triton kernels of FP4 attention: grids, scratch memory and run-time arguments."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..quantization.block_tensor import BlockTensor
from ..triton_spec import BoundTritonKernel
from .inputs import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs
from .problem import Fp4AttentionFwdProblem
from .triton_specs import (
    DEQUANTIZE_BLOCK_M,
    DEQUANTIZE_BLOCK_N,
    Fp4AttentionTritonConfig,
    TensorTraits,
    attention_spec,
    dequantize_spec,
)

__all__ = ["Fp4AttentionTritonLauncher"]

_LOG2_E = math.log2(math.e)


class Fp4AttentionTritonLauncher:
    """Compiled kernels with their grids and scratch memory; one stream at a time."""

    def __init__(
        self,
        problem: Fp4AttentionFwdProblem,
        config: Fp4AttentionTritonConfig,
        inputs: Fp4AttentionFwdInputs,
    ) -> None:
        self.arch = _arch_of(inputs.device)
        if self.arch == 0 and config.conversion:
            config = replace(config, conversion="arithmetic")  # the interpreter has no assembly
        self.problem, self.config = problem, config
        self.grid = (config.num_programs(problem), 1, 1)
        self._dequantize: dict[str, BoundTritonKernel] = {}
        self.k_values: torch.Tensor | None = None
        self.v_values: torch.Tensor | None = None
        if config.is_ahead:
            self.k_values = self._scratch(inputs.k)
            if isinstance(inputs.v, BlockTensor):
                self.v_values = self._scratch(inputs.v)
        self._attention: dict[TensorTraits, BoundTritonKernel] = {}
        self._bound(TensorTraits())

    def _scratch(self, tensor: BlockTensor) -> torch.Tensor:
        """bf16 for the values of a tensor, with the kernel that fills it bound."""
        name = tensor.block_format.name
        self._dequantize[name] = dequantize_spec(name).bind(self.arch)
        *rows, half = tensor.codes.shape
        return tensor.codes.new_empty((*rows, 2 * half), dtype=torch.bfloat16)

    def _bound(self, traits: TensorTraits) -> BoundTritonKernel:
        """The attention kernel for tensors of these traits, compiled at first use."""
        if traits not in self._attention:
            spec = attention_spec(self.problem, self.config, traits)
            self._attention[traits] = spec.bind(self.arch)
        return self._attention[traits]

    def launch(self, inputs: Fp4AttentionFwdInputs, outputs: Fp4AttentionFwdOutputs) -> None:
        """Enqueues the dequantising launches, if the config has them, and the attention launch."""
        problem, out = self.problem, outputs.out
        k, v = inputs.k.codes, inputs.v
        v_codes = v.codes if isinstance(v, BlockTensor) else v
        # A pointer that the kernel was compiled not to read.
        v_scales = v.scales if isinstance(v, BlockTensor) else inputs.k.scales
        if self.k_values is not None:
            k = self._filled(self.k_values, inputs.k)
        if self.v_values is not None and isinstance(v, BlockTensor):
            v_codes = self._filled(self.v_values, v)
        attention = self._bound(_traits(outputs))
        attention(
            self.grid,
            *(inputs.q.codes, self._scales(inputs.q.scales), inputs.q.tensor_scale),
            *(k, self._scales(inputs.k.scales), inputs.k.tensor_scale),
            *(v_codes, self._scales(v_scales, is_v=True), inputs.v_scale),
            inputs.v_scale if inputs.delta is None else inputs.delta,
            out,
            inputs.v_scale if outputs.lse is None else outputs.lse,
            inputs.sm_scale * _LOG2_E,
            *out.stride()[:3],
            *(problem.query_len, problem.kv_len, problem.padded_keys),
            *(problem.num_qo_heads, problem.num_q_means),
        )

    def _scales(self, scales: torch.Tensor, *, is_v: bool = False) -> torch.Tensor:
        """Scales under the type that the kernel was compiled for."""
        if self.problem.products == "native" and not (is_v and self.problem.mode == "fp8_p"):
            return scales
        return scales.view(torch.uint8)

    def _filled(self, values: torch.Tensor, tensor: BlockTensor) -> torch.Tensor:
        """Enqueues the launch that writes the values of a tensor to scratch memory."""
        elements = values.shape[-1]
        rows = values.numel() // elements
        tiles = -(-rows // DEQUANTIZE_BLOCK_M) * -(-elements // DEQUANTIZE_BLOCK_N)
        kernel = self._dequantize[tensor.block_format.name]
        scales = tensor.scales.view(torch.uint8)
        kernel((tiles, 1, 1), tensor.codes, scales, values, rows, elements)
        return values


def _traits(outputs: Fp4AttentionFwdOutputs) -> TensorTraits:
    out = outputs.out
    return TensorTraits(
        stores_lse=outputs.lse is not None,
        is_aligned=out.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in out.stride()[:3]),
    )


def _arch_of(device: torch.device) -> int:
    """Compute capability as compilers write it; 0 where Triton's interpreter runs."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
