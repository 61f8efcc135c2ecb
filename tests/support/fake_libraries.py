"""Stand-ins for FLA, FlashQLA and FlashInfer: their names and signatures, our references inside.

Signatures are those of fla-core 0.6.0, flash-qla 0.1.3 and flashinfer-python 0.6.18.post1; the GPU
tests run the libraries themselves.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tilescout.kernels import external
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_chunk_fwd.inputs import GdnChunkInputs
from tilescout.kernels.gdn_chunk_fwd.reference import chunked_reference
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.kernels.gdn_decode.reference import GdnDecodeInputs
from tilescout.kernels.gdn_decode.reference import reference as decode_reference

VERSIONS = {"fla-core": "0.6.0", "flash-qla": "0.1.3", "flashinfer-python": "0.6.18.post1"}


def install(monkeypatch: pytest.MonkeyPatch, *distributions: str) -> list[str]:
    """Makes these distributions, all by default, look installed; returns the calls they get."""
    chosen = distributions or tuple(VERSIONS)
    versions = {name: VERSIONS[name] for name in chosen}
    monkeypatch.setattr(external, "_version", versions.get)
    monkeypatch.setattr(external, "_has_module", lambda name: True)
    _as_by_default(monkeypatch)
    calls: list[str] = []
    for name, module in _modules(calls).items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes none of the libraries look installed."""
    monkeypatch.setattr(external, "_version", lambda name: None)
    _as_by_default(monkeypatch)


def _as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests exclude what happens to be installed; these ask for it."""
    monkeypatch.delenv(external.EXTERNAL_VARIABLE, raising=False)
    monkeypatch.setattr(external, "_chosen", None)


def _modules(calls: list[str]) -> dict[str, ModuleType]:
    def module(name: str, **contents: Any) -> tuple[str, ModuleType]:
        made = ModuleType(name)
        vars(made).update(contents)
        return name, made

    def noted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__.removeprefix("_"))
            return function(*args, **kwargs)

        return call

    fla = dict(
        (
            module("fla"),
            module("fla.modules"),
            module("fla.modules.norm"),
            module("fla.modules.norm.l2norm", l2norm_fwd=_l2norm),
            module("fla.ops"),
            module("fla.ops.common"),
            module("fla.ops.common.gate", fused_beta_sigmoid=_fused_beta_sigmoid),
            module(
                "fla.ops.gated_delta_rule",
                chunk_gated_delta_rule=noted(_fla_chunk),
                fused_recurrent_gated_delta_rule=noted(_fla_recurrent),
            ),
            module(
                "fla.ops.gated_delta_rule.chunk",
                chunk_gated_delta_rule_fwd=noted(_fla_chunk_fwd),
            ),
            module(
                "fla.ops.gated_delta_rule.fused_recurrent",
                fused_recurrent_gated_delta_rule_fwd=noted(_fla_recurrent_fwd),
            ),
        )
    )
    others = dict(
        (
            module(
                "flash_qla",
                chunk_gated_delta_rule=noted(_flash_qla_chunk),
                chunk_gated_delta_rule_fwd=noted(_flash_qla_chunk_fwd),
            ),
            module("flashinfer"),
            module("flashinfer.gdn_prefill", chunk_gated_delta_rule=noted(_flashinfer_prefill)),
            module(
                "flashinfer.gdn_decode",
                gated_delta_rule_decode_pretranspose=noted(_flashinfer_decode),
                gated_delta_rule_decode=noted(_flashinfer_decode_kv),
            ),
        )
    )
    others["flashinfer"].gdn_decode = others["flashinfer.gdn_decode"]  # type: ignore[attr-defined]
    return {**fla, **others}


def _l2norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
    return (wide * rstd).to(x.dtype), rstd


def _fused_beta_sigmoid(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * x.float().sigmoid()


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    state_v_first: bool,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, final state) by our reference; refuses what libraries are not to be asked for."""
    lengths = cu_seqlens.diff()
    assert bool((lengths > 0).all()), "empty sequences are kept from libraries"
    assert int(cu_seqlens[-1]) == q.shape[1], "rows of no sequence are kept from libraries"
    assert all(x.is_contiguous() for x in (q, k, v, gate, beta))
    problem = GdnChunkProblem(
        *(lengths.numel(), q.shape[1], int(lengths.max()), q.shape[2], v.shape[2]),
        *(q.shape[3], v.shape[3], str(q.dtype).removeprefix("torch.")),
        state_layout="VK" if state_v_first else "KV",
        has_initial_state=initial_state is not None,
        gate="given" if a_log is None else "fused",
    )
    inputs = GdnChunkInputs(
        *(q, k, v, gate, beta, scale, initial_state, cu_seqlens), a_log=a_log, dt_bias=dt_bias
    )
    pairs = [chunked_reference(problem, inputs, i) for i in range(lengths.numel())]
    out = torch.cat([out for out, _ in pairs], dim=1).transpose(0, 1)[None].to(v.dtype)
    final = torch.stack([state for _, state in pairs]).float()
    return out.contiguous(), final.mT.contiguous() if state_v_first else final


def _fla_chunk_fwd(
    q,
    k,
    v,
    g,
    beta,
    scale,
    initial_state,
    output_final_state,
    state_v_first=False,
    cu_seqlens=None,
    cp_context=None,
    chunk_indices=None,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    chunk_size=64,
):
    assert cp_context is None
    assert cu_seqlens.dtype == torch.int64
    if chunk_indices is not None:
        counts = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
        pairs = [[i, c] for i, n in enumerate(counts.tolist()) for c in range(n)]
        assert chunk_indices.tolist() == pairs
    out, final = _chunk(
        *(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
        a_log=A_log if use_gate_in_kernel else None,
        dt_bias=dt_bias,
    )
    return None, out, None, final if output_final_state else None, initial_state, None


def _flash_qla_chunk_fwd(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    output_final_state=True,
    output_h=False,
    auto_cp=True,
    state_v_first=False,
    enable_fwd_cp_cache=False,
    cp_context=None,
    is_train=None,
):
    assert cu_seqlens.dtype == torch.int32
    assert not output_h
    out, final = _chunk(
        *(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
    )
    return None, None, out, None, final if output_final_state else None, None


def _flashinfer_prefill(
    q,
    k,
    v,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    output=None,
    output_state=None,
    state_checkpoints=None,
    checkpoint_cu_starts=None,
    checkpoint_every_n_tokens=0,
    use_cp="auto",
    state_indices=None,
):
    assert g.dtype == beta.dtype == torch.float32
    out, final = _chunk(
        *(x[None] for x in (q, k, v, (g + 1e-10).log(), beta)),
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        state_v_first=True,
    )
    output.copy_(out[0])
    if output_final_state:
        output_state.copy_(final)
    return (output, output_state) if output_final_state else output


def _differentiable(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    """Something autograd can record whose gradients are known: it is no delta rule."""
    weight = q.sum() + k.sum() + g.sum() + beta.sum()
    states = q.new_zeros(1) if initial_state is None else initial_state
    out = v * scale + weight.to(v.dtype)
    final = states.float() * 2.0 + weight.float() if output_final_state else None
    return out, final


def _fla_chunk(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **options
):
    return _differentiable(
        q, k, v, g, beta, scale, initial_state, output_final_state, options.get("cu_seqlens")
    )


_flash_qla_chunk = _fla_chunk


def _decode(q, k, v, gate, beta, options: SimpleNamespace):
    problem = GdnDecodeProblem(
        *(options.count, q.shape[1], q.shape[2], v.shape[2], q.shape[3], v.shape[3]),
        str(q.dtype).removeprefix("torch."),
        state_layout="VK" if options.state_v_first else "KV",
        gate="given" if options.a_log is None else "fused",
        use_qk_l2norm=options.use_l2norm,
    )
    inputs = GdnDecodeInputs(
        *(q, k, v, gate, beta, options.a_log, options.dt_bias, options.state, None),
        options.scale,
        cu_seqlens=options.cu_seqlens,
        has_beta_sigmoid=options.has_sigmoid,
        beta_scale=options.beta_scale,
    )
    pairs = [decode_reference(problem, inputs, i) for i in range(options.count)]
    outs = [out for out, _ in pairs]
    out = torch.stack(outs) if options.cu_seqlens is None else torch.cat(outs)[None]
    final = torch.stack([state for _, state in pairs])
    return out.to(v.dtype), final.mT.contiguous() if options.state_v_first else final


def _fla_recurrent_fwd(
    q,
    k,
    v,
    g=None,
    gk=None,
    gv=None,
    beta=None,
    A_log=None,
    dt_bias=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
):
    assert gk is gv is None
    assert all(x.is_contiguous() for x in (q, k, v, g, beta))
    options = SimpleNamespace(
        count=q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1,
        state=initial_state,
        a_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        use_l2norm=use_qk_l2norm_in_kernel,
        has_sigmoid=use_beta_sigmoid_in_kernel,
        beta_scale=2.0 if allow_neg_eigval else 1.0,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    out, final = _decode(q, k, v, g, beta, options)
    return out, final if output_final_state else None


def _fla_recurrent(q, k, v, use_gate_in_kernel=False, **options):
    assert use_gate_in_kernel == (options.get("A_log") is not None)
    return _fla_recurrent_fwd(q, k, v, **options)


def _flashinfer_decode(
    q,
    k,
    v,
    state,
    A_log,
    a,
    dt_bias,
    b,
    scale=None,
    output=None,
    use_qk_l2norm=True,
    initial_state=None,
    initial_state_indices=None,
    output_state_indices=None,
):
    return _flashinfer_in_place(
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
        state if initial_state is None else initial_state, initial_state_indices, True,
    )  # fmt: skip


def _flashinfer_decode_kv(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True
):
    return _flashinfer_in_place(
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, state, None, False
    )


def _flashinfer_in_place(
    q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, pool, slots, state_v_first
):
    assert pool.dtype == A_log.dtype == torch.float32
    slots = torch.arange(q.shape[0]) if slots is None else slots
    options = SimpleNamespace(
        count=q.shape[0],
        state=pool[slots.clamp_min(0).long()],
        a_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        use_l2norm=use_qk_l2norm,
        has_sigmoid=True,
        beta_scale=1.0,
        state_v_first=state_v_first,
        cu_seqlens=None,
    )
    out, final = _decode(q, k, v, a, b, options)
    for i, slot in enumerate(slots.tolist()):
        output[i] = out[i] if slot >= 0 else 0
        if slot >= 0:
            pool[slot] = final[i]
    return output, pool


def with_device_bounds_alone(inputs: GdnChunkInputs) -> GdnChunkInputs:
    """The inputs of a caller who knows the bounds on the device alone."""
    return replace(inputs, cu_seqlens_cpu=None)
