"""Gated delta net over whole sequences, with the signature of flash-linear-attention.

Checks the tensors, looks the config up, launches. The checks read shapes, never values on the
device, so that no call waits for it. What autograd records is refused or a library's, see
``gdn_external``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..errors import UsageError
from ..kernels.gdn_chunk_fwd import GdnChunkInputs, GdnChunkOutputs, GdnChunkProblem
from ..kernels.registry import template
from ..tuner import dispatch
from ..tuner.dispatch import LookupResult, current_snapshot
from ..tuner.tiers import Tier
from .checks import check_shape, refuse_grad, wrong
from .gdn_checks import (
    check_options,
    check_tokens,
    gate_inputs,
    num_sequences,
    query_factor,
    refuse_arguments,
)
from .gdn_external import (
    differentiable_chunk,
    is_for_library,
    is_served,
    keep_bounds,
    refusing,
)
from .gdn_library import DeltaRuleOperator
from .launched_call import LaunchedCall, Role
from .launchers import LauncherCache
from .library import is_traced
from .on_device import device_spec, dtype_name, on_device
from .prepared import PreparedCalls

__all__ = ["chunk_gated_delta_rule"]

_FUNCTION = "chunk_gated_delta_rule"
_MAX_LAUNCHERS = 8
"""Launchers kept for eager calls: each holds scratch memory of several times the size of v."""
_launchers = LauncherCache(_MAX_LAUNCHERS)
_MADE_BY_OPTIONS = frozenset(("inputs.dt_bias",))
"""Zeros where it is not given."""
_calls = PreparedCalls(
    {
        **{
            name: Role((f"inputs.{name}",))
            for name in ("q", "k", "v", "beta", "initial_state", "cu_seqlens", "dt_bias")
        },
        "g": Role(("inputs.gate",)),
        "A_log": Role(("inputs.a_log",)),
        "out": Role(("outputs.out",), is_output=True),
        "final_state": Role(("outputs.final_state",), is_output=True),
    }
)


@_calls.serve
def chunk_gated_delta_rule(  # noqa: PLR0917  (FLA's signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over whole sequences, as FLA's function of this name computes it.

    Args:
        q: ``[B, T, H, K]``, bf16, fp16 or fp32; with ``cu_seqlens`` B is 1.
        k: Like q, of length one at most, or under ``use_qk_l2norm_in_kernel``.
        v: ``[B, T, HV, V]`` in q's dtype; HV a multiple of H.
        g: ``[B, T, HV]``: log decay, or the raw projection a under ``use_gate_in_kernel``.
        beta: ``[B, T, HV]``.
        scale: Factor of q; None: ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` under ``state_v_first``; None: zeros.
        output_final_state: Whether the final state is returned.
        use_qk_l2norm_in_kernel: Normalise q and k.
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta).
        allow_neg_eigval: beta = 2 sigmoid(beta); needs ``use_beta_sigmoid_in_kernel``.
        state_v_first: Layout of the states.
        cu_seqlens: int32 or int64 ``[N + 1]``: bounds of sequences packed along T, in any order and
            of any length; rows behind the last one become 0.
        cu_seqlens_cpu: The same on the CPU: the look-up then knows the longest sequence, and takes
            them to be equal without it. Libraries serve packed sequences only where it is given.
        chunk_indices: Refused: it numbers chunks of FLA's size; ours are found on the device.
        cp_context: Refused: sequences are not spread over devices.
        use_gate_in_kernel: g = -exp(A_log) softplus(g + dt_bias).
        A_log: ``[HV]``, for ``use_gate_in_kernel``.
        dt_bias: ``[HV]``, likewise; None: zeros.
        **unknown: Refused, by name; so is ``chunk_size``, which the tuner chooses.

    Returns:
        (output like v, final state in fp32 or None).

    Raises:
        UsageError: a tensor has a wrong shape, dtype or device, or an input requires grad under
            grad mode and ``use_external`` lets no library serve it.
        UnsupportedError: an argument is refused, or no template serves the problem on this GPU, or
            no library with a backward.
    """
    if chunk_indices is not None or cp_context is not None or unknown:
        refuse_arguments(_FUNCTION, chunk_indices=chunk_indices, cp_context=cp_context, **unknown)
    if is_traced(q):
        refuse_grad(_FUNCTION, q, k, v, g, beta, initial_state, A_log, dt_bias)
        return _operator(
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
            cu_seqlens_cpu=cu_seqlens_cpu,
        )
    check_tokens(_FUNCTION, q, k, v)
    has_grad = is_for_library(_FUNCTION, q, k, v, g, beta, initial_state, A_log, dt_bias)
    check_options(
        _FUNCTION,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    if not use_gate_in_kernel and (A_log is not None or dt_bias is not None):
        raise UsageError(
            f"A_log and dt_bias of {_FUNCTION} need use_gate_in_kernel=True: without it g is the "
            "log decay itself; leave them out"
        )
    sequences = num_sequences(_FUNCTION, q, cu_seqlens)
    longest = _longest(q, sequences, cu_seqlens, cu_seqlens_cpu)
    dims = (q.shape[3], v.shape[3])
    state_shape = (sequences, v.shape[2], *(dims[::-1] if state_v_first else dims))
    if initial_state is not None:
        check_shape(_FUNCTION, "initial_state", initial_state, state_shape)
        if initial_state.device != q.device:
            raise wrong(
                _FUNCTION, "device of initial_state", str(initial_state.device), str(q.device)
            )
        initial_state = initial_state.float().contiguous()
        if initial_state.data_ptr() % 16:
            initial_state = initial_state.clone()  # states are read 16 bytes at a time
    gates = gate_inputs(
        *(_FUNCTION, v), g=g, beta=beta, a_log=A_log, dt_bias=dt_bias, is_fused=use_gate_in_kernel
    )
    final_state = None
    if output_final_state:
        final_state = v.new_empty(state_shape, dtype=torch.float32)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    inputs = GdnChunkInputs(
        *(q, k, v, *gates[:2]),
        scale=query_factor(_FUNCTION, scale, dims[0]),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        a_log=gates[2],
        dt_bias=gates[3],
        has_beta_sigmoid=use_beta_sigmoid_in_kernel,
        beta_scale=2.0 if allow_neg_eigval else 1.0,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
    outputs = GdnChunkOutputs(out, final_state)
    if not out.numel() or not sequences:
        _without_tokens(inputs, outputs)
        return out, final_state
    problem = _problem(
        num_sequences=sequences,
        num_tokens=inputs.num_tokens,
        max_seqlen=longest,
        num_heads=q.shape[2],
        num_v_heads=v.shape[2],
        head_dim_k=dims[0],
        head_dim_v=dims[1],
        dtype=dtype_name(q.dtype),
        state_layout="VK" if state_v_first else "KV",
        has_initial_state=initial_state is not None,
        has_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        gate="fused" if use_gate_in_kernel else "given",
        gate_dtype=dtype_name(gates[0].dtype),
        beta_dtype=dtype_name(gates[1].dtype),
    )
    if has_grad:
        return differentiable_chunk(
            *(_FUNCTION, problem, inputs, device_spec(q.device, _FUNCTION)),
            wants_state=output_final_state,
        )
    launched = _launch(problem, inputs, outputs)
    if cu_seqlens_cpu is None:
        # Bounds on the host are looked at, and which winner serves depends on what they say.
        _calls.hand_over(launched)
    return out, final_state


def _longest(
    q: torch.Tensor,
    sequences: int,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
) -> int:
    """Tokens of the longest sequence, as far as the host can know."""
    if cu_seqlens_cpu is not None:
        if cu_seqlens is None:
            raise UsageError(
                f"cu_seqlens_cpu of {_FUNCTION} needs cu_seqlens, the same on {str(q.device)!r}"
            )
        check_shape(_FUNCTION, "cu_seqlens_cpu", cu_seqlens_cpu, tuple(cu_seqlens.shape))
        if cu_seqlens_cpu.device.type != "cpu":
            raise wrong(_FUNCTION, "device of cu_seqlens_cpu", str(cu_seqlens_cpu.device), "cpu")
        longest = int(cu_seqlens_cpu.diff().max()) if sequences else 0
        if longest > q.shape[1]:
            raise wrong(
                _FUNCTION, "longest sequence of cu_seqlens_cpu", longest, f"T={q.shape[1]} at most"
            )
    else:
        longest = 0
    tokens = q.shape[0] * q.shape[1]
    # Rows behind the last sequence count as part of one.
    return max(longest, -(-tokens // max(1, sequences)))


def _without_tokens(inputs: GdnChunkInputs, outputs: GdnChunkOutputs) -> None:
    """No sequence has a token: states stay as they are, rows behind all sequences are 0."""
    outputs.out.zero_()
    if outputs.final_state is None:
        return
    if inputs.initial_state is None:
        outputs.final_state.zero_()
    else:
        outputs.final_state.copy_(inputs.initial_state)


@lru_cache(maxsize=4096)
def _problem(**values: int | str | bool) -> GdnChunkProblem:
    return GdnChunkProblem.from_dict(values)


def _launch(
    problem: GdnChunkProblem, inputs: GdnChunkInputs, outputs: GdnChunkOutputs
) -> LaunchedCall:
    device, generation = inputs.q.device, dispatch.generation
    lookups = _lookups(problem, device)
    spec = device_spec(device, _FUNCTION)
    if not is_served(lookups[-1], problem, spec, inputs, outputs):
        lookups = _lookups(problem, device, refusing(problem, inputs, outputs))
    result = lookups[-1]
    built_for = _capacity(problem)
    key = (result.config, built_for, device.index)
    chosen = template(problem.op, result.template)
    with on_device(device):
        owned = _launchers.get(key, device, lambda: chosen.build(built_for, result.config, inputs))
        if chosen.is_external:
            keep_bounds(inputs)
        with owned.lock:
            owned.launcher.launch(inputs, outputs)
    return LaunchedCall(inputs, outputs, owned, lookups, generation, _MADE_BY_OPTIONS)


def _lookups(
    problem: GdnChunkProblem, device: torch.device, without: frozenset[str] = frozenset()
) -> tuple[LookupResult, ...]:
    """The last one serves: the problem's winner or, where nothing was tuned, its usual kind's.

    States, the gate and their dtypes only concern how a kernel starts and ends.
    """
    spec = device_spec(device, _FUNCTION)
    snapshot = current_snapshot()
    result = snapshot.lookup(problem, spec, without=without)
    usual = _usual(problem)
    if result.tier is not Tier.DEFAULT or usual == problem:
        return (result,)
    return result, snapshot.lookup(usual, spec, without=without)


@lru_cache(maxsize=4096)
def _usual(problem: GdnChunkProblem) -> GdnChunkProblem:
    """The kind of problem that workloads tune."""
    return replace(
        problem,
        state_layout="KV",
        has_initial_state=True,
        has_final_state=True,
        gate="given",
        gate_dtype="float32",
        beta_dtype="float32",
    )


@lru_cache(maxsize=4096)
def _capacity(problem: GdnChunkProblem) -> GdnChunkProblem:
    """The problem whose launcher serves this one: a little larger, so that few are built."""
    tokens, sequences = problem.num_tokens, problem.num_sequences
    step = max(256, 1 << max(0, tokens.bit_length() - 3))
    tokens = -(-tokens // step) * step
    sequences = 1 << (sequences - 1).bit_length()
    return replace(problem, num_tokens=tokens, num_sequences=sequences, max_seqlen=tokens)


_operator = DeltaRuleOperator(chunk_gated_delta_rule, _calls, "Tensor? cu_seqlens_cpu=None")
