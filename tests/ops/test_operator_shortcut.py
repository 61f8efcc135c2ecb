"""A prepared call of an operator comes to what the dispatcher would make of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from compiled_stand_in import Launches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared_calls import CALLS, Call, step_calls
from prepared_outcomes import agrees, is_prepared, warm
from tilescout.errors import TilescoutError

OPERATORS = (
    *("paged_decode", "mla_decode", "gdn_decode", "shared_prefix_decode"),
    *("merge_state", "merge_states"),
)


def as_operator(name: str, call: Call) -> Call:
    """The call by its operator, spelt as the schema has it."""
    into, new = (getattr(torch.ops.tilescout, f"{name}{end}").default for end in ("_out", ""))

    def function(**arguments: Any) -> Any:
        for key in ("q", "kv_cache", "kv_block_scales"):
            value = arguments.get(key)
            if name.endswith("decode") and name != "gdn_decode" and isinstance(value, torch.Tensor):
                arguments[key] = [value]
        for key in ("k_scale", "v_scale", "kv_scale"):
            if isinstance(arguments.get(key), torch.Tensor):
                arguments[f"{key}_tensor"] = arguments.pop(key)
        for key in ("prefix", "suffix"):
            table = arguments.pop(key, None)
            for part in () if table is None else fields(table):
                arguments[f"{key}_{part.name}"] = getattr(table, part.name)
        rope = arguments.get("rope")
        if hasattr(rope, "theta"):
            arguments["rope"] = [rope.theta, rope.scale]
        if arguments.get("out") is None:
            arguments.pop("out", None)
            return new(**arguments)
        returns_lse = arguments.pop("return_lse", False)
        assert into(**arguments) is None
        return arguments["out"] if not returns_lse else (arguments["out"], arguments.get("lse"))

    return replace(call, function=function, errors=(TilescoutError, RuntimeError))


def operator_calls(name: str) -> list[Call]:
    return [as_operator(name, call) for call in CALLS[name]()]


@pytest.mark.parametrize("name", OPERATORS)
def test_each_change_comes_to_the_same_as_through_the_dispatcher(
    name: str, launches: Launches
) -> None:
    calls = operator_calls(name)
    for call in calls:
        sequence = [calls[0]] * 3 + [call] * 3 + [calls[0], call]
        assert agrees(sequence, launches) >= 2, call.name


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=10, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_functions_and_operators_in_any_order(name: str, data, launches: Launches) -> None:
    calls = [*CALLS[name](), *operator_calls(name)]
    sequence = data.draw(st.lists(st.sampled_from(calls), min_size=4, max_size=16))
    agrees([*sequence, *sequence, *sequence], launches)


class Seen(torch.overrides.TorchFunctionMode):
    """Writes down which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
    """Likewise, behind the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, Dispatched])
def test_modes_see_calls_of_operators(mode, launches: Launches) -> None:
    call = as_operator("gdn_decode", step_calls()[0])
    warm(call, launches)
    with mode() as seen:
        call.function(**call.arguments)
    assert "tilescout.gdn_decode_out.default" in seen.names
    assert is_prepared(call, launches)


@pytest.mark.parametrize("mode", [Seen, Dispatched])
def test_modes_see_the_calls_of_a_kind_that_they_saw_first(mode, launches: Launches) -> None:
    call = as_operator("gdn_decode", step_calls()[0])
    for _ in range(2):
        with mode() as seen:
            for _ in range(4):
                call.function(**call.arguments)
        assert seen.names.count("tilescout.gdn_decode_out.default") == 4


def test_the_profiler_sees_calls_of_operators(launches: Launches) -> None:
    call = as_operator("gdn_decode", step_calls()[0])
    warm(call, launches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call.function(**call.arguments)
    assert "tilescout::gdn_decode_out" in {event.name for event in profile.events()}


@contextmanager
def no_dispatcher(operator: Any) -> Iterator[list[object]]:
    """In the place of the dispatcher, a list of what it would be asked."""
    asked: list[object] = []
    names = operator._op.__code__.co_freevars
    (cell,) = (
        cell
        for name, cell in zip(names, operator._op.__closure__, strict=True)
        if name == "dispatched"
    )
    before, cell.cell_contents = cell.cell_contents, lambda **arguments: asked.append(arguments)
    try:
        yield asked
    finally:
        cell.cell_contents = before


def test_a_prepared_call_passes_the_dispatcher_by(launches: Launches) -> None:
    packet = torch.ops.tilescout.gdn_decode_out
    call = replace(step_calls()[0], function=packet.default)
    warm(call, launches)
    for operator in (packet, packet.default):
        launches.take()
        with no_dispatcher(operator) as asked:
            operator(**call.arguments)
            assert len(launches.take()) == 1
            assert not asked
            operator(**{**call.arguments, "scale": 0.25})
            assert len(asked) == 1
            assert not launches.take()


# torch says once a process that a kernel takes the place of ours, which is what is tested.
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
@pytest.mark.parametrize("key", ["CPU", "AutogradCPU", "CompositeExplicitAutograd"])
def test_kernels_that_somebody_else_registers_see_the_calls(key: str, launches: Launches) -> None:
    call = as_operator("gdn_decode", step_calls()[0])
    operator = torch.ops.tilescout.gdn_decode_out.default
    warm(call, launches)
    library = torch.library.Library("tilescout", "IMPL")
    asked: list[object] = []
    library.impl("gdn_decode_out", lambda *args, **kwargs: asked.append(args), key)
    try:
        call.function(**call.arguments)
        # A kernel of lower precedence than ours is never called, but is not told apart.
        assert len(asked) == (key != "CompositeExplicitAutograd")
    finally:
        library._destroy()
    with no_dispatcher(operator) as dispatched:
        call.function(**call.arguments)
    assert not dispatched


def test_a_mistake_gets_the_error_of_the_dispatcher(launches: Launches) -> None:
    call = as_operator("gdn_decode", step_calls()[0])
    wrong = {**call.arguments, "chunk": 1}
    operator = torch.ops.tilescout.gdn_decode_out.default
    with pytest.raises(RuntimeError, match="chunk") as before:
        operator(**wrong)
    warm(call, launches)
    with pytest.raises(RuntimeError) as after:
        operator(**wrong)
    assert str(before.value) == str(after.value)


def test_a_tensor_is_no_list_of_one(launches: Launches) -> None:
    first = CALLS["paged_decode"]()[0]
    warm(first, launches)
    launches.take()
    with pytest.raises(RuntimeError, match="List"):
        torch.ops.tilescout.paged_decode_out.default(**first.arguments)
    assert not launches.take()


def test_operators_can_be_scripted() -> None:
    # torch.jit warns of its own age.
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(step_in_script)
    assert "tilescout::gdn_decode" in str(scripted.graph)


def step_in_script(q: torch.Tensor, g: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """An operator inside TorchScript."""
    return torch.ops.tilescout.gdn_decode(q, q, q, g, g, state)
