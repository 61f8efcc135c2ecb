"""Prepared calls on a GPU: the kernels of the long way, on whatever tensors, streams and graphs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from decode_calls import assert_right, problem_of
from gpu_calls import CASES, LENGTHS, decode_arguments, results, step_arguments
from gpu_modes import waiting_forbidden
from tilescout import ops
from tilescout.kernels.paged_decode import reference as ref
from tilescout.ops import prepared

pytestmark = pytest.mark.gpu
decode, gdn = (import_module(f"tilescout.ops.{name}") for name in ("paged_decode", "gdn"))


@pytest.fixture(autouse=True)
def _nothing_prepared() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    for calls in prepared._all:
        calls.forget()


@pytest.mark.parametrize(("function", "make"), CASES.values(), ids=CASES)
def test_other_tensors_give_what_the_long_way_gives(function, make) -> None:
    expected = []
    for seed in range(5):
        forget()
        expected.append([x.clone() for x in results(function, make(seed))])
    forget()
    given = [make(seed) for seed in range(5)]
    torch.cuda.synchronize()
    with waiting_forbidden():
        found = [results(function, arguments) for arguments in given]
    assert any(len(calls) for calls in prepared._all)
    for ours, theirs in zip(found, expected, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x, y)


def test_tensors_of_another_kind_go_their_own_way() -> None:
    inputs = ref.paged_inputs(problem_of(), LENGTHS, device="cuda", seed=1)
    kinds = []
    for shift in (0, 1, 8):
        room = inputs.q.new_zeros(inputs.q.numel() + shift)
        kinds.append(room[shift:].view(inputs.q.shape).copy_(inputs.q))
    wide = inputs.q.new_zeros((*inputs.q.shape[:2], inputs.q.shape[2] + 16))
    wide[..., : inputs.q.shape[2]] = inputs.q
    kinds.append(wide[..., : inputs.q.shape[2]])
    arguments = {**decode_arguments(1), "return_lse": False}
    for q in [*kinds, *kinds, *kinds, *reversed(kinds)]:
        out = ops.paged_decode(**{**arguments, "q": q})
        assert_right(inputs, out, None)
    assert len(decode._calls) >= 2


def test_streams_and_threads_do_not_share_scratch() -> None:
    arguments = [decode_arguments(seed) for seed in range(4)]
    expected = [ops.paged_decode(**given) for given in arguments]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                out, lse = ops.paged_decode(**arguments[i])
            same = torch.equal(out, expected[i][0]) and torch.equal(lse, expected[i][1])
        if not same:
            wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_takes_the_launcher_over() -> None:
    first, second = decode_arguments(0), decode_arguments(1)
    out = torch.empty_like(first["q"])
    first, second = ({**x, "out": out, "return_lse": False} for x in (first, second))
    expected = []
    for given in (first, second):
        for _ in range(3):
            ops.paged_decode(**given)
        expected.append(out.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.paged_decode(**first)
    # Eager calls of the same kind go on, with a launcher of their own.
    for _ in range(4):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected[0])
        ops.paged_decode(**second)
        assert torch.equal(out, expected[1])


def test_a_profiler_sees_every_launch() -> None:
    import triton

    given = step_arguments(0)
    for _ in range(3):
        ops.gdn.gdn_decode(**given)
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        ops.gdn.gdn_decode(**given)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["gdn_decode_kernel"]
    ops.gdn.gdn_decode(**given)
    assert len(seen) == 1
