"""The compiled MLA kernel on a GPU: every pair of choices, sampled configs, graphs, big pools."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import mla_grid as grid
import pytest
import torch
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.covering import covering_sample
from tilescout.search_spaces.paged_decode_mla import mla_space
from triton.runtime.errors import OutOfResources

pytestmark = pytest.mark.gpu

LENGTHS = {
    "ragged": [77, 500, 0, 131],
    "fewer than query tokens": [1, 3, 6, 33],
    "whole tiles": [64, 256, 128, 512],
    "one long": [16, 1500, 5, 64],
}
SPACE = grid.case_space(
    lengths=tuple(LENGTHS),
    heads=(16, 5, 20, 128),
    query_lens=(1, 2, 4, 8),
    pages=(64, 1, 7, 16, 528, 1024),
)
CASES = covering_sample(SPACE, 80, seed=0).configs
LATENT = PagedDecodeProblem(4, 1500, 16, 1, 576, 64, "bfloat16", head_dim_v=512)
SHAPES = {
    "16": LATENT,
    "128": replace(LATENT, num_qo_heads=128),
    "8, page 1": replace(LATENT, num_qo_heads=8, page_size=1, dtype="float16", kv_dtype="float16"),
    "20 x 4, page 48": replace(LATENT, num_qo_heads=20, query_len=4, page_size=48),
    "32, e4m3": replace(LATENT, num_qo_heads=32, kv_dtype="float8_e4m3fn"),
}


def run(problem, chosen, inputs, *, with_lse=True) -> PagedDecodeOutputs:
    outputs = ref.make_outputs(problem, inputs)
    if with_lse:
        lse = torch.full(inputs.q.shape[:2], math.nan, device="cuda")
        outputs = replace(outputs, lse=lse)
    template("paged_decode", "triton_mla").build(problem, chosen, inputs).launch(inputs, outputs)
    torch.cuda.synchronize()
    return outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.config_id)
def test_matches_reference(case: Config) -> None:
    values = case.as_dict()
    lengths = LENGTHS[values["lengths"]]
    problem = grid.problem_of(values, lengths)
    inputs = grid.inputs_of(values, lengths, device="cuda")
    before = [t.clone() for t in (inputs.q, inputs.kv_indices)]
    launcher = template("paged_decode", "triton_mla").build(problem, grid.config_of(values), inputs)
    first, second = (grid.outputs_of(values, inputs) for _ in range(2))
    launcher.launch(inputs, first)
    launcher.launch(inputs, second)
    assert ref.compare(problem, inputs, first).reason is None, case
    assert ref.outputs_equal(first, second), case
    assert all(map(torch.equal, before, (inputs.q, inputs.kv_indices)))


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_configs_match_reference_and_repeat(shape: str, h200) -> None:
    problem = SHAPES[shape]
    space = mla_space(problem, h200)
    rng = random.Random(0)
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    chosen = [*space.valid_seeds()[:4], *(space.sample(rng) for _ in range(8))]
    launched = 0
    for config in chosen:
        try:
            outputs = run(problem, config, inputs)
        except OutOfResources:
            continue
        launched += 1
        assert ref.compare(problem, inputs, outputs).reason is None, config
        assert ref.outputs_equal(outputs, run(problem, config, inputs)), config
    assert launched >= 8


@pytest.mark.parametrize("launch_pdl", [False, True])
@pytest.mark.parametrize("merge", ["kernel", "last_block"])
@pytest.mark.parametrize("rule", ["count", "size", "stream"])
def test_a_captured_graph_serves_other_lengths(rule, merge, launch_pdl, h200) -> None:
    problem = PagedDecodeProblem(4, 1024, 16, 1, 576, 64, "bfloat16", head_dim_v=512)
    case = {**SPACE.default.as_dict(), "split_rule": rule, "merge": merge, "launch_pdl": launch_pdl}
    full = ref.paged_inputs(problem, [1024] * 4, device="cuda", seed=3)
    launcher = template("paged_decode", "triton_mla").build(problem, grid.config_of(case), full)
    launcher.partial_out.fill_(math.nan)
    launcher.partial_lse.fill_(math.nan)
    outputs = ref.make_outputs(problem, full)
    launcher.launch(full, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(full, outputs)
    for lengths in ([1024] * 4, [5, 0, 1000, 77], [0, 0, 0, 1]):
        pages = [-(-n // 64) for n in lengths]
        full.kv_indptr.copy_(torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()]))
        last = [n - 64 * (p - 1) if p else 0 for n, p in zip(lengths, pages, strict=True)]
        full.kv_last_page_len.copy_(torch.tensor(last))
        outputs.out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert ref.compare(problem, full, outputs).reason is None, lengths


@pytest.mark.slow
@pytest.mark.parametrize("page_tiles", [False, True])
def test_a_pool_past_two_to_the_31_elements(page_tiles: bool, h200) -> None:
    problem = PagedDecodeProblem(2, 4096, 16, 1, 576, 64, "bfloat16", head_dim_v=512)
    inputs = ref.paged_inputs(problem, [4096, 100], device="cuda", seed=4)
    cache = inputs.k_cache
    num_pages = 2**31 // cache[0].numel() + 4096
    pool = torch.empty((num_pages, *cache.shape[1:]), dtype=torch.bfloat16, device="cuda")
    pool[-cache.shape[0] :] = cache
    moved = replace(
        inputs,
        k_cache=pool,
        v_cache=pool[..., :512],
        kv_indices=inputs.kv_indices + (num_pages - cache.shape[0]),
    )
    chosen = mla_space(problem, h200).default.replace(page_tiles=page_tiles)
    assert ref.outputs_equal(run(problem, chosen, moved), run(problem, chosen, inputs))
