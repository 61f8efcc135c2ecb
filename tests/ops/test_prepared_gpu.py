"""Prepared calls on a GPU: the kernels of the long way, on whatever tensors, streams and graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from decode_calls import assert_right, problem_of, semantics_arguments, table_arguments
from gpu_modes import waiting_forbidden
from tilescout import ops
from tilescout.kernels.paged_decode import reference as ref
from tilescout.ops import prepared

pytestmark = pytest.mark.gpu
decode, gdn = (import_module(f"tilescout.ops.{name}") for name in ("paged_decode", "gdn"))
LENGTHS = [50, 7, 64]

Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def _nothing_prepared() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    for calls in prepared._all:
        calls.forget()


def decode_arguments(seed: int, **changes: Any) -> Arguments:
    is_dense = changes.pop("is_dense", False)
    inputs = ref.paged_inputs(
        problem_of(**changes), LENGTHS, device="cuda", seed=seed, is_dense=is_dense
    )
    return {
        **{"q": inputs.q, "kv_cache": (inputs.k_cache, inputs.v_cache)},
        **table_arguments(inputs),
        **semantics_arguments(inputs),
        "return_lse": True,
    }


def mla_arguments(seed: int) -> Arguments:
    sizes = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
    inputs = ref.paged_inputs(problem_of(**sizes), LENGTHS, device="cuda", seed=seed)
    rows = {"q": inputs.q, "kv_cache": inputs.k_cache.squeeze(2), "sm_scale": inputs.sm_scale}
    return {**rows, **table_arguments(inputs), "return_lse": True}


def step_arguments(seed: int, **options: Any) -> Arguments:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    return {
        **{"q": randn(3, 1, 2, 64), "k": randn(3, 1, 2, 64), "v": randn(3, 1, 4, 64)},
        **{"g": -randn(3, 1, 4).abs(), "beta": randn(3, 1, 4).sigmoid()},
        "state": randn(3, 4, 64, 64),
        **options,
    }


def rule_arguments(seed: int, **options: Any) -> Arguments:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    return {
        **{"q": randn(1, 300, 2, 64), "k": randn(1, 300, 2, 64), "v": randn(1, 300, 4, 64)},
        **{"g": -randn(1, 300, 4).abs().float(), "beta": randn(1, 300, 4).sigmoid()},
        **{"use_qk_l2norm_in_kernel": True, "output_final_state": True},
        **options,
    }


def prefix_arguments(seed: int) -> Arguments:
    inputs = ref.paged_inputs(problem_of(), LENGTHS, device="cuda", seed=seed)
    indptr, indices, last = inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len
    assert indptr is not None
    assert last is not None
    return {
        **{"q": inputs.q, "kv_cache": (inputs.k_cache, inputs.v_cache), "return_lse": True},
        "prefix": ops.PageTable.csr(indptr[:2], indices, last[:1]),  # that of the first request
        "suffix": ops.PageTable.csr(indptr, indices, last),
    }


def merge_arguments(seed: int) -> Arguments:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = {"out_a": (7, 4, 64), "lse_a": (7, 4), "out_b": (7, 4, 64), "lse_b": (7, 4)}
    return {
        name: torch.randn(shape, device="cuda", generator=generator)
        for name, shape in shapes.items()
    }


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Arguments]]] = {
    "paged_decode": (ops.paged_decode, decode_arguments),
    "a dense table": (ops.paged_decode, lambda seed: decode_arguments(seed, is_dense=True)),
    "fp8, a cap": (
        ops.paged_decode,
        lambda seed: decode_arguments(seed, kv_dtype="float8_e4m3fn", has_soft_cap=True),
    ),
    "three query tokens": (ops.paged_decode, lambda seed: decode_arguments(seed, query_len=3)),
    "MLA": (ops.mla_decode, mla_arguments),
    "a shared prefix": (ops.shared_prefix_decode, prefix_arguments),
    "a merge": (ops.merge_state, merge_arguments),
    "gdn_decode": (ops.gdn.gdn_decode, step_arguments),
    "the recurrence": (ops.gdn.fused_recurrent_gated_delta_rule, rule_arguments),
    "chunks": (ops.gdn.chunk_gated_delta_rule, rule_arguments),
}


def results(function: Callable[..., Any], arguments: Arguments) -> list[torch.Tensor]:
    """What the call returns and what it writes into."""
    found = function(**arguments)
    tensors = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    return [*tensors, *([arguments["state"]] if "state" in arguments else [])]


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
