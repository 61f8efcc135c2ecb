"""The Triton kernel in the interpreter against the fp32 reference, over a pairwise grid."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.registry import template

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
    # The interpreter takes log2(0) = -inf of a request without tokens through numpy.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

PLAIN = {
    "block_n": 32,
    "block_m": 4,
    "num_warps": 4,
    "num_stages": 2,
    "prefetch_pages": False,
    "swap_ab": False,
    "kv_eviction": "evict_normal",
    "launch_pdl": False,
    "split_rule": "none",
}


def config(**changes: object) -> Config:
    return Config.of("triton", {**PLAIN, **changes})


COUNT = {"split_rule": "count", "num_splits": 3}
STREAM = {"split_rule": "stream", "ctas_per_sm": 1}
SIZE = {"split_rule": "size", "split_tokens": 64}


@pytest.fixture(autouse=True)
def _shim():
    import interpreter_shim

    interpreter_shim.install()


def run(problem, chosen, inputs, *, with_lse=True) -> PagedDecodeOutputs:
    outputs = ref.make_outputs(problem, inputs)
    lse = torch.full(inputs.q.shape[:2], math.nan) if with_lse else None
    outputs = PagedDecodeOutputs(out=outputs.out, lse=lse)
    template("paged_decode", "triton").build(problem, chosen, inputs).launch(inputs, outputs)
    return outputs


def problem_of(
    group: int = 4, kv_heads: int = 2, head_dim: int = 64, page: int = 16, dtype: str = "float16"
) -> PagedDecodeProblem:
    return PagedDecodeProblem(3, 200, group * kv_heads, kv_heads, head_dim, page, dtype)


# Every pair of (group, page size, head_dim, dtype, lengths, split and merge, operand order) values
# stands in one of these cases at least; test_grid_covers_every_pair holds that.
LENGTHS = {
    "ragged": [77, 0, 200],
    "ones": [1, 1, 33],
    "full tiles": [64, 128, 96],
}
SPLITS = {
    "whole": {},
    "count, kernel": {**COUNT, "merge": "kernel"},
    "count, last block": {**COUNT, "merge": "last_block"},
    "size, kernel": {**SIZE, "merge": "kernel"},
    "size, last block": {**SIZE, "merge": "last_block"},
    "stream, kernel": {**STREAM, "merge": "kernel"},
    "stream, last block": {**STREAM, "merge": "last_block"},
}
AXES = {
    "group": [1, 3, 4, 7, 16],
    "page": [1, 12, 16, 64, 256],
    "head_dim": [64, 128, 256],
    "dtype": ["bfloat16", "float16"],
    "lengths": list(LENGTHS),
    "split": list(SPLITS),
    "swap_ab": [False, True],
    "prefetch_pages": [False, True],
    "block_m": [1, 4, 16],
}


def pairwise() -> list[dict[str, object]]:
    """A small covering array: greedy, deterministic, every pair of values of two axes once."""
    names = list(AXES)
    todo = {
        (a, x, b, y)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for x in AXES[a]
        for y in AXES[b]
    }
    cases = []
    while todo:
        a, x, b, y = min(todo, key=str)
        case: dict[str, object] = {a: x, b: y}
        for name in names:
            if name in case:
                continue

            def gain(value, name=name, case=case, todo=todo) -> int:
                return sum(
                    (p, u, q, w) in todo
                    for other, chosen in case.items()
                    for p, u, q, w in (
                        (name, value, other, chosen)
                        if names.index(name) < names.index(other)
                        else (other, chosen, name, value),
                    )
                )

            case[name] = max(AXES[name], key=gain)
        cases.append({name: case[name] for name in names})
        todo -= pairs_of(cases[-1])
    return cases


def pairs_of(case: dict[str, object]) -> set[tuple[object, ...]]:
    names = list(AXES)
    return {(a, case[a], b, case[b]) for i, a in enumerate(names) for b in names[i + 1 :]}


CASES = pairwise()


def test_grid_covers_every_pair() -> None:
    covered = set().union(*map(pairs_of, CASES))
    for i, a in enumerate(AXES):
        for b in list(AXES)[i + 1 :]:
            assert {(x, y) for (p, x, q, y) in covered if (p, q) == (a, b)} == {
                (x, y) for x in AXES[a] for y in AXES[b]
            }


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_matches_reference(case: dict) -> None:
    problem = problem_of(
        group=case["group"],
        kv_heads=1 if case["group"] > 4 else 2,
        head_dim=case["head_dim"],
        page=case["page"],
        dtype=case["dtype"],
    )
    inputs = ref.paged_inputs(
        problem, LENGTHS[case["lengths"]], device="cpu", seed=1, num_unused_pages=2, poison=True
    )
    chosen = config(
        **SPLITS[case["split"]],
        swap_ab=case["swap_ab"],
        prefetch_pages=case["prefetch_pages"],
        block_m=case["block_m"],
    )
    outputs = run(problem, chosen, inputs)
    assert ref.compare(problem, inputs, outputs).reason is None
    without_lse = run(problem, chosen, inputs, with_lse=False)
    assert torch.equal(outputs.out, without_lse.out)


@pytest.mark.parametrize("damage", ["zeros", "half", "one head", "lse"])
def test_comparison_can_fail(damage: str) -> None:
    problem = problem_of()
    inputs = ref.paged_inputs(problem, LENGTHS["ragged"], device="cpu", seed=1)
    outputs = run(problem, config(), inputs)
    assert ref.compare(problem, inputs, outputs).reason is None
    if damage == "zeros":
        outputs.out.zero_()
    elif damage == "half":
        outputs.out.mul_(0.97)
    elif damage == "one head":
        outputs.out[2, 5] = outputs.out[2, 4]
    else:
        outputs.lse[0] += 0.02
    assert ref.compare(problem, inputs, outputs).reason is not None


@pytest.mark.parametrize("split", SPLITS)
def test_requests_without_tokens_give_zero_and_minus_infinity(split: str) -> None:
    problem = problem_of()
    inputs = ref.paged_inputs(problem, [0, 40, 0], device="cpu", seed=2, poison=True)
    outputs = run(problem, config(**SPLITS[split]), inputs)
    for request in (0, 2):
        assert torch.equal(outputs.out[request], torch.zeros_like(outputs.out[request]))
        assert torch.isneginf(outputs.lse[request]).all()
    assert torch.isfinite(outputs.lse[1]).all()


def test_logits_far_below_zero_keep_their_value() -> None:
    # All logits are near -16,000: a finite sentinel instead of -inf would swallow them.
    problem = problem_of()
    inputs = ref.paged_inputs(problem, [70, 3, 33], device="cpu", seed=3)
    inputs.q.fill_(16.0)
    inputs.k_cache.fill_(-125.0)
    outputs = run(problem, config(**SPLITS["count, last block"]), inputs)
    assert ref.compare(problem, inputs, outputs).reason is None


def test_page_order_does_not_matter() -> None:
    problem = problem_of(page=12)
    inputs = ref.paged_inputs(problem, [77, 0, 200], device="cpu", seed=4)
    order = torch.randperm(inputs.k_cache.shape[0], generator=torch.Generator().manual_seed(9))
    moved = replace(
        inputs,
        k_cache=inputs.k_cache[order],
        v_cache=inputs.v_cache[order],
        kv_indices=order.argsort()[inputs.kv_indices.long()].to(torch.int32),
    )
    first, second = (run(problem, config(), i) for i in (inputs, moved))
    assert ref.outputs_equal(first, second)


def test_request_alone_equals_request_in_a_batch_under_a_fixed_split_size() -> None:
    problem = problem_of()
    inputs = ref.paged_inputs(problem, [77, 30, 200], device="cpu", seed=5)
    first, end = inputs.kv_indptr[2:4].tolist()
    alone = replace(
        inputs,
        q=inputs.q[2:],
        kv_indptr=torch.tensor([0, end - first], dtype=torch.int32),
        kv_indices=inputs.kv_indices[first:end],
        kv_last_page_len=inputs.kv_last_page_len[2:],
    )
    chosen = config(**SPLITS["size, kernel"])
    batched = run(problem, chosen, inputs)
    single = run(PagedDecodeProblem(1, 200, 8, 2, 64, 16, "float16"), chosen, alone)
    assert torch.equal(batched.out[2:], single.out)
    assert torch.equal(batched.lse[2:], single.lse)


def test_page_table_that_does_not_start_at_zero_and_strided_q() -> None:
    problem = problem_of()
    inputs = ref.paged_inputs(problem, [40, 50, 60], device="cpu", seed=6)
    packed = torch.zeros(3, 3, *inputs.q.shape[1:], dtype=inputs.q.dtype)
    packed[:, 1] = inputs.q
    shifted = replace(
        inputs,
        q=packed[:, 1],
        kv_indptr=inputs.kv_indptr + 2,
        kv_indices=torch.cat([inputs.kv_indices.new_full((2,), -(10**6)), inputs.kv_indices]),
    )
    outputs = run(problem, config(**SPLITS["size, last block"]), shifted)
    assert ref.outputs_equal(outputs, run(problem, config(**SPLITS["size, last block"]), inputs))


def test_inputs_are_not_modified_and_a_launcher_serves_again() -> None:
    problem = problem_of()
    inputs = ref.paged_inputs(problem, [77, 0, 200], device="cpu", seed=7)
    before = [
        t.clone()
        for t in (inputs.q, inputs.k_cache, inputs.v_cache, inputs.kv_indptr, inputs.kv_indices)
    ]
    launcher = template("paged_decode", "triton").build(
        problem, config(**SPLITS["count, last block"]), inputs
    )
    results = []
    for _ in range(3):
        outputs = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, outputs)
        results.append(outputs)
    assert all(ref.outputs_equal(results[0], other) for other in results[1:])
    after = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.kv_indptr, inputs.kv_indices)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert ref.compare(problem, inputs, results[0]).reason is None
