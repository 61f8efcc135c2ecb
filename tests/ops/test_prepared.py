"""A prepared call launches what the long way would: whatever changes from one call to the next."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compiled_stand_in
import pytest
import tilescout
import torch
import triton
from compiled_stand_in import Launched, Launches
from decode_calls import pool_of, problem_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tilescout import ops
from tilescout.errors import TilescoutError
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_chunk_fwd import triton_launcher as gdn_chunk_launcher
from tilescout.kernels.paged_decode import reference as ref
from tilescout.ops import launchers as launchers_module
from tilescout.ops import prepared
from tilescout.ops.launchers import LauncherCache
from tilescout.ops.on_device import device_spec
from tilescout.ops.prepared import PreparedCalls
from tilescout.ops.tensor_guard import attribute_guard, tensor_guard
from tilescout.tuner import dispatch
from tilescout.tuner.capture import read_capture
from tilescout.tuner.lock_file import lock_text
from tilescout.tuner.records import Toolchain

decode, gdn = (import_module(f"tilescout.ops.{name}") for name in ("paged_decode", "gdn"))

TRITON_VERSIONS = ["3.9.0", "3.6.0"]


@dataclass(frozen=True)
class Call:
    """A call that differs from the first one of its list in what its name says."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)


@pytest.fixture(params=TRITON_VERSIONS)
def launches(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Launches]:
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    dispatch.refresh()
    forget()
    for module in ("decode_launch", "gdn", "gdn_chunk", "fp4_launch"):
        # Scratch memory lies elsewhere when a launcher is built anew, so none may be dropped.
        found = LauncherCache(max_launchers=10_000)
        monkeypatch.setattr(import_module(f"tilescout.ops.{module}"), "_launchers", found)
    yield compiled_stand_in.install(monkeypatch, version=request.param)
    forget()
    gdn_chunk_launcher._bound.cache_clear()
    dispatch.refresh()


def forget() -> None:
    for calls in prepared._all:
        calls.forget()


def outcome(call: Call, launches: Launches) -> tuple[object, ...]:
    """What a call comes to: its launches and results, or the error."""
    launches.take()
    try:
        with call.context():
            found = call.function(**call.arguments)
    except TilescoutError as error:
        return type(error), str(error), launches.take()
    results = found if isinstance(found, tuple) else (found,)
    # What the call allocates lies elsewhere in every call.
    names = {x.data_ptr(): f"result {i}" for i, x in enumerate(results) if x is not None}
    given = {x.data_ptr() for x in call.arguments.values() if isinstance(x, torch.Tensor)}
    enqueued = [
        (launch.constexprs, launch.signature, launch.grid, *plain_arguments(launch, names, given))
        for launch in launches.take()
    ]
    shown = [x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in results]
    return enqueued, shown


def plain_arguments(launch: Launched, names: dict[int, str], given: set[int]) -> Iterator[object]:
    made = {
        value: (name, launch.constants[name])
        for (name, _), value in zip(launch.signature, launch.args, strict=True)
        if name in launch.constants and value not in given
    }
    return ({**names, **made}.get(value, value) for value in launch.args)


def agrees(sequence: list[Call], launches: Launches) -> int:
    """Compares every call of a sequence with the long way; how many were served prepared."""
    forget()
    quick, num_prepared = [], 0
    for call in sequence:
        before = launches.num_long
        quick.append(outcome(call, launches))
        num_prepared += launches.num_long == before and bool(quick[-1][0])
    for call, found in zip(sequence, quick, strict=True):
        forget()
        assert found == outcome(call, launches), call.name
    return num_prepared


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


CALLS = {
    "fp4": fp4_calls,
    "paged_decode": decode_calls,
    "mla_decode": mla_calls,
    "gdn_decode": step_calls,
    "recurrence": partial(rule_calls, ops.gdn.fused_recurrent_gated_delta_rule),
    "chunks": partial(rule_calls, ops.gdn.chunk_gated_delta_rule),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_each_change_comes_to_the_same_as_the_long_way(make, launches: Launches) -> None:
    calls = make()
    for call in calls:
        # The first call is prepared when the other one comes, which is prepared in its turn.
        sequence = [calls[0]] * 3 + [call] * 3 + [calls[0], call]
        assert agrees(sequence, launches) >= 2, call.name


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
@settings(max_examples=10, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_any_sequence_comes_to_the_same_as_the_long_way(make, data, launches: Launches) -> None:
    calls = make()
    sequence = data.draw(st.lists(st.sampled_from(calls), min_size=4, max_size=16))
    agrees([*sequence, *sequence, *sequence], launches)


@pytest.fixture
def first() -> Call:
    """The first of the calls of ``gdn_decode``, which is one launch."""
    return step_calls()[0]


def is_prepared(call: Call, launches: Launches) -> bool:
    """Makes the call; whether it went the short way."""
    before = launches.num_long
    outcome(call, launches)
    return launches.num_long == before


def warm(call: Call, launches: Launches) -> None:
    assert [is_prepared(call, launches) for _ in range(3)] == [False, False, True]


def test_what_was_resolved_before_a_refresh_serves_no_longer(
    first: Call, launches: Launches
) -> None:
    warm(first, launches)
    dispatch.refresh()
    assert [is_prepared(first, launches) for _ in range(2)] == [False, True]


def test_a_lock_that_is_put_in_force_changes_the_config_at_once(
    first: Call, launches: Launches, tmp_path: Path
) -> None:
    warm(first, launches)
    outcome(first, launches)
    (result,) = gdn._step_calls._last.launches.counted
    block_v = result.config.as_dict()["block_v"]
    other = {**result.config.as_dict(), "block_v": 2 * block_v}
    pinned = replace(result, config=Config.of(result.template, other))
    path = tmp_path / "pinned.json"
    path.write_text(lock_text([pinned], device_spec(torch.device("cpu"), "test"), Toolchain()))
    tilescout.use_lock(path)
    try:
        for _ in range(3):
            ((constexprs, *_),), _ = outcome(first, launches)
            assert dict(constexprs)["BLOCK_V"] == 2 * block_v
    finally:
        tilescout.use_lock(None)
    ((constexprs, *_),), _ = outcome(first, launches)
    assert dict(constexprs)["BLOCK_V"] == block_v


def test_a_capture_counts_prepared_calls(first: Call, launches: Launches, tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    tilescout.capture(path)
    try:
        for _ in range(7):
            outcome(first, launches)
    finally:
        tilescout.capture(None)
    (counted,) = read_capture(path)
    assert (counted.op, counted.count) == ("gdn_decode", 7)


def test_hooks_of_a_profiler_see_every_launch(first: Call, launches: Launches) -> None:
    warm(first, launches)

    def hook(metadata: object) -> None:
        pass

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert not is_prepared(first, launches)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert is_prepared(first, launches)


def test_each_stream_has_its_own_and_a_capture_none(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = SimpleNamespace(stream=1, is_capturing=False)
    monkeypatch.setattr(prepared, "_host_place", lambda: (0, place.stream, place.is_capturing))
    monkeypatch.setattr(
        launchers_module, "_stream_of", lambda device: (place.stream, place.is_capturing)
    )
    call = decode_calls()[0]
    warm(call, launches)
    scratch = outcome(call, launches)
    place.stream = 2
    warm(call, launches)
    assert outcome(call, launches) != scratch
    place.stream = 1
    assert is_prepared(call, launches)
    # The graph takes the launcher over; what launches later on the stream has another one.
    place.is_capturing = True
    assert not is_prepared(call, launches)
    assert outcome(call, launches) == scratch
    place.is_capturing = False
    assert not is_prepared(call, launches)
    assert outcome(call, launches) != scratch
    place.stream = 2
    assert is_prepared(call, launches)


def test_a_launcher_that_is_dropped_serves_no_longer(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("tilescout.ops.decode_launch")
    monkeypatch.setattr(module, "_launchers", LauncherCache(max_launchers=2))
    calls = {call.name: call for call in decode_calls()}
    warm(calls["nothing"], launches)
    released = weakref.ref(decode._calls._last.launches.owned.launcher)
    # One that prepared calls use is spared once.
    for name in ("sinks", "rope"):
        outcome(calls[name], launches)
    assert is_prepared(calls["nothing"], launches)
    for name in ("sinks", "slopes", "rope", "sinks"):
        outcome(calls[name], launches)
    gc.collect()
    assert released() is None
    assert not is_prepared(calls["nothing"], launches)


def test_a_prepared_call_keeps_no_tensor_alive(launches: Launches) -> None:
    for make in (decode_calls, step_calls):
        calls = make()
        warm(calls[0], launches)
        tensors = [x for x in calls[0].arguments.values() if isinstance(x, torch.Tensor)]
        alive = weakref.WeakSet(tensors)
        del calls, tensors
        gc.collect()
        assert not alive


def test_the_number_of_prepared_calls_is_bounded(launches: Launches) -> None:
    calls = PreparedCalls(gdn._step_calls._roles, max_calls=3)
    assert len(calls) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gdn, "_step_calls", calls)
        for call in step_calls():
            for _ in range(3):
                outcome(call, launches)
            assert len(calls) <= 3
        assert len(calls) > 0


def test_threads_are_served_what_they_ask_for(launches: Launches) -> None:
    names = ("nothing", "other tensors", "slots", "VK", "bf16 state", "no norm", "scale", "wide v")
    chosen = [call for call in step_calls() if call.name in names]

    failures: list[object] = []

    def work(call: Call) -> None:
        for _ in range(200):
            found = call.function(**call.arguments)
            if found is not call.arguments["out"]:
                failures.append(call.name)

    threads = [threading.Thread(target=work, args=(call,)) for call in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    launched = {(x.constexprs, x.args) for x in launches.take()}
    alone: set[object] = set()
    for call in chosen:
        forget()
        call.function(**call.arguments)
        alone |= {(x.constexprs, x.args) for x in launches.take()}
    assert alone == launched


def test_both_guards_say_the_same() -> None:
    tensor = torch.zeros(4, 6)
    quick, plain = tensor_guard([tensor]), attribute_guard([tensor])
    assert quick(tensor.clone())
    others = [
        *(tensor[:2], tensor.t(), tensor.half(), tensor[:, ::2], tensor.view(24)),
        *(torch.nn.Parameter(tensor), tensor.clone().requires_grad_(), tensor.to("meta")),
    ]
    for other in others:
        assert not quick(other)
        assert not plain(other)
    assert plain(tensor.clone())
    with torch.inference_mode():
        made = torch.zeros(4, 6)
        assert quick(made) == plain(made) == False  # noqa: E712
