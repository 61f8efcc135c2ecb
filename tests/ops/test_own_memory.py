"""What outlives a call is memory of ours: none of a pool of the caller's, none of its tensors."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest
import torch
from caller_memory import CallersPool, storages_of
from compiled_stand_in import Launches
from prepared_calls import CALLS, Call
from prepared_outcomes import forget, is_prepared, outcome
from tilescout.ops.own_memory import kept_copy, own_memory
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode

CPU = torch.device("cpu")


def result_of(call: Call) -> Any:
    """What the call returns; None: it is refused."""
    with suppress(*call.errors), call.context():
        return call.function(**call.arguments)


def test_the_stand_in_sees_what_is_left_in_it() -> None:
    with CallersPool() as pool:
        kept, out = torch.empty(3), torch.empty(4)
        torch.empty(5)
        viewed = out[1:]
    assert pool.num_allocations == 3
    assert pool.num_untracked(viewed) == 1
    del kept
    assert pool.num_untracked([out]) == 0


def test_another_thread_allocates_and_gives_what_was_asked_for() -> None:
    threads = []

    def make() -> tuple[torch.Tensor, ...]:
        threads.append(threading.get_ident())
        q = torch.arange(6.0).view(2, 3)
        return q.new_zeros((2, 2), dtype=torch.int32), q.new_empty(()).expand(4), q.T, torch.ones(2)

    with CallersPool() as pool:
        with own_memory(CPU):
            found = make()
            of_numbers = torch.tensor([3, 1])
        copy = kept_copy(found[2])
    assert threads == [threading.get_ident()], "only memory comes from elsewhere"
    assert pool.num_allocations == 0
    assert torch.equal(found[0], torch.zeros((2, 2), dtype=torch.int32))
    assert found[1].stride() == (0,)
    assert of_numbers.tolist() == [3, 1]
    assert torch.equal(copy, torch.arange(6.0).view(2, 3).T)
    assert copy.stride() == found[2].stride()


def test_what_goes_wrong_there_is_raised_here() -> None:
    with pytest.raises(RuntimeError, match="negative dimension"), own_memory(CPU):
        torch.empty(-1)


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_a_call_leaves_nothing_but_its_outputs_in_the_callers_pool(
    make: Any, launches: Launches
) -> None:
    num_served = 0
    for call in make():
        results = []
        with CallersPool() as pool:
            results += [result_of(call) for _ in range(2)]
        num_served += len(launches.take())
        assert pool.num_untracked((results, call.arguments)) == 0, call.name
    assert num_served


MADE = {
    "paged_decode": "v_scale tensor",
    "shared_prefix_decode": "k_scale tensor",
    "gdn_decode": "fused, no bias",
    "recurrence": "no gate",
    "fp4": "nothing",
}
"""Calls that make a tensor in the place of one that is not given, which launches read."""


@pytest.mark.parametrize("name", MADE)
def test_a_prepared_call_reads_copies_of_what_the_call_made(
    name: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = next(call for call in CALLS[name]() if call.name == MADE[name])
    made: list[StorageWeakRef] = []

    def watched(function: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = function(*args, **kwargs)
            if _get_current_dispatch_mode() is None:  # else a launcher is built
                made.append(StorageWeakRef(result.untyped_storage()))
            return result

        return make

    for holder, function in (
        *((torch.Tensor, function) for function in ("new_full", "new_zeros")),
        *((torch, function) for function in ("zeros_like", "ones")),
    ):
        monkeypatch.setattr(holder, function, watched(getattr(holder, function)))
    expected = outcome(call, launches)
    outcome(call, launches)
    gc.collect()
    assert len(made) >= 2
    assert all(ref.expired() for ref in made)
    assert is_prepared(call, launches)
    assert outcome(call, launches) == expected, "and they have its values"


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_nothing_of_the_callers_is_alive_after_its_calls(make: Any, launches: Launches) -> None:
    forget()
    calls = make()
    for call in calls:
        for _ in range(4):
            outcome(call, launches)
    assert any(is_prepared(call, launches) for call in calls)
    theirs = storages_of([call.arguments for call in calls])
    del calls, call
    gc.collect()
    assert sum(not ref.expired() for ref in theirs) == 0


def test_constants_serve_while_the_prepared_call_does(launches: Launches) -> None:
    """The address that the launch reads holds the value until the call is forgotten."""
    call = next(call for call in CALLS["paged_decode"]() if call.name == "v_scale tensor")
    for _ in range(3):
        outcome(call, launches)
    module = import_module("tilescout.ops.paged_decode")
    (constant,) = module._calls._last.launches.held
    assert constant.tolist() == [0.5]
    kept = StorageWeakRef(constant.untyped_storage())
    del constant
    gc.collect()
    assert not kept.expired()
    forget()
    gc.collect()
    assert kept.expired()
