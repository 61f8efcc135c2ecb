"""Calls of FLA and FlashQLA that autograd records: their own functions, with their own backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)

from ..external import Library, calling
from .external_bounds import bounds_of, on_device
from .external_launcher import PackedCall, beta_of, pack_inputs, with_tokens
from .inputs import GdnChunkInputs
from .problem import GdnChunkProblem

__all__ = ["differentiable"]

Result = tuple[torch.Tensor, torch.Tensor | None]


def differentiable(
    problem: GdnChunkProblem,
    inputs: GdnChunkInputs,
    name: str,
    library: Library,
    *,
    wants_state: bool,
) -> Result:
    """(output like v, states after the sequences or None), both part of autograd's graph.

    Raises:
        RuntimeError: the library raised something.
    """
    bounds = bounds_of(inputs)
    call = PackedCall(problem, pack_inputs(inputs, bounds), bounds, inputs.v, wants_state)
    out, final_state = calling(library, _CALLS[name], call)
    num_spare = inputs.num_tokens - bounds.end
    out = F.pad(out, (0, 0, 0, 0, 0, num_spare)).view(inputs.v.shape)
    if final_state is None or bounds.with_tokens is None:
        return out, final_state
    # A sequence without tokens leaves its state as it is.
    kept = inputs.initial_state
    if kept is None:
        kept = final_state.new_zeros((inputs.num_sequences, *final_state.shape[1:]))
    return out, kept.index_copy(0, with_tokens(bounds, final_state.device), final_state)


def _fla(call: PackedCall) -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    problem, i = call.problem, call.inputs
    return chunk_gated_delta_rule(
        *(i.q, i.k, i.v, i.gate, i.beta),
        scale=i.scale,
        initial_state=i.initial_state,
        output_final_state=call.wants_state,
        use_qk_l2norm_in_kernel=problem.use_qk_l2norm,
        use_beta_sigmoid_in_kernel=i.has_beta_sigmoid,
        allow_neg_eigval=i.beta_scale == 2.0,
        state_v_first=problem.state_layout == "VK",
        cu_seqlens=call.bounds_as(torch.int64),
        cu_seqlens_cpu=on_device(call.bounds.values, torch.int64, torch.device("cpu")),
        use_gate_in_kernel=problem.gate == "fused",
        A_log=i.a_log,
        dt_bias=i.dt_bias,
    )


def _flash_qla(call: PackedCall) -> Any:
    from flash_qla import chunk_gated_delta_rule

    i = call.inputs
    return chunk_gated_delta_rule(
        *(i.q, i.k, i.v, i.gate, beta_of(i)),
        scale=i.scale,
        initial_state=i.initial_state,
        output_final_state=call.wants_state,
        cu_seqlens=call.bounds_as(torch.int32),
        state_v_first=call.problem.state_layout == "VK",
    )


_CALLS: dict[str, Callable[[PackedCall], Any]] = {"fla": _fla, "flash_qla": _flash_qla}
