"""Both templates in the interpreter against the reference of their own numerics."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from fp4_calls import MODES, config_of, exact_attention, problem_of, relative_error, run
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.fp4_attention.operands import quantize_operands

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]

BOUND = {"nvfp4": 1e-6, "direct": 1e-6, "fp8_p": 5e-5}
"""Products are exact and codes the reference's own. e4m3 alone is not: its subnormals have the same
step for every row reference, so a P below 2^-14 of its row's largest rounds by the tile."""

SHAPES = {
    "one key": {"query_len": 1, "kv_len": 1},
    "one query, tail of one key, 8 heads a KV head": {
        "query_len": 1,
        "kv_len": 513,
        "num_qo_heads": 8,
    },
    "whole tiles, D 128": {"query_len": 128, "kv_len": 128, "head_dim": 128},
    "both tails, 4 heads a KV head": {"query_len": 70, "kv_len": 133, "num_qo_heads": 4},
    "two batch entries, 2 KV heads": {"batch": 2, "num_kv_heads": 2, "kv_len": 65},
    "causal": {"query_len": 128, "kv_len": 128, "is_causal": True},
    "causal, more keys": {"query_len": 70, "kv_len": 201, "is_causal": True},
    "causal, rows that see no key": {"query_len": 130, "kv_len": 70, "is_causal": True},
    "means of blocks": {"query_len": 130, "kv_len": 70, "q_mean": "block"},
    "mean of the sequence, causal": {"kv_len": 65, "q_mean": "sequence", "is_causal": True},
}


@pytest.fixture(autouse=True)
def _shim():
    import fp4_interpreter_shim

    fp4_interpreter_shim.install()


def check(problem, outputs, inputs) -> None:
    comparison = ref.compare(problem, inputs, outputs)
    assert comparison.reason is None
    assert comparison.relative_rms_error <= BOUND[problem.mode]


@pytest.mark.parametrize("products", ["emulated", "native"])
@pytest.mark.parametrize("mode", ["nvfp4", "direct ceil", "fp8_p"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape: dict, mode: str, products: str) -> None:
    problem = problem_of(**shape, **MODES[mode], products=products)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=1)
    check(problem, run(problem, inputs), inputs)


@pytest.mark.parametrize("products", ["emulated", "native"])
@pytest.mark.parametrize("mode", ["direct floor", "direct affine"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_other_forms_of_direct_p(mode: str, products: str, is_causal: bool) -> None:
    problem = problem_of(**MODES[mode], products=products, kv_len=133, is_causal=is_causal)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=2)
    check(problem, run(problem, inputs), inputs)


@pytest.mark.parametrize("mode", MODES)
def test_output_depends_on_no_tile_and_no_template(mode: str) -> None:
    problem = problem_of(**MODES[mode], query_len=96, kv_len=200)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=3)
    native = replace(problem, products="native")
    configs = [
        *((problem, config_of(problem, m, n)) for m, n in ((64, 32), (64, 128), (128, 64))),
        (problem, config_of(problem, choice="tile")),
        *((native, config_of(native, 128, n)) for n in (64, 128)),
    ]
    # e4m3 values below its normal ones have one step for every row reference: the only trace of it.
    tolerance = {"fp8_p": 5e-5, "nvfp4": 1e-5}.get(mode, 1e-6)
    first, *rest = (run(p, inputs, config) for p, config in configs)
    for other in rest:
        assert relative_error(other.out, first.out) <= tolerance
        assert relative_error(other.lse, first.lse) <= 1e-6


@pytest.mark.parametrize("mode", ["nvfp4", "direct ceil", "direct floor", "fp8_p"])
def test_extreme_logits_stay_finite_and_rows_sum_to_one(mode: str) -> None:
    problem = problem_of(**MODES[mode], kv_len=160)
    inputs = ref.make_inputs(problem, device="cpu", seed=4)
    ones = quantize_operands(
        *(torch.zeros(1, heads, n, 64) for heads, n in ((2, 64), (1, 160))),
        torch.ones(1, 1, 160, 64),
        mode=problem.mode,
        sm_scale=1.0,
        with_kernels=False,
    ).inputs
    for sm_scale in (1e-6, 1.0, 40.0):  # all equal, sharp, logits of some thousands
        given = replace(inputs, sm_scale=sm_scale, v=ones.v, v_scale=ones.v_scale)
        outputs = run(problem, given)
        # P is rounded, the denominator of nvfp4 and fp8_p is not.
        assert (outputs.out - 1.0).abs().max() <= 0.12
        assert abs(outputs.out.mean() - 1.0) <= 0.05
        assert ref.compare(problem, given, outputs).reason is None


def test_a_mean_of_q_comes_back_exactly() -> None:
    # The logits of q less its mean, plus delta, are those of q itself.
    problem = problem_of(mode="fp8_p", query_len=130, kv_len=64, q_mean="block")
    generator = torch.Generator().manual_seed(6)
    q, k, v = (
        torch.randn(1, heads, tokens, 64, generator=generator) + 3
        for heads, tokens in ((2, 130), (1, 64), (1, 64))
    )
    plain, smooth = (
        quantize_operands(
            *(q, k, v), mode="fp8_p", sm_scale=0.125, q_mean=mean, with_kernels=False
        ).inputs
        for mean in ("none", "block")
    )
    exact, lse = exact_attention(q, k, v)
    with_mean = run(problem, smooth)
    without = run(replace(problem, q_mean="none"), plain)
    assert relative_error(with_mean.out, exact) < 0.8 * relative_error(without.out, exact)
    assert (with_mean.lse - lse).abs().max() < 0.5 * (without.lse - lse).abs().max()


@pytest.mark.parametrize("damage", ["output", "nan", "lse", "empty row"])
def test_comparison_can_fail(damage: str) -> None:
    problem = problem_of(query_len=130, kv_len=70, is_causal=True)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=5)
    outputs = run(problem, inputs)
    assert ref.compare(problem, inputs, outputs).reason is None
    if damage == "output":
        outputs.out[0, 1, 100] *= 1.002
    elif damage == "nan":
        outputs.out[0, 0, 5, 0] = float("nan")
    elif damage == "lse":
        outputs.lse[0, 1, 129] += 1e-2
    else:
        outputs.lse[0, 0, 0] = -100.0
    assert ref.compare(problem, inputs, outputs).reason is not None
