"""What the numerics cost against exact attention, and the thresholds and scales of P."""

from __future__ import annotations

import math

import pytest
import torch
from fp4_calls import MODES, cosine, exact_attention, problem_of
from tilescout.errors import UsageError
from tilescout.kernels.fp4_attention import Fp4AttentionFwdProblem
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.fp4_attention.numerics import represented_p
from tilescout.kernels.fp4_attention.operands import quantize_operands

LEAST_COSINE = {
    "fp8_p": 0.987,
    "nvfp4": 0.979,
    "direct ceil": 0.967,
    "direct floor": 0.955,
    "direct affine": 0.932,
}

PUBLISHED = {
    "fp8_p": 0.9900,
    "nvfp4": 0.9821,
    "direct ceil": 0.9734,
    "direct floor": 0.9621,
    "direct affine": 0.9427,
}
"""Cosines of another implementation on the same values: two heads, 1024 tokens."""


def attend(q, k, v, problem: Fp4AttentionFwdProblem, **options) -> torch.Tensor:
    """The reference on quantised operands, all rows of head 0."""
    inputs = quantize_operands(
        *(q, k, v),
        mode=problem.mode,
        sm_scale=problem.head_dim**-0.5,
        q_mean=problem.q_mean,
        with_kernels=False,
        **options,
    ).inputs
    return ref.reference(problem, inputs, 0, 0, torch.arange(problem.query_len))[0]


@pytest.mark.parametrize("tokens", [256, 1024])
@pytest.mark.parametrize("mode", MODES)
def test_accuracy_on_normal_values(mode: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(20260814)
    q, k, v = (torch.randn(1, 1, tokens, 128, generator=generator) for _ in range(3))
    sizes = {"num_qo_heads": 1, "query_len": tokens, "kv_len": tokens, "head_dim": 128}
    out = attend(q, k, v, problem_of(**sizes, **MODES[mode]), tensor_scale="unit")
    exact = exact_attention(q, k, v)[0][0, 0]
    assert LEAST_COSINE[mode] <= cosine(out, exact) <= LEAST_COSINE[mode] + 0.015
    assert 0.9 <= out.norm() / exact.norm() <= 1.1


@pytest.mark.parametrize("mode", MODES)
def test_accuracy_is_that_of_another_implementation(mode: str) -> None:
    generator = torch.Generator().manual_seed(20260814)
    q, k, v = (torch.randn(1, 2, 1024, 128, generator=generator) for _ in range(3))
    sizes = {"num_kv_heads": 2, "query_len": 1024, "kv_len": 1024, "head_dim": 128}
    problem = problem_of(**sizes, **MODES[mode])
    inputs = quantize_operands(
        q, k, v, mode=problem.mode, sm_scale=128**-0.5, tensor_scale="unit", with_kernels=False
    ).inputs
    rows = torch.arange(1024)
    out = torch.stack([ref.reference(problem, inputs, 0, head, rows)[0] for head in range(2)])
    assert abs(cosine(out, exact_attention(q, k, v)[0][0]) - PUBLISHED[mode]) <= 0.002


def test_smoothing_is_worth_it_where_channels_have_a_bias() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, 512, 64, generator=generator) for _ in range(3))
    bias = 8.0 * torch.randn(2, 64, generator=generator)
    is_biased = torch.rand(64, generator=generator) < 0.1
    q, k = (x + torch.where(is_biased, b, 0.0) for x, b in zip((q, k), bias, strict=True))
    exact = exact_attention(q, k, v)[0][0, 0]
    sizes = {"num_qo_heads": 1, "query_len": 512, "kv_len": 512}
    plain = cosine(attend(q, k, v, problem_of(**sizes)), exact)
    only_k = cosine(attend(q, k, v, problem_of(**sizes), smooth_k=True), exact)
    both = cosine(attend(q, k, v, problem_of(**sizes, q_mean="block"), smooth_k=True), exact)
    assert plain < only_k < both
    assert both >= 0.975


def test_exact_thresholds_of_direct_p() -> None:
    # As fractions of the largest P, which is a power of two: where codes 1 to 7 begin.
    thresholds = [2.0**x / 6.0 for x in (-2, math.log2(0.75), math.log2(1.25), math.log2(1.75))]
    thresholds += [2.5 / 6.0, 3.5 / 6.0, 5.0 / 6.0]
    values = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    problem = problem_of(mode="direct")
    for below, above, threshold in zip([0.0, *values], values, thresholds, strict=False):
        for factor, expected in ((1 - 1e-5, below), (1 + 1e-5, above)):
            t = torch.full((1, 32), -math.inf)
            t[0, 0], t[0, 1] = 0.0, math.log2(threshold * factor)
            p, total = represented_p(t, problem)
            assert p[0, :2].tolist() == [6.0, expected]
            assert total.item() == 6.0 + expected


@pytest.mark.parametrize("mode", ["nvfp4", "direct ceil", "direct floor", "direct affine"])
def test_codes_do_not_depend_on_the_row_reference(mode: str) -> None:
    problem = problem_of(**MODES[mode])
    generator = torch.Generator().manual_seed(2)
    t = 3.0 * torch.randn(64, 96, generator=generator).clamp(-3, 3) - 9.0
    first, total = represented_p(t, problem)
    shifted, shifted_total = represented_p(t - 4.0, problem)
    torch.testing.assert_close(shifted * 16.0, first, rtol=1e-6, atol=0)
    torch.testing.assert_close(shifted_total * 16.0, total, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"mode": "fp4"}, "mode='fp4' .* nvfp4, direct, fp8_p", id="mode"),
        pytest.param({"products": "fast"}, "products='fast'", id="products"),
        pytest.param({"p_map": "affine"}, "only mode='direct' has them", id="map without direct"),
        pytest.param({"num_kv_heads": 3, "num_qo_heads": 4}, "multiple of num_kv_heads=3", id="G"),
        pytest.param({"kv_len": 0}, "kv_len=0", id="no keys"),
        pytest.param({"out_dtype": "float64"}, "out_dtype='float64'", id="dtype"),
    ],
)
def test_wrong_problems_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        problem_of(**changes)


def test_counts() -> None:
    for rows, keys in ((5, 9), (9, 5), (7, 7)):
        causal = problem_of(query_len=rows, kv_len=keys, is_causal=True)
        seen = sum(max(0, min(keys, i + 1 + keys - rows)) for i in range(rows))
        assert causal.num_pairs == seen
        assert causal.flops == 4 * 2 * 64 * seen
    whole = problem_of(query_len=128, kv_len=256, num_qo_heads=1)
    assert whole.bytes_moved == (128 + 2 * 256) * 64 * 9 // 16 + 128 * 64 * 4
    assert whole.compute_dtype == "bfloat16"
    assert problem_of(products="native").compute_dtype == "float4_e2m1fn_x2"
