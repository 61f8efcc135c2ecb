"""Host side of the merge of attention states: specialised kernels, grids, launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..triton_spec import TritonKernelSpec

__all__ = ["AttentionStates", "MergeLauncher", "merge_spec"]

_MODULE = f"{__package__}.triton_kernel"
_TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NUM_WARPS = 4
_BLOCK_ELEMENTS = 1024
"""Of one program: 8 values a thread, one 16-byte load at 16 bits a value."""
_STATE = ("t", "h")
_STATES = ("t", "s", "h")


@dataclass(frozen=True)
class AttentionStates:
    """What is merged.

    Either two states, ``outs`` ``[tokens, heads, head_dim]`` and ``lses`` ``[tokens, heads]`` each,
    or one tensor of each that holds all states: ``[tokens, states, heads, head_dim]`` and
    ``[tokens, states, heads]``. Values are contiguous in the last dimension, LSEs are fp32.
    """

    outs: tuple[torch.Tensor, ...]
    lses: tuple[torch.Tensor, ...]
    lse_base: Literal["2", "e"] = "2"

    @property
    def is_pair(self) -> bool:
        """Whether there are two states in two places."""
        return len(self.outs) == 2


def merge_spec(
    *, is_pair: bool, dtype: torch.dtype, head_dim: int, aligned: Sequence[str] = ()
) -> TritonKernelSpec:
    """The kernel for these values.

    Args:
        is_pair: Two states in two places, or any number in one tensor.
        dtype: Of the values and the merged output.
        head_dim: Any size; a tile is padded to a power of two.
        aligned: Arguments that are multiples of 16 (pointers: bytes).
    """
    element = f"*{_TRITON_TYPES[dtype]}"
    if is_pair:
        pointers = {"out_a": element, "lse_a": "*fp32", "out_b": element, "lse_b": "*fp32"}
        operands: list[tuple[str, tuple[str, ...]]]
        operands = [("a", _STATE), ("b", _STATE), ("out", _STATE)]
        operands += [("lse_a", _STATE), ("lse_b", _STATE), ("lse", _STATE)]
    else:
        pointers = {"outs": element, "lses": "*fp32"}
        operands = [("outs", _STATES), ("lses", _STATES), ("out", _STATE), ("lse", _STATE)]
    strides = [f"{name}_stride_{axis}" for name, axes in operands for axis in axes]
    sizes = ("num_rows", "num_heads") if is_pair else ("num_rows", "num_heads", "num_states")
    block_d = 1 << (head_dim - 1).bit_length()
    return TritonKernelSpec(
        module=_MODULE,
        name="merge_state_kernel" if is_pair else "merge_states_kernel",
        signature={
            **pointers,
            **{"out": element, "lse": "*fp32", "to_base_2": "fp32"},
            **dict.fromkeys(strides, "i64"),
            **dict.fromkeys(sizes, "i32"),
        },
        constexprs={"HEAD_DIM": head_dim, "BLOCK_R": max(1, _BLOCK_ELEMENTS // block_d)},
        aligned=frozenset(aligned),
        num_warps=_NUM_WARPS,
        num_stages=2,
    )


class MergeLauncher:
    """The kernel for states of one dtype, head_dim and alignment; it needs no scratch memory."""

    def __init__(self, states: AttentionStates, out: torch.Tensor) -> None:
        values = (*states.outs, out)
        names = ("out_a", "out_b", "out") if states.is_pair else ("outs", "out")
        aligned = [n for n, t in zip(names, values, strict=True) if t.data_ptr() % 16 == 0]
        strides = ("a", "b", "out") if states.is_pair else names
        for name, tensor in zip(strides, values, strict=True):
            axes = _STATE if tensor.dim() == 3 else _STATES
            pairs = zip(axes, tensor.stride(), strict=False)
            aligned += [f"{name}_stride_{axis}" for axis, stride in pairs if stride % 16 == 0]
        spec = merge_spec(
            is_pair=states.is_pair, dtype=out.dtype, head_dim=out.shape[-1], aligned=aligned
        )
        self._block_r = spec.constexprs["BLOCK_R"]
        self._kernel = spec.bind(_arch_of(out.device))

    def launch(self, states: AttentionStates, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Enqueues the merge of ``states`` into ``outputs`` (out, lse)."""
        out, lse = outputs
        to_base_2 = 1.0 if states.lse_base == "2" else math.log2(math.e)
        num_rows, num_heads = out.shape[0] * out.shape[1], out.shape[1]
        grid = (-(-num_rows // self._block_r), 1, 1)
        if states.is_pair:
            (out_a, out_b), (lse_a, lse_b) = states.outs, states.lses
            tensors: tuple[torch.Tensor, ...] = (out_a, lse_a, out_b, lse_b, out, lse)
            strided = (out_a, out_b, out)
            strides = [*_strides(*strided, dims=2), *_strides(lse_a, lse_b, lse, dims=2)]
            sizes: tuple[int, ...] = (num_rows, num_heads)
        else:
            (outs,), (lses,) = states.outs, states.lses
            tensors = (outs, lses, out, lse)
            strides = [*_strides(outs, lses, dims=3), *_strides(out, lse, dims=2)]
            sizes = (num_rows, num_heads, outs.shape[1])
        self._kernel(grid, *tensors, to_base_2, *strides, *sizes)


def _strides(*tensors: torch.Tensor, dims: int) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:dims]]


def _arch_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0  # the interpreter: nothing is compiled
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)
