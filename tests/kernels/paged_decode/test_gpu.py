"""The compiled kernel on a GPU: values, graph replay, pools past 2^31 elements, repeatability."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from tilescout.kernels.paged_decode import PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.paged_decode import triton_space
from triton.runtime.errors import OutOfResources

pytestmark = pytest.mark.gpu

SHAPES = [
    pytest.param(PagedDecodeProblem(4, 700, 32, 8, 128, 16, "bfloat16"), id="llama-8b"),
    pytest.param(PagedDecodeProblem(3, 1000, 8, 1, 128, 1, "bfloat16"), id="group-8-page-1"),
    pytest.param(PagedDecodeProblem(5, 333, 28, 4, 128, 48, "float16"), id="group-7-page-48"),
    pytest.param(PagedDecodeProblem(2, 513, 4, 4, 64, 256, "bfloat16"), id="mha-d64"),
    pytest.param(PagedDecodeProblem(3, 900, 32, 2, 256, 12, "float16"), id="group-16-d256"),
    pytest.param(PagedDecodeProblem(17, 64, 6, 2, 64, 7, "bfloat16"), id="group-3-page-7"),
]


def run(problem, chosen, inputs, *, launcher=None):
    outputs = ref.make_outputs(problem, inputs)
    lse = torch.full(inputs.q.shape[:2], math.nan, device="cuda")
    outputs = PagedDecodeOutputs(outputs.out, lse)
    launcher = launcher or template("paged_decode", "triton").build(problem, chosen, inputs)
    launcher.launch(inputs, outputs)
    torch.cuda.synchronize()
    return outputs


@pytest.mark.parametrize("problem", SHAPES)
def test_sampled_configs_match_reference_and_repeat(problem, h200) -> None:
    space = triton_space(problem, h200)
    rng = random.Random(0)
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    launched = 0
    while launched < 8:
        chosen = space.sample(rng)
        try:
            outputs = run(problem, chosen, inputs)
        except OutOfResources:
            continue
        launched += 1
        assert ref.compare(problem, inputs, outputs).reason is None, chosen
        assert ref.outputs_equal(outputs, run(problem, chosen, inputs)), chosen


@pytest.mark.parametrize("merge", ["kernel", "last_block"])
@pytest.mark.parametrize("rule", ["count", "size", "stream"])
@pytest.mark.parametrize("launch_pdl", [False, True])
def test_a_captured_graph_serves_other_lengths(launch_pdl, rule, merge, h200) -> None:
    problem = PagedDecodeProblem(4, 1024, 32, 8, 128, 16, "bfloat16")
    space = triton_space(problem, h200)
    values = {**space.default.as_dict(), "split_rule": rule, "merge": merge}
    values["launch_pdl"] = launch_pdl
    if rule != "count":
        del values["num_splits"]
        values |= {"split_tokens": 128} if rule == "size" else {"ctas_per_sm": 2}
    full = ref.paged_inputs(problem, [1024] * 4, device="cuda", seed=3)
    launcher = template("paged_decode", "triton").build(problem, space.config(values), full)
    launcher.partial_out.fill_(math.nan)
    launcher.partial_lse.fill_(math.nan)
    outputs = ref.make_outputs(problem, full)
    launcher.launch(full, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(full, outputs)
    for lengths in ([1024] * 4, [5, 0, 1000, 77], [0, 0, 0, 1]):
        pages = [-(-n // 16) for n in lengths]
        full.kv_indptr.copy_(torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()]))
        last = [n - 16 * (p - 1) if p else 0 for n, p in zip(lengths, pages, strict=True)]
        full.kv_last_page_len.copy_(torch.tensor(last))
        outputs.out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert ref.compare(problem, full, outputs).reason is None, lengths


@pytest.mark.slow
def test_a_pool_past_two_to_the_31_elements(h200) -> None:
    problem = PagedDecodeProblem(2, 4096, 32, 8, 128, 16, "bfloat16")
    inputs = ref.paged_inputs(problem, [4096, 100], device="cuda", seed=4)
    used = inputs.k_cache.shape[0]
    num_pages = 2**31 // (2 * inputs.k_cache[0].numel()) + 4096
    pool = torch.empty((num_pages, 2, 16, 8, 128), dtype=torch.bfloat16, device="cuda")
    pool[-used:, 0], pool[-used:, 1] = inputs.k_cache, inputs.v_cache
    moved = replace(
        inputs,
        k_cache=pool[:, 0],
        v_cache=pool[:, 1],
        kv_indices=inputs.kv_indices + (num_pages - used),
    )
    chosen = triton_space(problem, h200).default
    assert ref.outputs_equal(run(problem, chosen, moved), run(problem, chosen, inputs))


def test_misaligned_strides_are_served(h200) -> None:
    problem = PagedDecodeProblem(3, 200, 8, 2, 64, 16, "bfloat16")
    inputs = ref.paged_inputs(problem, [200, 7, 64], device="cuda", seed=5)
    padded = torch.zeros((*inputs.k_cache.shape[:-1], 65), dtype=torch.bfloat16, device="cuda")
    padded[..., :64] = inputs.k_cache
    odd = replace(inputs, k_cache=padded[..., :64])
    outputs = run(problem, triton_space(problem, h200).default, odd)
    assert ref.compare(problem, inputs, outputs).reason is None
