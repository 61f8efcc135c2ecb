"""Launches the TileLang kernel for FP4 tensor cores: run-time arguments, no scratch memory."""

from __future__ import annotations

import math

import torch

from ..quantization.block_tensor import BlockTensor
from ..tilelang_spec import BoundTileLangKernel
from .inputs import Fp4AttentionFwdInputs, Fp4AttentionFwdOutputs
from .machine_code_kinds import CodeCheckedSpec
from .mma_kinds import declared_kinds
from .problem import Fp4AttentionFwdProblem
from .tilelang_native_specs import Fp4AttentionTileLangNativeConfig, native_attention_spec

__all__ = ["Fp4AttentionTileLangNativeLauncher", "native_arguments"]

_LOG2_E = math.log2(math.e)
ELEMENTS_PER_STRIDE = 8  # of the device code, which is not imported where it need not be compiled
CODES_PER_WORD = 64  # four e4m3 scales of 16 codes each


class Fp4AttentionTileLangNativeLauncher:
    """The compiled kernel, with and without the logarithm."""

    def __init__(
        self,
        problem: Fp4AttentionFwdProblem,
        config: Fp4AttentionTileLangNativeConfig,
        inputs: Fp4AttentionFwdInputs,
    ) -> None:
        major, minor = torch.cuda.get_device_capability(inputs.device)
        self.arch = int(10 * major + minor)
        self.problem, self.config = problem, config
        self._attention: dict[bool, BoundTileLangKernel] = {}
        self._bound(stores_lse=True)

    def _bound(self, *, stores_lse: bool) -> BoundTileLangKernel:
        """The kernel with or without the logarithm, compiled and checked at first use."""
        if stores_lse not in self._attention:
            spec = native_attention_spec(self.problem, self.config, stores_lse=stores_lse)
            CodeCheckedSpec(spec, declared_kinds(self.problem)).compile(self.arch)
            self._attention[stores_lse] = spec.bind(self.arch)
        return self._attention[stores_lse]

    def launch(self, inputs: Fp4AttentionFwdInputs, outputs: Fp4AttentionFwdOutputs) -> None:
        """Enqueues the one launch."""
        kernel = self._bound(stores_lse=outputs.lse is not None)
        kernel(*native_arguments(self.problem, inputs, outputs))


def native_arguments(
    problem: Fp4AttentionFwdProblem, inputs: Fp4AttentionFwdInputs, outputs: Fp4AttentionFwdOutputs
) -> tuple[object, ...]:
    """What the kernel takes, in its order; the tensors are views of the operands."""
    v, out = inputs.v, outputs.out
    assert isinstance(v, BlockTensor), "P and V are NVFP4"
    return (
        *_codes_and_words(inputs.q),
        *_codes_and_words(inputs.k),
        *_codes_and_words(v),
        *(x.view(-1) for x in (inputs.q.tensor_scale, inputs.k.tensor_scale, inputs.v_scale)),
        *(inputs.delta, out, outputs.lse),
        inputs.sm_scale * _LOG2_E,
        *(stride // ELEMENTS_PER_STRIDE for stride in out.stride()[:3]),
        *(problem.batch, problem.num_qo_heads, problem.query_len, problem.kv_len),
        *(problem.padded_keys // CODES_PER_WORD, problem.num_q_means),
    )


def _codes_and_words(tensor: BlockTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales by words of four, as the instruction takes them."""
    return tensor.codes, tensor.scales.view(torch.uint8).view(torch.uint32)
