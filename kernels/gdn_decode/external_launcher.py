"""Calls FLA and FlashInfer on the operation's inputs and writes the operation's outputs."""

from __future__ import annotations

from typing import Any

import torch

from ..external import Library, calling
from .problem import GdnDecodeProblem
from .reference import GdnDecodeInputs, GdnDecodeOutputs
from .triton_kernel_rows import move_rows_kernel

__all__ = ["FlaDecodeLauncher", "FlashInferDecodeLauncher", "move_rows"]

_BLOCK = 4096
"""Elements of a state that one program moves: 16 KiB in fp32."""


class FlaDecodeLauncher:
    """Calls FLA's fused recurrent kernel, which takes states in batch order."""

    def __init__(self, problem: GdnDecodeProblem, library: Library) -> None:
        self._problem = problem
        self._library = library

    def launch(self, inputs: GdnDecodeInputs, outputs: GdnDecodeOutputs) -> None:
        """Gathers the states, calls FLA, scatters them.

        Raises:
            RuntimeError: FLA raised something.
        """
        with torch.no_grad():
            state, slots = inputs.state, inputs.slots
            if state is not None and slots is not None:
                rows = state.new_empty((slots.numel(), *state.shape[1:]))
                move_rows(state, rows, slots, is_gather=True)
                state = rows
            out, final = calling(self._library, self._call, inputs, outputs, state)
            outputs.out.copy_(out)
            if slots is not None:
                outputs.out.masked_fill_((slots < 0).view(-1, 1, 1, 1), 0.0)
            if outputs.state is None:
                return
            if slots is not None:
                move_rows(outputs.state, final, slots, is_gather=False)
            else:
                outputs.state[: final.shape[0]].copy_(final)

    def _call(
        self, inputs: GdnDecodeInputs, outputs: GdnDecodeOutputs, state: torch.Tensor | None
    ) -> Any:
        """FLA's forward below autograd."""
        from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd

        tensors = (inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta)
        q, k, v, gate, beta = (x.contiguous() for x in tensors)
        return fused_recurrent_gated_delta_rule_fwd(
            q=q,
            k=k,
            v=v,
            g=gate,
            beta=beta,
            A_log=inputs.a_log,
            dt_bias=inputs.dt_bias,
            scale=inputs.scale,
            initial_state=state,
            output_final_state=outputs.state is not None,
            use_qk_l2norm_in_kernel=self._problem.use_qk_l2norm,
            use_beta_sigmoid_in_kernel=inputs.has_beta_sigmoid,
            allow_neg_eigval=inputs.beta_scale == 2.0,
            state_v_first=self._problem.state_layout == "VK",
            cu_seqlens=inputs.cu_seqlens,
        )


class FlashInferDecodeLauncher:
    """Calls FlashInfer's decode of one token over a pool of states, in place."""

    def __init__(self, problem: GdnDecodeProblem, library: Library) -> None:
        self._problem = problem
        self._library = library

    def launch(self, inputs: GdnDecodeInputs, outputs: GdnDecodeOutputs) -> None:
        """Calls FlashInfer; where the state to write is not the one to read, it is copied before.

        Raises:
            RuntimeError: FlashInfer raised something.
        """
        with torch.no_grad():
            assert inputs.state is not None
            assert outputs.state is not None
            if outputs.state.data_ptr() != inputs.state.data_ptr():
                outputs.state.copy_(inputs.state)
            calling(self._library, self._call, inputs, outputs)

    def _call(self, inputs: GdnDecodeInputs, outputs: GdnDecodeOutputs) -> None:
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

        has_slots = inputs.slots is not None
        gated_delta_rule_decode_pretranspose(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            state=None if has_slots else outputs.state,
            A_log=inputs.a_log,
            a=inputs.gate,
            dt_bias=inputs.dt_bias,
            b=inputs.beta,
            scale=inputs.scale,
            output=outputs.out,
            use_qk_l2norm=self._problem.use_qk_l2norm,
            initial_state=outputs.state if has_slots else None,
            initial_state_indices=inputs.slots,
        )


def move_rows(
    pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, is_gather: bool
) -> None:
    """Gathers ``rows[i] = pool[slots[i]]``, or scatters them; negative slots are skipped."""
    num_elements = pool[0].numel()
    grid = (slots.numel(), -(-num_elements // _BLOCK))
    move_rows_kernel[grid](pool, rows, slots, num_elements, IS_GATHER=is_gather, BLOCK=_BLOCK)
