"""Launches the Triton kernels of the chunked forward: scratch memory, grids, arguments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...errors import UsageError
from ..triton_spec import BoundTritonKernel, TritonKernelSpec
from .inputs import GdnChunkInputs, GdnChunkOutputs
from .triton_config import (
    GATE,
    INTRA,
    NORM,
    OUTPUT,
    STITCH,
    TRANSITION,
    GdnChunkTritonConfig,
)
from .triton_specs import TRITON_TYPES, TensorTraits, part_spec

__all__ = ["GdnChunkTritonLauncher"]

_INDEX_TYPES = {"int32": "i32", "int64": "i64"}
_MAX_BOUND = 512
"""Kernels that stay loaded: every launcher of equal static shapes shares them."""


@lru_cache(maxsize=_MAX_BOUND)
def _bound(spec: TritonKernelSpec, arch: int, device_index: int | None) -> BoundTritonKernel:
    del device_index  # code is loaded into the context of one device
    return spec.bind(arch)


class GdnChunkTritonLauncher:
    """Compiled kernels and scratch memory for up to so many tokens and sequences.

    Serves every call whose static shapes are the problem's and which is not larger; one stream at a
    time.
    """

    def __init__(
        self, config: GdnChunkTritonConfig, inputs: GdnChunkInputs, tokens: int, sequences: int
    ) -> None:
        self.config = config
        self.max_tokens, self.max_sequences = tokens, sequences
        self.device = inputs.q.device
        self.arch = _arch_of(self.device)
        self._scratch = _make_scratch(config, inputs.q, tokens, sequences)
        self._kernels: dict[
            tuple[str, TensorTraits], tuple[BoundTritonKernel, tuple[str, ...]]
        ] = {}
        traits = _traits(inputs, inputs.v, has_final_state=config.problem.has_final_state)
        for part in config.parts:
            self._kernel(part, traits)

    def _kernel(self, part: str, traits: TensorTraits) -> tuple[BoundTritonKernel, tuple[str, ...]]:
        """The kernel for these tensors, compiled at first use, and its arguments in order."""
        found = self._kernels.get((part, traits))
        if found is None:
            spec = part_spec(self.config, part, traits)
            found = _bound(spec, self.arch, self.device.index), tuple(spec.signature)
            self._kernels[part, traits] = found
        return found

    def launch(self, inputs: GdnChunkInputs, outputs: GdnChunkOutputs) -> None:
        """Enqueues the kernels of all parts."""
        call = self._call(inputs, outputs)
        for part in self.config.parts:
            self._launch_part(part, *call)

    def launch_part(self, part: str, inputs: GdnChunkInputs, outputs: GdnChunkOutputs) -> None:
        """Enqueues the kernels of one part, on what the parts before it left."""
        self._launch_part(part, *self._call(inputs, outputs))

    def _launch_part(self, part: str, traits: TensorTraits, values: dict[str, Any]) -> None:
        kernel, names = self._kernel(part, traits)
        if part == NORM:
            for name in ("q", "k"):
                values |= {
                    "x": values[f"given_{name}"],
                    "normalised": self._scratch[name],
                    "stride_t": values[f"given_{name}"].stride(1),
                    "stride_h": values[f"given_{name}"].stride(2),
                }
                kernel(self._grid(part, values), *(values[n] for n in names))
            return
        kernel(self._grid(part, values), *(values[name] for name in names))

    def _grid(self, part: str, values: dict[str, Any]) -> tuple[int, int, int]:
        config, problem = self.config, self.config.problem
        tokens, sequences = values["num_tokens"], values["num_sequences"]
        heads = problem.num_v_heads
        chunks = config.max_chunks(tokens, sequences)
        if part == GATE:
            # One more: the rows behind the last sequence may start in the middle of a chunk.
            return (chunks + 1, -(-heads // config.number("gate_block_h")), 1)
        if part == NORM:
            return (-(-values["num_rows"] // config.number("norm_block_r")), 1, 1)
        if part == INTRA:
            # Blocks of 16 rows: programs of their own write the scores, a head of q each.
            is_apart = config.has_intra_blocks and config.has_scores
            return (chunks * (heads + (problem.num_heads if is_apart else 0)), 1, 1)
        v_blocks = -(-problem.head_dim_v // config.number(f"{part}_block_v"))
        if part == OUTPUT:
            return (chunks * heads * v_blocks, 1, 1)
        if part == STITCH:
            return (sequences * heads * v_blocks, 1, 1)
        if part == TRANSITION:
            v_blocks += -(-problem.head_dim_k // config.number("transition_block_v"))
        return (config.max_segments(tokens, sequences) * heads * v_blocks, 1, 1)

    def _call(
        self, inputs: GdnChunkInputs, outputs: GdnChunkOutputs
    ) -> tuple[TensorTraits, dict[str, Any]]:
        """What of the tensors the kernels are compiled for, and all run-time arguments by name."""
        tokens, sequences = inputs.num_tokens, inputs.num_sequences
        if tokens > self.max_tokens or sequences > self.max_sequences:
            raise UsageError(
                f"num_tokens={tokens}, num_sequences={sequences}: this launcher of gdn_chunk_fwd "
                f"was built for up to {self.max_tokens} and {self.max_sequences}; build another"
            )
        has_final_state = outputs.final_state is not None
        traits = _traits(inputs, outputs.out, has_final_state=has_final_state)
        # A pointer that the kernel was compiled not to read.
        unused = self._scratch["total_decay"]
        q, k = self._scratch.get("q", inputs.q), self._scratch.get("k", inputs.k)
        values: dict[str, Any] = {
            **self._scratch,
            "gate": inputs.gate,
            "beta": inputs.beta,
            "a_log": _or(inputs.a_log, unused),
            "dt_bias": _or(inputs.dt_bias, unused),
            "cu_seqlens": _or(inputs.cu_seqlens, self._scratch["table"]),
            "initial_state": _or(inputs.initial_state, unused),
            "final_state": _or(outputs.final_state, unused),
            "given_q": inputs.q,
            "given_k": inputs.k,
            "q": q,
            "k": k,
            "v": inputs.v,
            "out": outputs.out,
            "scale": inputs.scale,
            "num_tokens": tokens,
            "num_sequences": sequences,
            "tokens_each": inputs.q.shape[1],
            "num_rows": tokens * self.config.problem.num_heads,
            "num_heads": self.config.problem.num_heads,
            "num_v_heads": self.config.problem.num_v_heads,
            "scratch_tokens": self._scratch["total_decay"].shape[1],
        }
        for name in ("q", "k", "v", "out"):
            values[f"{name}_stride_t"] = values[name].stride(1)
            values[f"{name}_stride_h"] = values[name].stride(2)
        return traits, values


def _make_scratch(
    config: GdnChunkTritonConfig, q: torch.Tensor, tokens: int, sequences: int
) -> dict[str, torch.Tensor]:
    """What goes from part to part; tensors that this algorithm has no use for are empty."""
    problem, chunk = config.problem, config.chunk
    heads, dim_k, dim_v = problem.num_v_heads, problem.head_dim_k, problem.head_dim_v
    rows = -(-tokens // 16) * 16
    chunks = config.max_chunks(tokens, sequences)
    is_wy, is_separate = config.form == "wy", config.algorithm == "separate"
    segments = config.max_segments(tokens, sequences) if config.segment else 0
    wide = dim_k * dim_v

    def make(*shape: int, dtype: torch.dtype = q.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    scratch = {
        "table": make(2 * (chunks + 1), dtype=torch.int32),
        "total_decay": make(heads, rows, dtype=torch.float32),
        "beta_rows": make(heads, rows, dtype=torch.float32),
        "w": make(heads, rows if is_wy else 0, dim_k),
        "u": make(heads, rows if is_wy else 0, dim_v),
        "inverse": make(heads, 0 if is_wy else rows, chunk),
        "scores": make(heads, rows if config.has_scores else 0, chunk),
        "chunk_state": make(chunks if is_separate else 0, heads, wide),
        "errors": make(heads, rows if is_separate else 0, dim_v),
        "segment_state": make(segments, heads, wide + dim_k * dim_k, dtype=torch.float32),
        "entry_state": make(segments, heads, wide, dtype=torch.float32),
    }
    if problem.use_qk_l2norm:
        scratch |= {name: make(1, rows, problem.num_heads, dim_k) for name in ("q", "k")}
    return scratch


def _or(tensor: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    return unused if tensor is None else tensor


def _traits(inputs: GdnChunkInputs, out: torch.Tensor, *, has_final_state: bool) -> TensorTraits:
    cu_seqlens = inputs.cu_seqlens
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out}
    return TensorTraits(
        gate_type=TRITON_TYPES[_name(inputs.gate)],
        beta_type=TRITON_TYPES[_name(inputs.beta)],
        seqlen_type="i32" if cu_seqlens is None else _INDEX_TYPES[_name(cu_seqlens)],
        is_varlen=cu_seqlens is not None,
        has_initial_state=inputs.initial_state is not None,
        has_final_state=has_final_state,
        has_beta_sigmoid=inputs.has_beta_sigmoid,
        beta_scale=inputs.beta_scale,
        aligned=frozenset(name for name, x in tensors.items() if _is_aligned(x)),
    )


def _is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[1:3])


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _arch_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0  # the interpreter: nothing is compiled
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)
