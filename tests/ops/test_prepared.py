"""A prepared call launches what the long way would: whatever changes from one call to the next."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import tilescout
import torch
import triton
from caller_memory import CallersPool
from compiled_stand_in import Launches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared_calls import CALLS, Call, decode_calls, step_calls
from prepared_outcomes import agrees, forget, is_prepared, outcome, warm
from tilescout.kernels.base import Config
from tilescout.ops import launchers as launchers_module
from tilescout.ops import prepared, prepared_launches
from tilescout.ops.launchers import LauncherCache
from tilescout.ops.on_device import device_spec
from tilescout.ops.prepared import PreparedCalls
from tilescout.ops.tensor_guard import attribute_guard, tensor_guard
from tilescout.tuner import dispatch
from tilescout.tuner.capture import read_capture
from tilescout.tuner.lock_file import lock_text
from tilescout.tuner.records import Toolchain

decode, gdn = (import_module(f"tilescout.ops.{name}") for name in ("paged_decode", "gdn"))


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


def test_no_block_scales_and_three_are_not_the_same(launches: Launches) -> None:
    calls = {call.name: call for call in decode_calls()}
    none, three = calls["block scales of none"], calls["block scales of three"]
    assert agrees([none] * 3 + [three], launches) >= 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        ("merge_state", "in the place of a"),
        ("merge_state", "all in one place"),
        ("shared_prefix_decode", "one list of pages"),
        ("paged_decode", "k is v"),
    ],
)
def test_a_tensor_that_is_given_twice_is_prepared(make: str, name: str, launches: Launches) -> None:
    calls = {call.name: call for call in CALLS[make]()}
    other = calls["nothing"]
    assert agrees([calls[name]] * 3 + [other] * 3 + [calls[name], other] * 2, launches) >= 6


@pytest.fixture
def first() -> Call:
    """The first of the calls of ``gdn_decode``, which is one launch."""
    return step_calls()[0]


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


def test_under_a_dispatch_mode_nothing_is_prepared(first: Call, launches: Launches) -> None:
    with CallersPool():
        assert not any(is_prepared(first, launches) for _ in range(4))
    warm(first, launches)


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
    bounded = PreparedCalls(gdn._step_calls._roles, max_calls=3)
    function = bounded.serve(inspect.unwrap(gdn.gdn_decode))
    assert len(bounded) == 0
    for call in step_calls():
        for _ in range(3):
            outcome(replace(call, function=function), launches)
        assert len(bounded) <= 3
    assert len(bounded) > 0


def test_the_number_of_known_addresses_is_bounded(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_launches, "MAX_ADDRESSES", 2)
    first = step_calls()[0]
    warm(first, launches)
    known = gdn._step_calls._last.launches.known
    for _ in range(5):
        moved = {name: tensor.clone() for name, tensor in first.arguments.items()}
        call = replace(first, arguments=moved)
        assert is_prepared(call, launches)
        launches.take()
        call.function(**moved)
        (launched,) = launches.take()
        assert {moved["q"].data_ptr(), moved["state"].data_ptr()} <= set(launched.args)
        assert 0 < len(known) <= 2


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
