"""Launches the Triton kernels of the backward: grids, scratch memory and run-time arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..triton_spec import BoundTritonKernel
from .inputs import Fp4AttentionBwdInputs, Fp4AttentionBwdOutputs
from .triton_config import PREPARE, Fp4AttentionBwdTritonConfig
from .triton_specs import (
    AMAX_KERNEL,
    GRADIENT_KERNELS,
    OPERAND_KERNEL,
    ROWS_KERNEL,
    TURN_KERNEL,
    TensorTraits,
    part_specs,
)

__all__ = ["Fp4AttentionBwdTritonLauncher"]

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class _Kernel:
    """A loaded kernel and the names of its run-time arguments."""

    bound: BoundTritonKernel
    names: tuple[str, ...]

    def launch(self, num_programs: int, values: dict[str, Any]) -> None:
        self.bound((num_programs, 1, 1), *(values[name] for name in self.names))


class Fp4AttentionBwdTritonLauncher:
    """Compiled kernels with their grids and scratch memory; one stream at a time."""

    def __init__(self, config: Fp4AttentionBwdTritonConfig, inputs: Fp4AttentionBwdInputs) -> None:
        self.config = config
        self.arch = _arch_of(inputs.device)
        self._scratch = _make_scratch(config, inputs.device)
        self._kernels: dict[tuple[str, TensorTraits], dict[str, _Kernel]] = {}
        for part in config.parts:
            self._bound(part, TensorTraits())

    def _bound(self, part: str, traits: TensorTraits) -> dict[str, _Kernel]:
        """The kernels of a part for tensors of these traits, compiled at first use."""
        if (part, traits) not in self._kernels:
            self._kernels[part, traits] = {
                spec.name: _Kernel(spec.bind(self.arch), tuple(spec.signature))
                for spec in part_specs(self.config, part, traits)
            }
        return self._kernels[part, traits]

    def launch(self, inputs: Fp4AttentionBwdInputs, outputs: Fp4AttentionBwdOutputs) -> None:
        """Enqueues the kernels of all parts."""
        values, traits = self._values(inputs, outputs), _traits(inputs, outputs)
        for part in self.config.parts:
            self._launch_part(part, values, traits)

    def launch_part(
        self, part: str, inputs: Fp4AttentionBwdInputs, outputs: Fp4AttentionBwdOutputs
    ) -> None:
        """Enqueues the kernels of one part, on what the parts before it left."""
        self._launch_part(part, self._values(inputs, outputs), _traits(inputs, outputs))

    def _launch_part(self, part: str, values: dict[str, Any], traits: TensorTraits) -> None:
        kernels = self._bound(part, traits)
        if part == PREPARE:
            self._prepare(kernels, values)
            return
        kernels[GRADIENT_KERNELS[part]].launch(self.config.num_programs(part), values)

    def _prepare(self, kernels: dict[str, _Kernel], values: dict[str, Any]) -> None:
        config, problem = self.config, self.config.problem
        heads = problem.batch * problem.num_qo_heads
        kv_heads = problem.batch * problem.num_kv_heads
        block = config.number("prepare_block_m")
        row_tiles, key_tiles = problem.padded_rows // block, problem.padded_keys // block
        kernels[AMAX_KERNEL].launch(heads * config.amax_tiles, values)
        kernels[ROWS_KERNEL].launch(heads * row_tiles, values)
        kernels[OPERAND_KERNEL].launch(heads * row_tiles, {**values, **values["of_q"]})
        kernels[OPERAND_KERNEL].launch(kv_heads * key_tiles, {**values, **values["of_k"]})
        kernels[TURN_KERNEL].launch(kv_heads * key_tiles, values)

    def _values(
        self, inputs: Fp4AttentionBwdInputs, outputs: Fp4AttentionBwdOutputs
    ) -> dict[str, Any]:
        """All run-time arguments by name."""
        problem, scratch = self.config.problem, self._scratch
        given = {"out": inputs.out, "grad_out": inputs.grad_out}
        tensors = {**given, "dq": outputs.dq, "dk": outputs.dk, "dv": outputs.dv}
        values: dict[str, Any] = {
            **scratch,
            **tensors,
            **{
                f"{name}_stride_{axis}": stride
                for name, tensor in tensors.items()
                for axis, stride in zip("bhs", tensor.stride()[:3], strict=True)
            },
            "v_t": inputs.v,
            "v_scale": inputs.v_scale,
            "lse": inputs.lse,
            "logit_scale": inputs.sm_scale * _LOG2_E,
            "sm_scale": inputs.sm_scale,
            "query_len": problem.query_len,
            "kv_len": problem.kv_len,
            "padded_rows": problem.padded_rows,
            "padded_keys": problem.padded_keys,
            "num_heads": problem.num_qo_heads,
            "num_kv_heads": problem.num_kv_heads,
        }
        for name, tensor, tokens, padded in (
            ("q", inputs.q, problem.query_len, problem.padded_rows),
            ("k", inputs.k, problem.kv_len, problem.padded_keys),
        ):
            values[f"of_{name}"] = {
                "codes": tensor.codes,
                "scales": tensor.scales.view(torch.uint8),
                "values": scratch[name],
                "values_t": scratch[f"{name}_t"],
                "num_rows": tokens,
                "padded_rows": padded,
            }
            values[f"{name}_tensor_scale"] = tensor.tensor_scale
            values[f"{name}_scales"] = tensor.scales.view(torch.uint8)
            if self.config.is_native:
                values |= {name: tensor.codes, f"{name}_scales": tensor.scales}
        return values


def _make_scratch(
    config: Fp4AttentionBwdTritonConfig, device: torch.device
) -> dict[str, torch.Tensor]:
    """What the prepared operands are written to; bf16 values where scores are not native."""
    problem = config.problem
    heads, kv_heads = (
        problem.batch * problem.num_qo_heads,
        problem.batch * problem.num_kv_heads,
    )
    rows, keys, dim = problem.padded_rows, problem.padded_keys, problem.head_dim
    wide = 0 if config.is_native else dim

    def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return {
        "q": make(heads, rows, wide, dtype=torch.bfloat16),
        "k": make(kv_heads, keys, wide, dtype=torch.bfloat16),
        "q_t": make(heads, dim, rows, dtype=torch.float8_e4m3fn),
        "k_t": make(kv_heads, dim, keys, dtype=torch.float8_e4m3fn),
        "v": make(kv_heads, keys, dim, dtype=torch.float8_e4m3fn),
        "do": make(heads, rows, dim, dtype=torch.float8_e5m2),
        "do_t": make(heads, dim, rows, dtype=torch.float8_e5m2),
        "partial_amax": make(heads * config.amax_tiles, dtype=torch.int32),
        "do_power": make(kv_heads, dtype=torch.float32),
        "shift": make(heads, rows, dtype=torch.float32),
        "dot_rows": make(heads, rows, dtype=torch.float32),
    }


def _traits(inputs: Fp4AttentionBwdInputs, outputs: Fp4AttentionBwdOutputs) -> TensorTraits:
    tensors = {"out": inputs.out, "grad_out": inputs.grad_out}
    tensors |= {"dq": outputs.dq, "dk": outputs.dk, "dv": outputs.dv}
    return TensorTraits(frozenset(name for name, x in tensors.items() if _is_aligned(x)))


def _is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:3])


def _arch_of(device: torch.device) -> int:
    """Compute capability as compilers write it; 0 where Triton's interpreter runs."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
