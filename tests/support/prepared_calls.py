"""Calls of the public functions; each has one change to the first that a prepared call must see."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tilescout
import torch
from decode_calls import pool_of, problem_of
from tilescout import ops
from tilescout.errors import TilescoutError
from tilescout.kernels.paged_decode import reference as ref


@dataclass(frozen=True)
class Call:
    """A call that differs from the first one of its list in what its name says."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)
    errors: tuple[type[Exception], ...] = (TilescoutError,)
    """What it may raise."""


def shifted(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """Equal but for where it starts."""
    room = tensor.new_zeros(tensor.numel() + elements)
    moved = room[elements:].view(tensor.shape)
    moved.copy_(tensor)
    return moved


def wider(tensor: torch.Tensor) -> torch.Tensor:
    """Equal but for the stride of its rows."""
    room = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 16))
    room[..., : tensor.shape[-1]] = tensor
    return room[..., : tensor.shape[-1]]


def decode_calls() -> list[Call]:
    """Calls of ``paged_decode``."""
    inputs = ref.paged_inputs(problem_of(query_len=2), [50, 7, 64], device="cpu", seed=1)
    dense = ref.paged_inputs(
        problem_of(query_len=2), [50, 7, 64], device="cpu", seed=1, is_dense=True
    )
    q, k, v = inputs.q, inputs.k_cache.contiguous(), inputs.v_cache.contiguous()
    table = {
        name: getattr(inputs, name) for name in ("kv_indptr", "kv_indices", "kv_last_page_len")
    }
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    heads = torch.ones(4)
    first = {"q": q, "kv_cache": (k, v), **table, "out": out}
    none = dict.fromkeys(table)
    by_row = {**none, "block_table": dense.kv_indices, "seq_lens": dense.seq_lens}
    pages = torch.cat([table["kv_indices"]] * 9)
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "other tensors": {
            "q": q.clone(),
            "kv_cache": (k.clone(), v.clone()),
            **{name: x.clone() for name, x in table.items()},
            "out": out.clone(),
        },
        "k and v change places": {"kv_cache": (v, k)},
        "k is v": {"kv_cache": (k, k)},
        "a list": {"kv_cache": [k, v]},
        "three": {"kv_cache": (k, v, v)},
        "one pool": {"kv_cache": pool_of(inputs)},
        "one pool, HND": {"kv_cache": pool_of(inputs, "HND"), "kv_layout": "HND"},
        "one pool, wrong layout": {"kv_cache": pool_of(inputs), "kv_layout": "HND"},
        "no layout": {"kv_layout": "DHN"},
        "bytes": {
            "kv_cache": (k.to(torch.float8_e4m3fn).view(torch.uint8),) * 2,
            "kv_dtype": "float8_e4m3fn",
        },
        "bytes without a name": {"kv_cache": (k.to(torch.float8_e4m3fn).view(torch.uint8),) * 2},
        "block scales of none": {"kv_block_scales": ()},
        "block scales of three": {"kv_block_scales": (k, k, k)},
        "block scales": {"kv_block_scales": (k, k)},
        "fp8": {"kv_cache": (k.to(torch.float8_e5m2), v.to(torch.float8_e5m2))},
        "bf16": {"q": q.bfloat16(), "kv_cache": (k.bfloat16(), v.bfloat16()), "out": None},
        "q in another dtype": {"q": q.bfloat16()},
        "q shifted": {"q": shifted(q)},
        "k shifted": {"kv_cache": (shifted(k), v)},
        "out shifted": {"out": shifted(out)},
        "q shifted by 16 bytes": {"q": shifted(q, 8)},
        "kv_indptr shifted": {"kv_indptr": shifted(table["kv_indptr"])},
        "wide q": {"q": wider(q)},
        "wide k": {"kv_cache": (wider(k), v)},
        "wide out": {"out": wider(out)},
        "q of one row less": {"q": q[:-1], "out": out[:-1]},
        "one query token": {"q": q[:3], "out": out[:3]},
        "more heads": {"q": torch.cat([q, q], 1), "out": torch.cat([out, out], 1)},
        "no request": {"q": q[:0], "out": out[:0], **{n: x[:1] for n, x in table.items()}},
        "longer kv_indices": {"kv_indices": pages},
        "shorter kv_indices": {"kv_indices": table["kv_indices"][:3]},
        "int64 kv_indices": {"kv_indices": table["kv_indices"].long()},
        "kv_indptr too short": {"kv_indptr": table["kv_indptr"][:-1]},
        "no table": none,
        "half a table": {"kv_indptr": None},
        "dense": by_row,
        "dense, wide": {**by_row, "block_table": wider(dense.kv_indices)},
        "dense and csr": {**by_row, **table},
        "out not given": {"out": None},
        "out is q": {"out": q},
        "out overlaps q": {"out": q[1:].new_empty(0).set_(q.untyped_storage(), 8, q.shape)},
        "out of another dtype": {"out": out.float()},
        "lse": {"lse": lse},
        "lse by word": {"return_lse": True},
        "lse by word, out not given": {"return_lse": True, "out": None},
        "lse of another shape": {"lse": lse[:1]},
        "lse_base e": {"lse": lse, "lse_base": "e"},
        "lse_base 3": {"lse": lse, "lse_base": "3"},
        "sinks": {"sinks": heads},
        "slopes": {"alibi_slopes": heads},
        "both": {"sinks": heads, "alibi_slopes": heads},
        "sinks of another dtype": {"sinks": heads.half()},
        "slopes and a cap": {"alibi_slopes": heads, "soft_cap": 3.0},
        "rope": {"rope": ops.Rope()},
        "rope of another theta": {"rope": ops.Rope(theta=5e5)},
        "rope in words": {"rope": "yes"},
        "k_scale tensor": {"k_scale": torch.ones(1)},
        "v_scale tensor": {"v_scale": torch.ones(1), "k_scale": 0.5},
        "v_scale tensor, another k_scale": {"v_scale": torch.ones(1), "k_scale": 0.25},
        "both tensors": {"k_scale": torch.ones(1), "v_scale": torch.ones(1)},
        "requires grad": {"q": q.clone().requires_grad_()},
        "a parameter": {"q": torch.nn.Parameter(q.clone(), requires_grad=False)},
        "an array": {"sm_scale": q[0, 0].numpy()},
    }
    for name, values in {
        "sm_scale": (0.5, 1.0, 1, True, None, "1", math.nan, -0.5),
        "q_scale": (2.0, 1, True, torch.ones(1), None),
        "k_scale": (2.0, 1, True, None),
        "v_scale": (2.0, 1, True),
        "is_causal": (False, 1, 0, None),
        "window_left": (-1, 10, 10.0, True, 1, -2, 1 << 31),
        "soft_cap": (3.0, 3, 0.0, None, True, -1.0),
        "lengths": ("equal", "mixed", "sorted", None),
        "return_lse": (0, 1),
        "kv_dtype": ("float16", "bfloat16", "float8_e4m3fn"),
    }.items():
        changes |= {f"{name}={value!r}": {name: value} for value in values}
    calls = [Call(name, ops.paged_decode, {**first, **change}) for name, change in changes.items()]
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "strict": lambda: tilescout.policy("strict"),
        "nearest": lambda: tilescout.policy("nearest"),
        "debugging": ops.debugging,
        "inference mode": torch.inference_mode,
        "no grad": torch.no_grad,
    }
    calls += [Call(name, ops.paged_decode, first, context) for name, context in contexts.items()]
    grad = {**first, "q": q.clone().requires_grad_()}
    return [*calls, Call("requires grad, not recorded", ops.paged_decode, grad, torch.no_grad)]


def mla_calls() -> list[Call]:
    """Calls of ``mla_decode``."""
    sizes = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
    problem = problem_of(page_size=16, **sizes)
    inputs = ref.paged_inputs(problem, [50, 7, 64], device="cpu", seed=1)
    q, rows = inputs.q, inputs.k_cache.squeeze(2)
    names = ("kv_indptr", "kv_indices", "kv_last_page_len")
    out = q.new_empty((*q.shape[:2], 512))
    first = {
        **{name: getattr(inputs, name) for name in names},
        **{"q": q, "kv_cache": rows, "sm_scale": 0.0625, "out": out},
    }
    pair, parts = (q[..., :512], q[..., 512:]), (rows[..., :512], rows[..., 512:])
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "other tensors": {"q": q.clone(), "kv_cache": rows.clone()},
        "a pair of queries": {"q": pair},
        "pairs": {"q": pair, "kv_cache": parts},
        "a pair that is none": {"q": (pair[0], wider(pair[1]))},
        "a pair from two tensors": {"q": (pair[0], q.clone()[..., 512:])},
        "head_dim_v": {"head_dim_v": 256, "out": None},
        "head_dim_v in floats": {"head_dim_v": 512.0},
        "kv_scale": {"kv_scale": 2.0},
        "kv_scale tensor": {"kv_scale": torch.ones(1)},
        "no sm_scale": {"sm_scale": None},
        "sm_scale=1": {"sm_scale": 1},
        "sm_scale=True": {"sm_scale": True},
        "rows with gaps": {"kv_cache": wider(rows)},
        "out not given": {"out": None, "return_lse": True},
        "out shifted": {"out": shifted(out)},
        "pairs, out over the queries": {
            "q": pair,
            "kv_cache": parts,
            "out": q.new_empty(0).set_(q.untyped_storage(), 8, out.shape),
        },
    }
    return [Call(name, ops.mla_decode, {**first, **change}) for name, change in changes.items()]


def step_calls() -> list[Call]:
    """Calls of ``gdn_decode``."""
    torch.manual_seed(0)
    q, k = (torch.randn(3, 1, 2, 64) for _ in range(2))
    v, state = torch.randn(3, 1, 4, 64), torch.randn(3, 4, 64, 64)
    g, beta = torch.randn(3, 1, 4), torch.rand(3, 1, 4)
    slots, heads = torch.arange(3, dtype=torch.int32), torch.rand(4)
    first = {
        **{"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state},
        "out": torch.empty_like(v),
    }
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "other tensors": {name: tensor.clone() for name, tensor in first.items()},
        "slots": {"slots": slots},
        "slots, int64": {"slots": slots.long()},
        "slots, a larger pool": {"slots": slots, "state": torch.cat([state, state])},
        "slots on their side": {"slots": slots[:, None]},
        "fused": {"A_log": heads, "dt_bias": heads},
        "fused, no bias": {"A_log": heads},
        "fused, half": {"A_log": heads.half()},
        "a bias without use": {"dt_bias": heads},
        "VK": {"state_layout": "VK"},
        "KK": {"state_layout": "KK"},
        "bf16 state": {"state": state.bfloat16()},
        "half a state": {"state": state[:2]},
        "half gates": {"g": g.half(), "beta": beta.half()},
        "gates with gaps": {"g": torch.stack([g, g], -1)[..., 0]},
        "no norm": {"use_qk_l2norm": False},
        "norm=1": {"use_qk_l2norm": 1},
        "scale": {"scale": 0.5},
        "scale=1": {"scale": 1},
        "scale=1.0": {"scale": 1.0},
        "q shifted": {"q": shifted(q)},
        "g shifted": {"g": shifted(g)},
        "state shifted": {"state": shifted(state)},
        "wide v": {"v": wider(v)},
        "out not given": {"out": None},
        "out with gaps": {"out": wider(v)},
        "requires grad": {"q": q.clone().requires_grad_()},
        "no sequence": {name: tensor[:0] for name, tensor in first.items()},
    }
    return [Call(name, ops.gdn.gdn_decode, {**first, **change}) for name, change in changes.items()]


def rule_calls(function: Callable[..., Any]) -> list[Call]:
    """Calls of a function with FLA's signature."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 80, 2, 64) for _ in range(2))
    v, g, beta = torch.randn(1, 80, 4, 64), torch.randn(1, 80, 4), torch.rand(1, 80, 4)
    state, heads = torch.randn(1, 4, 64, 64), torch.rand(4)
    bounds = torch.tensor([0, 30, 80], dtype=torch.int32)
    first = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    packed = {"cu_seqlens": bounds, "initial_state": torch.cat([state, state])}
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "other tensors": {name: tensor.clone() for name, tensor in first.items()},
        "a state": {"initial_state": state},
        "a half state": {"initial_state": state.half()},
        "a shifted state": {"initial_state": shifted(state)},
        "the final state": {"output_final_state": True},
        "both states": {"initial_state": state, "output_final_state": True},
        "state_v_first": {"initial_state": state, "state_v_first": True},
        "packed": packed,
        "packed, int64": {**packed, "cu_seqlens": bounds.long()},
        "packed, states missing": {**packed, "initial_state": state},
        "norm": {"use_qk_l2norm_in_kernel": True},
        "norm=1": {"use_qk_l2norm_in_kernel": 1},
        "gate": {"use_gate_in_kernel": True, "A_log": heads},
        "gate and bias": {"use_gate_in_kernel": True, "A_log": heads, "dt_bias": heads},
        "sigmoid": {"use_beta_sigmoid_in_kernel": True},
        "negative": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        "negative alone": {"allow_neg_eigval": True},
        "scale": {"scale": 0.5},
        "half": {name: tensor.half() for name, tensor in first.items()},
        "fewer tokens": {name: tensor[:, :70] for name, tensor in first.items()},
        "no beta": {"beta": None},
        "no gate": {"g": None},
        "refused": {"chunk_size": 64},
        "q shifted": {"q": shifted(q)},
        "wide v": {"v": wider(v)},
        "requires grad": {"q": q.clone().requires_grad_()},
    }
    return [Call(name, function, {**first, **change}) for name, change in changes.items()]


def fp4_calls() -> list[Call]:
    """Calls of ``nvfp4_attention_sm120_fwd``."""
    heads, tokens, dim = 2, 128, 64
    e4m3 = torch.float8_e4m3fn

    def codes(*shape: int) -> torch.Tensor:
        return torch.zeros(1, heads, *shape, dtype=torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return torch.zeros(1, heads, *shape).to(e4m3)

    first = {
        **{name: codes(tokens, dim // 2) for name in ("q_fp4", "k_fp4")},
        "v_fp4_t": codes(dim, tokens // 2),
        **{name: scales(tokens, dim // 16) for name in ("q_scale", "k_scale")},
        "v_scale_t": scales(dim, tokens // 16),
        "qk_correction": torch.zeros(1, heads, 1, tokens),
        "out": torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16),
        "lse": torch.empty(1, heads, tokens),
    }
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "other tensors": {name: tensor.clone() for name, tensor in first.items()},
        "causal": {"causal": True},
        "causal=1": {"causal": 1},
        "sm_scale": {"sm_scale": 0.5},
        "sm_scale=1": {"sm_scale": 1},
        "sm_scale=0": {"sm_scale": 0.0},
        "means of the sequence": {"per_block_mean": False},
        "out not given": {"out": None, "lse": None},
        "out not given, fp16": {"out": None, "out_dtype": torch.float16},
        "fp32": {"out": first["out"].float()},
        "wide out": {"out": wider(first["out"])},
        "out shifted": {"out": shifted(first["out"])},
        "scales as bytes": {"q_scale": first["q_scale"].view(torch.uint8)},
        "fewer heads": {"k_fp4": first["k_fp4"][:, :1]},
        "k shifted": {"k_fp4": shifted(first["k_fp4"], 16)},
        "k misaligned": {"k_fp4": shifted(first["k_fp4"])},
    }
    function = ops.fp4_attention.__globals__["nvfp4_attention_sm120_fwd"]
    return [Call(name, function, {**first, **change}) for name, change in changes.items()]


def prefix_calls() -> list[Call]:
    """Calls of ``shared_prefix_decode``: three kernels."""
    inputs = ref.paged_inputs(problem_of(), [50, 7, 64, 20], device="cpu", seed=1)
    dense = ref.paged_inputs(problem_of(), [50, 7, 64, 20], device="cpu", seed=1, is_dense=True)
    q, k, v = inputs.q, inputs.k_cache.contiguous(), inputs.v_cache.contiguous()
    indptr, indices, last = inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len
    suffix = ops.PageTable.csr(indptr, indices, last)
    prefix = ops.PageTable.csr(indptr[:3], indices[: int(indptr[2])], last[:2])
    one_list = ops.PageTable.csr(indptr[:3], indices, last[:2])
    by_row = ops.PageTable.dense(dense.kv_indices, dense.seq_lens)
    out, lse, heads = torch.empty_like(q), torch.empty(q.shape[:2]), torch.ones(4)
    first = {"q": q, "kv_cache": (k, v), "prefix": prefix, "suffix": suffix, "out": out}
    moved = ops.PageTable.csr(indptr.clone(), indices.clone(), last.clone())
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "other tensors": {"q": q.clone(), "suffix": moved, "out": out.clone()},
        "one pool": {"kv_cache": pool_of(inputs)},
        "dense": {"suffix": by_row},
        "one list of pages": {"prefix": one_list},
        "two equal lists of pages": {"prefix": one_list, "suffix": moved},
        "a prefix each": {"prefix": suffix},
        "three prefixes": {"prefix": ops.PageTable.csr(indptr[:4], indices, last[:3])},
        "no table": {"prefix": None},
        "the tables change places": {"prefix": suffix, "suffix": prefix},
        "int64 pages": {"suffix": ops.PageTable.csr(indptr, indices.long(), last)},
        "fewer pages": {"suffix": ops.PageTable.csr(indptr, indices[:2], last)},
        "k is v": {"kv_cache": (k, k)},
        "q shifted": {"q": shifted(q)},
        "wide q": {"q": wider(q)},
        "out not given": {"out": None},
        "lse by word": {"return_lse": True, "out": None},
        "lse": {"lse": lse},
        "lse, base e": {"lse": lse, "lse_base": "e"},
        "out is q": {"out": q},
        "sinks": {"sinks": heads},
        "a cap": {"soft_cap": 3.0},
        "a cap of 3": {"soft_cap": 3},
        "k_scale tensor": {"k_scale": torch.ones(1)},
        "k_scale": {"k_scale": 2.0},
        "requires grad": {"q": q.clone().requires_grad_()},
    }
    function = ops.shared_prefix_decode
    return [Call(name, function, {**first, **change}) for name, change in changes.items()]


def merge_calls() -> list[Call]:
    """Calls of ``merge_state``."""
    torch.manual_seed(0)
    out_a, out_b, out = (torch.randn(5, 4, 64) for _ in range(3))
    lse_a, lse_b, lse = (torch.randn(5, 4) for _ in range(3))
    first = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    written = {"out": out, "lse": lse}
    changes: dict[str, dict[str, Any]] = {
        "nothing": written,
        "other tensors": {name: x.clone() for name, x in {**first, **written}.items()},
        "outputs not given": {},
        "an output not given": {"out": out},
        "in the place of a": {"out": out_a, "lse": lse_a},
        "in the place of b": {"out": out_b, "lse": lse_b},
        "a is b": {**written, "out_b": out_a, "lse_b": lse_a},
        "all in one place": {"out_b": out_a, "lse_b": lse_a, "out": out_a, "lse": lse_a},
        "across a": {"out": out_a.new_empty(0).set_(out_a.untyped_storage(), 8, (5, 4, 60))},
        "base e": {**written, "lse_base": "e"},
        "base 3": {**written, "lse_base": "3"},
        "half": {name: x.half() for name, x in first.items() if name.startswith("out")},
        "half a state": {**written, "out_a": out_a.half()},
        "lse with gaps": {**written, "lse_a": torch.stack([lse_a, lse_a], -1)[..., 0]},
        "a shifted": {**written, "out_a": shifted(out_a)},
        "wide a": {**written, "out_a": wider(out_a)},
        "wide out": {**written, "out": wider(out)},
        "fewer rows": {name: x[:3] for name, x in {**first, **written}.items()},
        "no row": {name: x[:0] for name, x in {**first, **written}.items()},
        "requires grad": {**written, "out_a": out_a.clone().requires_grad_()},
    }
    return [Call(name, ops.merge_state, {**first, **change}) for name, change in changes.items()]


def merge_all_calls() -> list[Call]:
    """Calls of ``merge_states``."""
    torch.manual_seed(0)
    outs, lses = torch.randn(5, 3, 4, 64), torch.randn(5, 3, 4)
    first = {"outs": outs, "lses": lses}
    written = {"out": torch.empty(5, 4, 64), "lse": torch.empty(5, 4)}
    changes: dict[str, dict[str, Any]] = {
        "nothing": written,
        "other tensors": {name: x.clone() for name, x in {**first, **written}.items()},
        "outputs not given": {},
        "two states": {**written, "outs": outs[:, :2], "lses": lses[:, :2]},
        "no state": {**written, "outs": outs[:, :0], "lses": lses[:, :0]},
        "in the place of a state": {"out": outs[:, 1]},
        "across states": {"out": outs.view(-1)[64 : 64 + 5 * 256].view(5, 4, 64)},
        "base e": {**written, "lse_base": "e"},
        "outs shifted": {**written, "outs": shifted(outs)},
        "half": {"outs": outs.half()},
    }
    return [Call(name, ops.merge_states, {**first, **change}) for name, change in changes.items()]


CALLS = {
    "shared_prefix_decode": prefix_calls,
    "merge_state": merge_calls,
    "merge_states": merge_all_calls,
    "fp4": fp4_calls,
    "paged_decode": decode_calls,
    "mla_decode": mla_calls,
    "gdn_decode": step_calls,
    "recurrence": partial(rule_calls, ops.gdn.fused_recurrent_gated_delta_rule),
    "chunks": partial(rule_calls, ops.gdn.chunk_gated_delta_rule),
}
