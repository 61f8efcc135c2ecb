"""Calls FLA, FlashQLA and FlashInfer on the operation's inputs and gives their results over.

A library that allocates what it returns hands its tensors over without a copy. What it wants in
another form (a linear decay, states as [V, K]) is made at every call and is part of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..external import Library, calling
from .external_bounds import Bounds, bounds_of, chunk_numbers, on_device
from .inputs import GdnChunkInputs, GdnChunkOutputs
from .problem import GdnChunkProblem

__all__ = ["GdnChunkExternalLauncher", "PackedCall", "beta_of", "pack_inputs", "with_tokens"]

_FLA_CHUNK = 64

Result = tuple[torch.Tensor, torch.Tensor | None]
"""(output ``[1, tokens, HV, V]``, states after the sequences or None)."""


@dataclass(frozen=True)
class PackedCall:
    """One call as libraries take it: batch 1, rows of sequences alone, no empty sequence."""

    problem: GdnChunkProblem
    inputs: GdnChunkInputs
    bounds: Bounds
    out: torch.Tensor
    """Where the output belongs, for a library that writes where it is told."""
    wants_state: bool

    def bounds_as(self, dtype: torch.dtype) -> torch.Tensor:
        """The bounds on the device."""
        return on_device(self.bounds.values, dtype, self.inputs.q.device)


class GdnChunkExternalLauncher:
    """Calls one library; holds no memory."""

    def __init__(self, problem: GdnChunkProblem, name: str, library: Library) -> None:
        self._problem = problem
        self._library = library
        self._call: Callable[[PackedCall], Result] = _CALLS[name]

    def launch(self, inputs: GdnChunkInputs, outputs: GdnChunkOutputs) -> None:
        """Calls the library on the current stream; it compiles and allocates as it pleases.

        ``outputs`` may take over memory that the library allocated: they must be of no one who
        knows them by address, as a captured launch of another config does.

        Raises:
            RuntimeError: the library raised something.
        """
        with torch.no_grad():
            self._launch(inputs, outputs)

    def _launch(self, inputs: GdnChunkInputs, outputs: GdnChunkOutputs) -> None:
        bounds = bounds_of(inputs)
        wants_state = outputs.final_state is not None
        rows = outputs.out.flatten(0, 1)
        if bounds.end < rows.shape[0]:
            rows[bounds.end :].zero_()
        if bounds.with_tokens is not None:
            _keep_states(inputs, outputs)
        if not bounds.end:
            return
        packed = PackedCall(
            self._problem,
            pack_inputs(inputs, bounds),
            bounds,
            rows[: bounds.end].unsqueeze(0),
            wants_state,
        )
        out, final_state = calling(self._library, self._call, packed)
        _give_rows(out, outputs.out, bounds.end)
        if outputs.final_state is not None:
            _give_states(final_state, outputs.final_state, bounds)


def pack_inputs(inputs: GdnChunkInputs, bounds: Bounds) -> GdnChunkInputs:
    """The inputs of the sequences that have tokens, in batch 1."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)[: bounds.end].unsqueeze(0).contiguous()

    state = inputs.initial_state
    if state is not None and bounds.with_tokens is not None:
        state = state.index_select(0, with_tokens(bounds, state.device))
    return replace(
        inputs,
        q=rows(inputs.q),
        k=rows(inputs.k),
        v=rows(inputs.v),
        gate=rows(inputs.gate),
        beta=rows(inputs.beta),
        initial_state=state,
    )


def with_tokens(bounds: Bounds, device: torch.device) -> torch.Tensor:
    """Numbers of the sequences that have tokens, where not all have."""
    assert bounds.with_tokens is not None
    return on_device(bounds.with_tokens, torch.int64, device)


def _keep_states(inputs: GdnChunkInputs, outputs: GdnChunkOutputs) -> None:
    """A sequence without tokens leaves its state as it is."""
    if outputs.final_state is None:
        return
    if inputs.initial_state is None:
        outputs.final_state.zero_()
    else:
        outputs.final_state.copy_(inputs.initial_state)


def _give_rows(out: torch.Tensor, target: torch.Tensor, end: int) -> None:
    if out.data_ptr() == target.data_ptr():
        return
    if out.numel() == target.numel() and out.dtype == target.dtype:
        _take_over(target, out.view(target.shape))
    else:
        target.flatten(0, 1)[:end].copy_(out[0])


def _give_states(state: torch.Tensor | None, target: torch.Tensor, bounds: Bounds) -> None:
    assert state is not None, "the library returned no final state"
    if bounds.with_tokens is not None:
        target.index_copy_(0, with_tokens(bounds, target.device), state.to(target.dtype))
    elif state.is_contiguous() and state.dtype == target.dtype:
        _take_over(target, state)
    else:
        target.copy_(state)


def _take_over(target: torch.Tensor, found: torch.Tensor) -> None:
    """Makes ``target`` the library's tensor: a copy of a long output costs tens of microseconds."""
    target.set_(found.untyped_storage(), found.storage_offset(), found.size(), found.stride())


def _fla(call: PackedCall) -> Result:
    """FLA's forward below autograd and below its choice of other libraries."""
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.common.gate import fused_beta_sigmoid
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    problem, i = call.problem, call.inputs
    q, k, beta = i.q, i.k, i.beta
    if problem.use_qk_l2norm:
        q, k = (l2norm_fwd(x)[0] for x in (q, k))
    if i.has_beta_sigmoid:
        beta = fused_beta_sigmoid(beta, scale=i.beta_scale)
    found = chunk_gated_delta_rule_fwd(
        q=q,
        k=k,
        v=i.v,
        g=i.gate,
        beta=beta,
        scale=i.scale,
        initial_state=i.initial_state,
        output_final_state=call.wants_state,
        state_v_first=problem.state_layout == "VK",
        cu_seqlens=call.bounds_as(torch.int64),
        chunk_indices=chunk_numbers(call.bounds.values, _FLA_CHUNK, q.device),
        use_gate_in_kernel=problem.gate == "fused",
        A_log=i.a_log,
        dt_bias=i.dt_bias,
        chunk_size=_FLA_CHUNK,
    )
    return found[1], found[3]


def _flash_qla(call: PackedCall) -> Result:
    from flash_qla import chunk_gated_delta_rule_fwd

    i = call.inputs
    found = chunk_gated_delta_rule_fwd(
        *(i.q, i.k, i.v, i.gate, beta_of(i)),
        scale=i.scale,
        initial_state=i.initial_state,
        cu_seqlens=call.bounds_as(torch.int32),
        output_final_state=call.wants_state,
        output_h=False,
        state_v_first=call.problem.state_layout == "VK",
    )
    return found[2], found[4]


def _flashinfer(call: PackedCall) -> Result:
    """FlashInfer's prefill: the decay itself instead of its logarithm, states as [V, K]."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    problem, i = call.problem, call.inputs
    is_transposed = problem.state_layout == "KV"
    before = i.initial_state
    if before is not None and is_transposed:
        before = before.transpose(-1, -2).contiguous()
    dims = (problem.num_v_heads, problem.head_dim_v, problem.head_dim_k)
    after = i.q.new_empty((len(call.bounds.values) - 1, *dims), dtype=torch.float32)
    chunk_gated_delta_rule(
        q=i.q[0],
        k=i.k[0],
        v=i.v[0],
        g=i.gate[0].exp(),
        beta=beta_of(i)[0],
        scale=i.scale,
        initial_state=before,
        cu_seqlens=call.bounds_as(torch.int64),
        output_final_state=call.wants_state,
        output=call.out[0],
        output_state=after,
    )
    return call.out, after.transpose(-1, -2) if is_transposed else after


def beta_of(inputs: GdnChunkInputs) -> torch.Tensor:
    """Beta for a library that has no sigmoid of its own."""
    if not inputs.has_beta_sigmoid:
        return inputs.beta
    return inputs.beta_scale * inputs.beta.sigmoid()


_CALLS: dict[str, Callable[[PackedCall], Any]] = {
    "fla": _fla,
    "flash_qla": _flash_qla,
    "flashinfer": _flashinfer,
}
