"""Scratch memory on a GPU: in no pool of the caller's, and of one graph or of graphs in turn."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from gpu_calls import CASES, Arguments, decode_arguments, results
from prepared_outcomes import forget
from tilescout import ops
from tilescout.ops.launchers import LauncherCache

pytestmark = pytest.mark.gpu
MODULES = ("attention_states", "decode_launch", "fp4_launch", "gdn", "gdn_chunk")
# What torch does itself when it first replays: it captures nothing, to keep a pool of memory alive
# (CUDAGraphTreeManager), and records the warning, which cannot be recorded where it is an error.
captures_nothing_first = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")


def fp4_arguments(seed: int) -> Arguments:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def randn(heads: int) -> torch.Tensor:
        shape = (1, heads, 256, 128)
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    return {"q": randn(4), "k": randn(2), "v": randn(2), "return_lse": True}


def scaled_arguments(seed: int) -> Arguments:
    """One scale on the device, the other a number, which becomes a tensor."""
    given = decode_arguments(seed, kv_dtype="float8_e4m3fn")
    return {**given, "k_scale": torch.full((1,), 0.5, device="cuda"), "v_scale": 2.0}


ALL = {
    **CASES,
    "a scale on the device": (ops.paged_decode, scaled_arguments),
    "fp4_attention": (ops.fp4_attention, fp4_arguments),
}


@pytest.fixture(autouse=True)
def _nothing_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first call of every test builds its launchers."""
    forget()
    # torch's own: cuBLAS takes memory for good at the first product, from the pool in force then.
    ones = torch.ones(2, 16, 16, device="cuda")
    torch.bmm(ones, ones)
    for name in MODULES:
        module = import_module(f"tilescout.ops.{name}")
        monkeypatch.setattr(module, "_launchers", LauncherCache())
    yield
    forget()


def blocks_in(pool_id: tuple[int, int]) -> set[int]:
    """Addresses of the allocations that are alive in a pool."""
    found = set()
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) == tuple(pool_id):
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found.add(address)
                address += block["size"]
    return found


def starts_of(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize(("function", "make"), ALL.values(), ids=ALL)
def test_a_call_leaves_nothing_but_its_outputs_in_a_memory_pool(function, make) -> None:
    given = make(0)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        witness = torch.empty(1, device="cuda")
        found = [results(function, given) for _ in range(4)]
    assert witness.data_ptr() in blocks_in(pool.id), "the pool is in force and seen"
    outputs = starts_of([witness, *(x for each in found for x in each)])
    assert blocks_in(pool.id) <= outputs
    del witness, found  # before the pool


@captures_nothing_first
@pytest.mark.parametrize(("function", "make"), ALL.values(), ids=ALL)
def test_inductor_replays_what_was_never_called_before(function, make) -> None:
    given = make(0)
    names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    first = names[0]

    def block(x: torch.Tensor, state: torch.Tensor | None) -> Any:
        arguments = {**given, first: x * 1.0}
        if state is not None:
            arguments["state"] = state.clone()  # what is written belongs to the graph
        # Twice, as layers do: what the first call keeps must not lie in the graph's pool.
        one, two = function(**arguments), function(**arguments)
        return (*as_tuple(one), *as_tuple(two))

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    run = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    state = given.get("state")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            found = [x.clone() for x in run(given[first], state) if x is not None]
        expected = [x for x in block(given[first], state) if x is not None]
    assert counters["cudagraph_skips"] == 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class Captured:
    """A graph of a call, its output, and what an eager call before it gave."""

    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    expected: torch.Tensor
    inputs: Arguments
    """Read by every replay: they live as long as the graph."""

    def replay(self) -> None:
        """On the current stream."""
        self.graph.replay()

    def is_right(self) -> bool:
        """Whether the output is what the eager call gave, bit for bit."""
        return torch.equal(self.out, self.expected)


def captured(arguments: Arguments, **options: Any) -> Captured:
    """The graph of a call after an eager one."""
    out = torch.empty_like(arguments["q"])
    given = {**arguments, "out": out, "return_lse": False}
    stream = options.get("stream")
    with torch.cuda.stream(stream):
        ops.paged_decode(**given)
    torch.cuda.synchronize()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        ops.paged_decode(**given)
    out.zero_()
    return Captured(graph, out, expected, arguments)


def launchers() -> LauncherCache:
    found: LauncherCache = import_module("tilescout.ops.decode_launch")._launchers
    return found


def test_a_graph_takes_nothing_of_ours_from_the_pool_that_it_is_given() -> None:
    pool = torch.cuda.graph_pool_handle()
    first = captured(decode_arguments(0), pool=pool)
    assert blocks_in(pool) == set()
    first.replay()
    assert first.is_right()
    # Another graph of the pool may use its memory as it likes, and the first one may go.
    second = captured(decode_arguments(1), pool=pool)
    for one in (second, first) * 3:
        one.out.zero_()
        one.replay()
        assert one.is_right()
    del first, one
    gc.collect()
    second.out.zero_()
    second.replay()
    assert second.is_right()


def test_graphs_of_one_stream_replay_one_after_the_other() -> None:
    """They share one launcher, and nothing that it left concerns the next one."""
    graphs = [captured(decode_arguments(seed)) for seed in range(3)]
    assert len(launchers()._captured) == 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in (0, 1, 2, 2, 1, 0, 1, 0, 2) * 20:
            graphs[i].replay()
    torch.cuda.synchronize()
    assert all(graph.is_right() for graph in graphs)


def test_graphs_of_streams_of_their_own_replay_at_the_same_time() -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    graphs = [
        captured(decode_arguments(seed), stream=stream) for seed, stream in enumerate(streams)
    ]
    owners = {id(owned.launcher) for owned in launchers()._captured.values()}
    assert len(owners) == 3
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(streams[i]):
            for _ in range(200):
                graphs[i].replay()
            if not graphs[i].is_right():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
