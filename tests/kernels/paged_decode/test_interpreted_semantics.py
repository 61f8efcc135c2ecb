"""Every semantic option of the Triton kernel in the interpreter against the fp32 reference."""

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
SPLITS = {
    "whole": {"split_rule": "none"},
    "count": {"split_rule": "count", "num_splits": 3, "merge": "last_block"},
    "size": {"split_rule": "size", "split_tokens": 32, "merge": "kernel"},
    "stream": {"split_rule": "stream", "ctas_per_sm": 2, "merge": "last_block"},
}
LENGTHS = [45, 0, 3, 98]
BASE = PagedDecodeProblem(4, 98, 8, 2, 64, 16, "float16")


@pytest.fixture(autouse=True)
def _shim():
    import interpreter_shim

    interpreter_shim.install()


def config(**changes: object) -> Config:
    return Config.of("triton", {**PLAIN, **changes})


def run(problem, chosen, inputs, *, lse_base="2") -> PagedDecodeOutputs:
    outputs = ref.make_outputs(problem, inputs)
    lse = torch.full(inputs.q.shape[:2], math.nan)
    outputs = replace(outputs, lse=lse, lse_base=lse_base)
    template("paged_decode", "triton").build(problem, chosen, inputs).launch(inputs, outputs)
    return outputs


OPTIONS = {
    "window": {"window_left": 20},
    "window of one token": {"window_left": 0},
    "four query tokens": {"query_len": 4},
    "query tokens in a window": {"query_len": 3, "window_left": 9},
    "query tokens, not causal": {"query_len": 5, "is_causal": False},
    "soft cap": {"has_soft_cap": True},
    "sinks": {"has_sinks": True},
    "sinks and window": {"has_sinks": True, "window_left": 40, "query_len": 2},
    "alibi": {"has_alibi": True, "query_len": 2},
    "rope": {"has_rope": True, "query_len": 2},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "e4m3 of bf16": {"kv_dtype": "float8_e4m3fn", "dtype": "bfloat16"},
    "e5m2, HND": {"kv_dtype": "float8_e5m2", "kv_layout": "HND"},
    "HND": {"kv_layout": "HND", "dtype": "bfloat16"},
    "head_dim 96": {"head_dim": 96, "head_dim_v": 96},
    "head_dim 192": {"head_dim": 192, "head_dim_v": 192},
    "pages of 528": {"page_size": 528},
    "pages of one": {"page_size": 1},
    "group of 12": {"num_qo_heads": 24},
    "group of 5, 8 query tokens": {"num_qo_heads": 10, "query_len": 8},
}


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_option_matches_reference(name: str, is_dense: bool, swap_ab: bool) -> None:
    problem = replace(BASE, **({"kv_dtype": ""} | OPTIONS[name]))
    inputs = ref.paged_inputs(
        problem, LENGTHS, device="cpu", seed=1, num_unused_pages=2, poison=True, is_dense=is_dense
    )
    # The interpreter is slow: each option meets every split rule once, over tables and operands.
    rule = list(SPLITS)[2 * is_dense + swap_ab]
    chosen = config(**SPLITS[rule], swap_ab=swap_ab, prefetch_pages=is_dense)
    outputs = run(problem, chosen, inputs, lse_base="e" if swap_ab else "2")
    assert ref.compare(problem, inputs, outputs).reason is None


def test_scales_on_the_device_equal_numbers() -> None:
    problem = replace(BASE, kv_dtype="float8_e4m3fn")
    inputs = ref.paged_inputs(problem, LENGTHS, device="cpu", seed=2)
    scales = torch.tensor([0.75, 1.25])
    on_device = replace(inputs, k_scale=scales[:1], v_scale=scales[1:])
    expected, got = (run(problem, config(), i) for i in (inputs, on_device))
    torch.testing.assert_close(got.out, expected.out, rtol=2e-3, atol=1e-4)
    assert ref.compare(problem, inputs, got).reason is None
    doubled = run(problem, config(), replace(on_device, v_scale=2 * scales[1:]))
    torch.testing.assert_close(doubled.out, 2 * got.out, rtol=2e-3, atol=1e-4)


def test_separate_pools_of_unequal_strides() -> None:
    inputs = ref.paged_inputs(BASE, LENGTHS, device="cpu", seed=3)
    v_cache = inputs.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    moved = replace(inputs, k_cache=inputs.k_cache.contiguous(), v_cache=v_cache)
    assert moved.k_cache.stride() != moved.v_cache.stride()
    assert ref.outputs_equal(run(BASE, config(), inputs), run(BASE, config(), moved))


def test_sinks_of_minus_infinity_change_nothing() -> None:
    problem = replace(BASE, has_sinks=True)
    inputs = ref.paged_inputs(problem, LENGTHS, device="cpu", seed=4)
    inputs.sinks.fill_(-math.inf)
    plain = run(BASE, config(**SPLITS["count"]), replace(inputs, sinks=None))
    assert ref.outputs_equal(run(problem, config(**SPLITS["count"]), inputs), plain)


@pytest.mark.parametrize("rule", SPLITS)
def test_requests_shorter_than_their_query_tokens(rule: str) -> None:
    problem = replace(BASE, query_len=4)
    inputs = ref.paged_inputs(problem, [2, 0, 4, 40], device="cpu", seed=5, poison=True)
    outputs = run(problem, config(**SPLITS[rule]), inputs)
    assert ref.compare(problem, inputs, outputs).reason is None
    # The first two of four query tokens lie before the two tokens that there are.
    assert not outputs.out[:2].any()
    assert torch.isneginf(outputs.lse[:2]).all()
    assert torch.isfinite(outputs.lse[2:4]).all()


def test_persistent_grid_of_more_programs_than_tiles() -> None:
    chosen = config(split_rule="stream", ctas_per_sm=8, merge="kernel")
    for lengths in ([5, 0, 0, 3], [0, 0, 0, 0], [1, 1, 1, 600]):
        inputs = ref.paged_inputs(BASE, lengths, device="cpu", seed=6, poison=True)
        outputs = run(BASE, chosen, inputs)
        assert ref.compare(BASE, inputs, outputs).reason is None, lengths
        assert not outputs.out.isnan().any()


def test_wide_tiles_hold_the_rows_of_many_query_tokens() -> None:
    # As the shared prefix of a batch is read: one request, all the batch's rows, no causal mask.
    problem = replace(BASE, batch=1, query_len=9, is_causal=False)
    inputs = ref.paged_inputs(problem, [150], device="cpu", seed=7)
    for block_m in (4, 16, 32):
        outputs = run(problem, config(block_m=block_m, **SPLITS["count"]), inputs)
        assert ref.compare(problem, inputs, outputs).reason is None, block_m
