"""Launches of FLA, FlashQLA and FlashInfer as their own users call them, for ``gdn.py``.

What a library wants in another form than our operations have (a linear decay, states as [V, K] or
in batch order, 64-bit bounds) is made beforehand and is not timed. Two forms take states as the row
has them: ``flashinfer_kv`` of prefill transposes [K, V] at every call, and ``flashinfer_pool`` of
decode finds states in a pool by slot index. Each verifies its first launch against the reference of
the operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from side_by_side import Baseline, Cell, LeftOutError
from tilescout.kernels.external import FLA, FLASH_QLA, FLASHINFER, Library
from tilescout.kernels.gdn_decode import GdnDecodeInputs
from tilescout.kernels.registry import operation
from tilescout.tuner.timers import Call

__all__ = ["CHUNK_LIBRARIES", "DECODE_LIBRARIES", "LIBRARIES", "in_batch_order", "usable"]

RMS_BOUND = 2.0e-2
"""Relative RMS error that FlashQLA's own tests allow; ours is tighter."""

LIBRARIES: dict[str, Library] = {
    "fla": FLA,
    "flash_qla": FLASH_QLA,
    "flashinfer": FLASHINFER,
    "flashinfer_kv": FLASHINFER,
    "flashinfer_pool": FLASHINFER,
}

Forward = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""(output, state after it or None) of one launch; the state as the problem has it."""


def usable(
    baselines: dict[str, Baseline], names: Sequence[str]
) -> tuple[dict[str, Baseline], dict[str, str]]:
    """The baselines of these libraries that can be imported here, and why others cannot."""
    found: dict[str, Baseline] = {}
    missing: dict[str, str] = {}
    for name, baseline in baselines.items():
        if name.removesuffix("_kv").removesuffix("_pool") not in names:
            continue
        reason = LIBRARIES[name].missing
        if reason is None:
            found[name] = baseline
        else:
            missing[name] = reason
    return found, missing


def _fla_chunk(cell: Cell) -> list[Forward]:
    """FLA's own Triton kernels, also where FlashQLA is installed, which it would hand over to."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    # Plans are kept by the identity of the bounds, which are equal in all copies.
    bounds = cell.inputs[0].cu_seqlens.long()

    def forward(i: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = chunk_gated_delta_rule_fwd(
            *(i.q, i.k, i.v, i.gate, i.beta, i.scale, i.initial_state, True),
            state_v_first=cell.problem.state_layout == "VK",
            cu_seqlens=bounds,
        )
        return found[1], found[3]

    return [partial(forward, i) for i in cell.inputs]


def _flash_qla_chunk(cell: Cell) -> list[Forward]:
    """FlashQLA's forward, with its own choice of context parallelism."""
    from flash_qla import chunk_gated_delta_rule_fwd

    bounds = cell.inputs[0].cu_seqlens.int()

    def forward(i: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = chunk_gated_delta_rule_fwd(
            *(i.q, i.k, i.v, i.gate, i.beta),
            scale=i.scale,
            initial_state=i.initial_state,
            cu_seqlens=bounds,
            output_final_state=True,
            output_h=False,
            state_v_first=cell.problem.state_layout == "VK",
        )
        return found[2], found[4]

    return [partial(forward, i) for i in cell.inputs]


def _flashinfer_chunk(cell: Cell, *, transposes: bool = False) -> list[Forward]:
    """FlashInfer's prefill: the decay itself instead of its logarithm, states as [V, K].

    States of [K, V] rows are transposed beforehand, or with ``transposes`` in the timed call.
    """
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    bounds = cell.inputs[0].cu_seqlens.long()
    is_transposed = cell.problem.state_layout == "KV"
    if transposes and not is_transposed:
        raise LeftOutError("states are [V, K] here, which its kernel takes as they are")

    def prepare(i: Any) -> Forward:
        q, k, v, beta = (x[0] for x in (i.q, i.k, i.v, i.beta))
        decay, before = i.gate[0].exp(), i.initial_state
        if is_transposed:
            before = before.transpose(-1, -2).contiguous()
        out, after = torch.empty_like(v), torch.empty_like(before)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            if transposes:
                before.copy_(i.initial_state.transpose(-1, -2))
            chunk_gated_delta_rule(
                q=q,
                k=k,
                v=v,
                g=decay,
                beta=beta,
                scale=i.scale,
                initial_state=before,
                cu_seqlens=bounds,
                output_final_state=True,
                output=out,
                output_state=after,
            )
            final = after.transpose(-1, -2) if is_transposed else after
            return out, final.contiguous() if transposes else final

        return forward

    return [prepare(i) for i in cell.inputs]


def in_batch_order(inputs: GdnDecodeInputs) -> GdnDecodeInputs:
    """The inputs with the state of sequence i in row i, and no slots."""
    if inputs.slots is None:
        return inputs
    assert inputs.state is not None
    return replace(inputs, state=inputs.state[inputs.slots.long()], slots=None)


def _states(cell: Cell, layout: str) -> list[torch.Tensor]:
    """The states of each copy in batch order and in this layout, in memory of their own."""
    found = []
    for i in map(in_batch_order, cell.inputs):
        state = i.state
        assert state is not None
        if layout != cell.problem.state_layout:
            state = state.transpose(-1, -2)
        found.append(state.clone(memory_format=torch.contiguous_format))
    return found


def _fla_decode(cell: Cell) -> list[Forward]:
    """FLA's fused recurrent kernel: states in batch order, the new ones in new memory."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def forward(i: Any, state: torch.Tensor) -> tuple[torch.Tensor, None]:
        out, _ = fused_recurrent_gated_delta_rule(
            *(i.q, i.k, i.v),
            g=i.gate,
            beta=i.beta,
            scale=i.scale,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=i.a_log,
            dt_bias=i.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=cell.problem.state_layout == "VK",
        )
        return out, None

    states = _states(cell, cell.problem.state_layout)
    return [partial(forward, i, s) for i, s in zip(cell.inputs, states, strict=True)]


def _flashinfer_decode(layout: str, cell: Cell) -> list[Forward]:
    """FlashInfer's kernel for states of one layout, in batch order, updated in place."""
    from flashinfer import gdn_decode

    function = (
        gdn_decode.gated_delta_rule_decode_pretranspose
        if layout == "VK"
        else gdn_decode.gated_delta_rule_decode
    )

    def forward(i: Any, state: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, None]:
        function(
            *(i.q, i.k, i.v, state, i.a_log, i.gate, i.dt_bias, i.beta),
            scale=i.scale,
            output=out,
            use_qk_l2norm=True,
        )
        return out, None

    states = _states(cell, layout)
    pairs = zip(cell.inputs, states, strict=True)
    return [partial(forward, i, s, torch.empty_like(i.v)) for i, s in pairs]


def _flashinfer_decode_pool(cell: Cell) -> list[Forward]:
    """FlashInfer's kernel over the pool of [V, K] states that the operation has, in place."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    if cell.problem.state_layout != "VK":
        raise LeftOutError("its pool has states as [V, K]")
    if any(i.slots is None for i in cell.inputs):
        raise LeftOutError("states are in batch order here")

    def forward(i: Any, pool: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, None]:
        gated_delta_rule_decode_pretranspose(
            *(i.q, i.k, i.v, None, i.a_log, i.gate, i.dt_bias, i.beta),
            scale=i.scale,
            output=out,
            use_qk_l2norm=True,
            initial_state=pool,
            initial_state_indices=i.slots,
        )
        return out, None

    return [partial(forward, i, i.state.clone(), torch.empty_like(i.v)) for i in cell.inputs]


def _calls(make: Callable[[Cell], list[Forward]], cell: Cell) -> list[Call]:
    """Launches of a library, one a copy, verified on the first."""
    with torch.no_grad():
        forwards = make(cell)
        # Each once outside any capture: they compile, tune and read bounds on the host.
        results = [forward() for forward in forwards]
    verified = cell.outputs[0]
    out, state = results[0]
    outputs = type(verified)(
        out.reshape(verified.out.shape), None if state is None else state.float().contiguous()
    )
    comparison = operation(cell.problem.op).compare(cell.problem, cell.inputs[0], outputs)
    rms = comparison.relative_rms_error
    if not comparison.is_ok and not (math.isfinite(rms) and rms <= RMS_BOUND):
        raise LeftOutError(f"wrong: {comparison.reason}")
    return [partial(_discard, forward) for forward in forwards]


def _discard(forward: Forward) -> None:
    with torch.no_grad():
        forward()


CHUNK_LIBRARIES: dict[str, Baseline] = {
    "fla": partial(_calls, _fla_chunk),
    "flash_qla": partial(_calls, _flash_qla_chunk),
    "flashinfer": partial(_calls, _flashinfer_chunk),
    "flashinfer_kv": partial(_calls, partial(_flashinfer_chunk, transposes=True)),
}
DECODE_LIBRARIES: dict[str, Baseline] = {
    "fla": partial(_calls, _fla_decode),
    "flashinfer": partial(_calls, partial(_flashinfer_decode, "VK")),
    "flashinfer_kv": partial(_calls, partial(_flashinfer_decode, "KV")),
    "flashinfer_pool": partial(_calls, _flashinfer_decode_pool),
}
