"""Gated delta net with the signatures of flash-linear-attention, and decode over a state pool.

Checks the tensors, looks the config up, launches. The checks read shapes, never values, so that no
call waits for the device. Nothing here is differentiable. ``gdn_chunk`` owns the function over
whole sequences.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..errors import UsageError
from ..kernels.base import Launcher
from ..kernels.gdn_decode import GdnDecodeInputs, GdnDecodeOutputs, GdnDecodeProblem
from ..kernels.gdn_decode.problem import STATE_DTYPES, STATE_LAYOUTS
from ..kernels.registry import template
from ..tuner import dispatch
from ..tuner.dispatch import LookupResult, current_snapshot
from .checks import check_flags, check_index, check_shape, check_tensor, refuse_grad, wrong
from .gdn_checks import (
    check_options,
    check_tokens,
    gate_inputs,
    num_sequences,
    query_factor,
    refuse_arguments,
)
from .gdn_chunk import chunk_gated_delta_rule
from .gdn_external import is_served, refusing
from .gdn_library import DeltaRuleOperator, StepOperator
from .launched_call import LaunchedCall, Role
from .launchers import LauncherCache
from .library import is_traced
from .on_device import device_spec, dtype_name, on_device
from .prepared import PreparedCalls

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "gdn_decode"]

_launchers = LauncherCache()
_RECURRENT = "fused_recurrent_gated_delta_rule"
_TOKENS = {
    **{name: Role((f"inputs.{name}",)) for name in ("q", "k", "v", "beta")},
    "g": Role(("inputs.gate",)),
    "A_log": Role(("inputs.a_log",)),
    "dt_bias": Role(("inputs.dt_bias",)),
    "out": Role(("outputs.out",), is_output=True),
}
_MADE_BY_OPTIONS = frozenset(("inputs.gate", "inputs.beta", "inputs.dt_bias"))
"""Zeros or ones where they are not given."""
_step_calls = PreparedCalls(
    {
        **_TOKENS,
        "state": Role(("inputs.state", "outputs.state")),
        "slots": Role(("inputs.slots",)),
    }
)
_recurrent_calls = PreparedCalls(
    {
        **_TOKENS,
        "initial_state": Role(("inputs.state",)),
        "cu_seqlens": Role(("inputs.cu_seqlens",)),
        "final_state": Role(("outputs.state",), is_output=True),
    }
)


@_recurrent_calls.serve
def fused_recurrent_gated_delta_rule(  # noqa: PLR0917  (FLA's signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule token by token, as FLA's function of this name computes it.

    Args:
        q: ``[B, T, H, K]``, bf16, fp16 or fp32; with ``cu_seqlens`` B is 1.
        k: Like q.
        v: ``[B, T, HV, V]`` in q's dtype; HV a multiple of H.
        g: ``[B, T, HV]``: log decay, or the raw projection a under ``use_gate_in_kernel``;
            None: no decay.
        gk: Refused: decay by key dimension is another operation.
        gv: Refused, likewise.
        beta: ``[B, T, HV]``; None: ones.
        scale: Factor of q; None: ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` under ``state_v_first``; None: zeros.
        output_final_state: Whether the final state is returned.
        use_qk_l2norm_in_kernel: Normalise q and k.
        use_gate_in_kernel: g = -exp(A_log) softplus(g + dt_bias).
        A_log: ``[HV]``, for ``use_gate_in_kernel``.
        dt_bias: ``[HV]``, likewise; None: zeros.
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta).
        allow_neg_eigval: beta = 2 sigmoid(beta); needs ``use_beta_sigmoid_in_kernel``.
        state_v_first: Layout of the states.
        cu_seqlens: int32 or int64 ``[N + 1]``: bounds of sequences packed along T.
        **unknown: Refused, by name.

    Returns:
        (output like v, final state in fp32 or None).

    Raises:
        UsageError: a tensor has a wrong shape, dtype or device, an argument is refused, or an input
            requires grad under grad mode.
        UnsupportedError: no template serves the problem on this GPU.
    """
    if gk is not None or gv is not None or unknown:
        refuse_arguments(_RECURRENT, gk=gk, gv=gv, **unknown)
    if is_traced(q):
        refuse_grad(_RECURRENT, q, k, v, g, beta, initial_state, A_log, dt_bias)
        return _recurrent_operator(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
        )
    check_tokens(_RECURRENT, q, k, v)
    refuse_grad(_RECURRENT, q, k, v, g, beta, initial_state, A_log, dt_bias)
    check_options(
        _RECURRENT,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    batch, num_v_heads = num_sequences(_RECURRENT, q, cu_seqlens), v.shape[2]
    dims = (q.shape[3], v.shape[3])
    state_shape = (batch, num_v_heads, *(dims[::-1] if state_v_first else dims))
    if initial_state is not None:
        check_shape(_RECURRENT, "initial_state", initial_state, state_shape)
        initial_state = initial_state.float().contiguous()
    gates = gate_inputs(
        *(_RECURRENT, v), g=g, beta=beta, a_log=A_log, dt_bias=dt_bias, is_fused=use_gate_in_kernel
    )
    final_state = None
    if output_final_state:
        final_state = v.new_empty(state_shape, dtype=torch.float32)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    inputs = GdnDecodeInputs(
        *(q, k, v, *gates),
        state=initial_state,
        slots=None,
        scale=query_factor(_RECURRENT, scale, dims[0]),
        cu_seqlens=cu_seqlens,
        has_beta_sigmoid=use_beta_sigmoid_in_kernel,
        beta_scale=2.0 if allow_neg_eigval else 1.0,
    )
    outputs = GdnDecodeOutputs(out, final_state)
    problem = _problem_of(
        inputs,
        state_dtype="float32",
        state_layout="VK" if state_v_first else "KV",
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )
    launched = _launch(_RECURRENT, problem, inputs, outputs)
    if launched is not None:
        _recurrent_calls.hand_over(launched)
    return out, final_state


@_step_calls.serve
def gdn_decode(  # noqa: PLR0917  (what a layer has, in the order of its formula)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    state_layout: str = "KV",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One or a few decoding steps over a pool of states, which is updated in place.

    Args:
        q: ``[B, T, H, K]``, bf16, fp16 or fp32; T is 1, or a few tokens.
        k: Like q.
        v: ``[B, T, HV, V]`` in q's dtype; HV a multiple of H.
        g: ``[B, T, HV]``: log decay; with ``A_log`` the raw projection a instead.
        beta: ``[B, T, HV]``; with ``A_log`` the raw projection b instead.
        state: ``[slots, HV, K, V]`` or ``[slots, HV, V, K]``, fp32 or bf16, contiguous.
        slots: int32 or int64 ``[B]``: row of the state of each sequence, no two alike; a negative
            one leaves every state alone and gives 0. None: rows 0 to B - 1.
        A_log: ``[HV]``: computes g = -exp(A_log) softplus(g + dt_bias), beta = sigmoid(beta).
        dt_bias: ``[HV]``; None: zeros.
        scale: Factor of q; None: ``K ** -0.5``.
        use_qk_l2norm: Normalise q and k.
        state_layout: ``KV`` or ``VK``.
        out: Where to write, like v; None: allocated.

    Returns:
        ``out``.

    Raises:
        UsageError: a tensor has a wrong shape, dtype, device or stride, or requires grad under grad
            mode.
        UnsupportedError: no template serves the problem on this GPU.
    """
    name = "gdn_decode"
    if is_traced(q):
        refuse_grad(name, q, k, v, g, beta, state, A_log, dt_bias)
        return _step_operator(
            *(q, k, v, g, beta, state),
            slots=slots,
            A_log=A_log,
            dt_bias=dt_bias,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            state_layout=state_layout,
            out=out,
        )
    check_tokens(name, q, k, v)
    refuse_grad(name, q, k, v, g, beta, state, A_log, dt_bias)
    check_flags(name, use_qk_l2norm=use_qk_l2norm)
    if state_layout not in STATE_LAYOUTS:
        raise UsageError(f"state_layout={state_layout!r} of {name}: one of KV, VK")
    dims = (q.shape[3], v.shape[3])
    check_tensor(name, "state", state)
    rows = len(state) if state.dim() and slots is not None else q.shape[0]
    shape = (rows, v.shape[2], *(dims if state_layout == "KV" else dims[::-1]))
    check_shape(name, "state", state, shape)
    if dtype_name(state.dtype) not in STATE_DTYPES:
        raise wrong(name, "dtype of state", state.dtype, "torch.float32 or torch.bfloat16")
    if not state.is_contiguous():
        raise wrong(name, "stride of state", state.stride(), "that of a contiguous tensor")
    if slots is not None:
        check_shape(name, "slots", slots, (q.shape[0],))
        check_index(name, "slots", slots, q.device)
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    check_shape(name, "out", out, tuple(v.shape))
    if out.dtype != v.dtype or not out.is_contiguous():
        raise wrong(name, "out", (out.dtype, out.stride()), f"contiguous {v.dtype}")
    is_fused = A_log is not None
    gates = gate_inputs(*(name, v), g=g, beta=beta, a_log=A_log, dt_bias=dt_bias, is_fused=is_fused)
    inputs = GdnDecodeInputs(
        *(q, k, v, *gates),
        state=state,
        slots=slots,
        scale=query_factor(name, scale, dims[0]),
        has_beta_sigmoid=is_fused,
    )
    problem = _problem_of(
        inputs,
        state_dtype=dtype_name(state.dtype),
        state_layout=state_layout,
        use_qk_l2norm=use_qk_l2norm,
    )
    launched = _launch(name, problem, inputs, GdnDecodeOutputs(out, state))
    if launched is not None:
        _step_calls.hand_over(launched)
    return out


def _problem_of(
    inputs: GdnDecodeInputs, *, state_dtype: str, state_layout: str, use_qk_l2norm: bool
) -> GdnDecodeProblem:
    q, v = inputs.q, inputs.v
    batch = num_sequences(_RECURRENT, q, inputs.cu_seqlens)
    return _problem(
        batch=max(1, batch),
        num_steps=max(1, q.shape[0] * q.shape[1] // max(1, batch)),
        num_heads=q.shape[2],
        num_v_heads=v.shape[2],
        head_dim_k=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=dtype_name(q.dtype),
        state_dtype=state_dtype,
        state_layout=state_layout,
        gate="given" if inputs.a_log is None else "fused",
        use_qk_l2norm=use_qk_l2norm,
    )


@lru_cache(maxsize=4096)
def _problem(**values: int | str | bool) -> GdnDecodeProblem:
    return GdnDecodeProblem.from_dict(values)


def _launch(
    function: str, problem: GdnDecodeProblem, inputs: GdnDecodeInputs, outputs: GdnDecodeOutputs
) -> LaunchedCall | None:
    """None where there was nothing to launch."""
    if not inputs.v.numel():
        if outputs.state is not None and inputs.state is not outputs.state:
            outputs.state.zero_() if inputs.state is None else outputs.state.copy_(inputs.state)
        return None
    device, generation = inputs.q.device, dispatch.generation
    spec = device_spec(device, function)
    result = current_snapshot().lookup(problem, spec)
    if not is_served(result, problem, spec, inputs, outputs):
        result = current_snapshot().lookup(
            problem, spec, without=refusing(problem, inputs, outputs)
        )
    key = (
        *(result.config, problem, device.index, inputs.has_beta_sigmoid, inputs.beta_scale),
        *(x.stride() for x in (inputs.q, inputs.k, inputs.v, outputs.out)),
        *(
            None if x is None else (x.dtype, x.data_ptr() % 16)
            for x in (
                *(inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta),
                *(inputs.state, inputs.slots, inputs.cu_seqlens, outputs.out, outputs.state),
            )
        ),
    )
    with on_device(device):
        owned = _launchers.get(key, device, lambda: _build(result, problem, inputs))
        with owned.lock:
            owned.launcher.launch(inputs, outputs)
    return LaunchedCall(inputs, outputs, owned, (result,), generation, _MADE_BY_OPTIONS)


def _build(result: LookupResult, problem: GdnDecodeProblem, inputs: GdnDecodeInputs) -> Launcher:
    return template(problem.op, result.template).build(problem, result.config, inputs)


_recurrent_operator = DeltaRuleOperator(fused_recurrent_gated_delta_rule, _recurrent_calls)
_step_operator = StepOperator(gdn_decode, _step_calls)
