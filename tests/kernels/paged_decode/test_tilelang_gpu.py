"""The TileLang templates on a GPU: values, semantics, graph replay, pools past 2^31 elements.

Most of the time is the compiler's. In one process all kernels are compiled on every core first;
under pytest-xdist each test compiles its own, which keeps the cores as busy.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from dataclasses import replace

import pytest
import torch
from devices import H200
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.paged_decode import SPACES
from tilescout.tuner.compile_pool import CompilePool

pytestmark = pytest.mark.gpu

NAMES = ["tilelang_gather", "tilelang_page"]
LLAMA = PagedDecodeProblem(4, 700, 32, 8, 128, 16, "bfloat16")
SHAPES = {
    "llama-8b": LLAMA,
    "page-128-hnd": replace(LLAMA, page_size=128, kv_layout="HND"),
    "group-8-page-1": PagedDecodeProblem(3, 1000, 8, 1, 128, 1, "bfloat16"),
    "group-7-page-48": PagedDecodeProblem(5, 333, 28, 4, 128, 48, "float16"),
    "mha-d64": PagedDecodeProblem(2, 513, 4, 4, 64, 256, "bfloat16"),
    "group-16-d256": PagedDecodeProblem(3, 900, 32, 2, 256, 64, "float16"),
    "group-64": PagedDecodeProblem(2, 600, 64, 1, 128, 64, "bfloat16"),
    "window-cap-sinks": replace(LLAMA, window_left=100, has_soft_cap=True, has_sinks=True),
    "window-of-one": replace(LLAMA, window_left=0, page_size=64),
}
CASES = [
    pytest.param(name, problem, id=f"{name}-{shape}")
    for name in NAMES
    for shape, problem in SHAPES.items()
    if name == "tilelang_gather" or problem.page_size % 16 == 0
]
NUM_CONFIGS = 2
MATRIX = PagedDecodeProblem(5, 1024, 32, 8, 128, 128, "bfloat16")
"""What every way to load and every tile of the matrix units are run on."""


def sampled(name, problem):
    space, rng = SPACES[name](problem, H200), random.Random(0)
    return [space.default, *(space.sample(rng) for _ in range(NUM_CONFIGS))]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if not torch.cuda.is_available() or "PYTEST_XDIST_WORKER" in os.environ:
        return
    module = module_of("paged_decode")
    jobs = [(*case.values, config) for case in CASES for config in sampled(*case.values)]
    jobs += [
        (LOADS[load][0], MATRIX, matrix_config(load, tile, splits))
        for load, tile, splits in itertools.product(LOADS, TILES, SPLITS)
    ]
    jobs += [
        (LOADS[load][0], GUARDED, guarded_config(load, splits))
        for load, splits in itertools.product(LOADS, (1, 24))
    ]
    with CompilePool() as pool:
        for job in [pool.submit("paged_decode", module, *job, 90) for job in jobs]:
            job.result()


def run(name, problem, config, inputs, *, lse_base=""):
    outputs = ref.make_outputs(problem, inputs)
    if lse_base:
        lse = torch.full(inputs.q.shape[:2], math.nan, device="cuda")
        outputs = PagedDecodeOutputs(outputs.out, lse, lse_base)
    launcher = template("paged_decode", name).build(problem, config, inputs)
    for scratch in (launcher.partial_out, launcher.partial_lse):
        if scratch is not None:
            scratch.fill_(math.nan)
    launcher.launch(inputs, outputs)
    torch.cuda.synchronize()
    return outputs


@pytest.mark.parametrize(("name", "problem"), CASES)
def test_sampled_configs_match_reference_and_repeat(name, problem) -> None:
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    configs = sampled(name, problem)
    for config in configs:
        outputs = run(name, problem, config, inputs)
        assert ref.compare(problem, inputs, outputs).reason is None, config
        assert ref.outputs_equal(outputs, run(name, problem, config, inputs)), config
    for config, base in itertools.product(configs[:2], ("2", "e")):
        outputs = run(name, problem, config, inputs, lse_base=base)
        assert ref.compare(problem, inputs, outputs).reason is None, (config, base)


LOADS = {
    "rows": ("tilelang_gather", {}),
    "page": ("tilelang_page", {"load": "page"}),
    "tma": ("tilelang_page", {"load": "tma", "kv_eviction": "evict_first"}),
    "tma_ws": ("tilelang_page", {"load": "tma_ws", "kv_eviction": "evict_first"}),
}
TILES = {
    "mma": {"matmul": "mma", "swap_ab": False},
    "mma-swapped": {"matmul": "mma", "swap_ab": True},
    "wgmma": {"matmul": "wgmma", "swap_ab": False},
    "wgmma-swapped": {"matmul": "wgmma", "swap_ab": True},
}


SPLITS = [1, 3]


def matrix_config(load, tile, splits):
    name, values = LOADS[load]
    values = {**values, **TILES[tile], "block_n": 64, "block_h": 4, "threads": 128}
    split = {"split_rule": "none"}
    if splits > 1:
        split = {"split_rule": "count", "num_splits": splits}
    # A warp group's ring of TMA boxes needs a power of two.
    num_stages = 4 if (load, tile) == ("tma", "wgmma") else 3
    return Config.of(name, {**values, **split, "num_stages": num_stages})


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("load", LOADS)
def test_every_way_to_load_meets_every_tile(load, tile, splits, h200) -> None:
    name, config = LOADS[load][0], matrix_config(load, tile, splits)
    assert SPACES[name](MATRIX, h200).check(config) is None
    lengths = [1024, 0, 1, 64, 713]  # whole tiles, none, less than a tile, one, a rest
    inputs = ref.paged_inputs(
        MATRIX, lengths, device="cuda", seed=2, num_unused_pages=2, poison=True
    )
    outputs = run(name, MATRIX, config, inputs)
    assert ref.compare(MATRIX, inputs, outputs).reason is None


GUARDED = replace(LLAMA, kv_len=8192)
GUARDS = 64
GUARD_PAGE = 2**28
"""A page that no pool holds: reading it faults."""
LENGTHS = {
    "shorter than a page": [1, 5, 15, 3],
    "fewer tiles than stages": [16, 17, 33, 64],
    "empty at the end": [700, 1, 0, 0],
    "empty at the start": [0, 0, 31, 384],
    "all empty but one": [0, 0, 0, 1],
    "more runs than tiles": [383, 385, 369, 200],
}


def guarded_config(load, splits):
    """Tiles of one page, more stages than most runs have tiles."""
    name, values = LOADS[load]
    split = {"split_rule": "count", "num_splits": splits} if splits > 1 else {"split_rule": "none"}
    shape = {"block_n": 16, "threads": 32, "num_stages": 5, "swap_ab": False, "matmul": "mma"}
    # In one warp, page and tma need a power of two.
    stages = {"num_stages": 4} if load in ("page", "tma") else {}
    shape |= {**stages, "block_h": 1 if load == "page" else 4}
    return Config.of(name, {**shape, **values, **split})


@pytest.mark.parametrize("splits", [1, 24])
@pytest.mark.parametrize("load", LOADS)
def test_short_runs_stay_within_their_table(load, splits, h200) -> None:
    name, config = LOADS[load][0], guarded_config(load, splits)
    assert SPACES[name](GUARDED, h200).check(config) is None
    for case, lengths in LENGTHS.items():
        inputs = ref.paged_inputs(GUARDED, lengths, device="cuda", seed=9, poison=True)
        guards = inputs.kv_indices.new_full((GUARDS,), GUARD_PAGE)
        table = torch.cat([guards, inputs.kv_indices, guards])
        guarded = replace(inputs, kv_indices=table, kv_indptr=inputs.kv_indptr + GUARDS)
        outputs = run(name, GUARDED, config, guarded)
        assert ref.compare(GUARDED, guarded, outputs).reason is None, case


def test_what_faulted_on_an_h200_runs_with_the_stages_that_the_space_allows(h200) -> None:
    # With five stages ptxas placed a pointer wrongly; see test_tilelang_pointers.
    problem = PagedDecodeProblem(16, 8192, 32, 8, 128, 16, "bfloat16")
    config = guarded_config("page", 24)
    space = SPACES["tilelang_page"](problem, h200)
    assert space.check(config) is None
    assert space.check(config.replace(num_stages=5)) is not None
    for seed in range(4):
        inputs = ref.make_validation_inputs(problem, device="cuda", seed=seed)
        first = run("tilelang_page", problem, config, inputs)
        assert ref.compare(problem, inputs, first).reason is None
        for _ in range(5):
            assert ref.outputs_equal(first, run("tilelang_page", problem, config, inputs))


@pytest.mark.parametrize("load", LOADS)
def test_a_captured_graph_serves_other_lengths(load, h200) -> None:
    problem = PagedDecodeProblem(4, 1024, 32, 8, 128, 64, "bfloat16")
    name, values = LOADS[load]
    default = SPACES[name](problem, h200).default
    chosen = default.replace(num_splits=4, **values)
    full = ref.paged_inputs(problem, [1024] * 4, device="cuda", seed=3)
    launcher = template("paged_decode", name).build(problem, chosen, full)
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


def test_one_launcher_serves_other_pools_and_strides(h200) -> None:
    problem = PagedDecodeProblem(3, 300, 8, 2, 64, 16, "bfloat16")
    config = SPACES["tilelang_gather"](problem, h200).default
    first = ref.paged_inputs(problem, [300, 7, 64], device="cuda", seed=5)
    launcher = template("paged_decode", "tilelang_gather").build(problem, config, first)
    larger = ref.paged_inputs(
        replace(problem, kv_layout="HND"), [31, 0, 290], device="cuda", seed=6, num_unused_pages=99
    )
    for inputs in (first, larger):
        outputs = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, outputs)
        assert ref.compare(problem, inputs, outputs).reason is None


def test_launches_go_to_the_current_stream(h200) -> None:
    inputs = ref.paged_inputs(LLAMA, [700] * 4, device="cuda", seed=7)
    config = SPACES["tilelang_gather"](LLAMA, h200).default
    launcher = template("paged_decode", "tilelang_gather").build(LLAMA, config, inputs)
    outputs = ref.make_outputs(LLAMA, inputs)
    q = inputs.q.clone()
    inputs.q.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second in which another stream finds NaN
        inputs.q.copy_(q)
        launcher.launch(inputs, outputs)
    side.synchronize()
    assert ref.compare(LLAMA, inputs, outputs).reason is None


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_pool_past_two_to_the_31_elements(name, h200) -> None:
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
    chosen = SPACES[name](problem, h200).default
    if name == "tilelang_page":
        chosen = chosen.replace(load="tma", kv_eviction="evict_normal")
    plain = run(name, problem, chosen, inputs)
    assert ref.outputs_equal(run(name, problem, chosen, moved), plain)
