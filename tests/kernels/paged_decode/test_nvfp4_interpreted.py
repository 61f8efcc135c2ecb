"""The NVFP4 kernel in the interpreter against the fp32 reference, option by option."""

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

BASE = PagedDecodeProblem(3, 80, 8, 2, 64, 16, "bfloat16", kv_dtype="nvfp4")
LENGTHS = [70, 0, 33]
SPLITS = {
    "none": {"split_rule": "none"},
    "count": {"split_rule": "count", "num_splits": 3, "merge": "kernel"},
    "size": {"split_rule": "size", "split_tokens": 32, "merge": "last_block"},
    "stream": {"split_rule": "stream", "ctas_per_sm": 1, "merge": "last_block"},
}
PLAIN = {
    "block_n": 32,
    "block_m": 4,
    "num_warps": 1,
    "num_stages": 2,
    "dequant": "shift",
    "v_operand": "shared",
    "prefetch_pages": True,
    "kv_eviction": "evict_normal",
    "launch_pdl": False,
}
OPTIONS = {
    "plain": {},
    "fp16": {"dtype": "float16"},
    "HND": {"kv_layout": "HND"},
    "window": {"window_left": 20},
    "query tokens in a window": {"query_len": 3, "window_left": 9},
    "query tokens, not causal": {"query_len": 5, "is_causal": False},
    "soft cap": {"has_soft_cap": True},
    "sinks and window": {"has_sinks": True, "window_left": 40, "query_len": 2},
    "alibi": {"has_alibi": True, "query_len": 2},
    "head_dim 96": {"head_dim": 96, "head_dim_v": 96},
    "head_dim 128": {"head_dim": 128, "head_dim_v": 128},
    "head_dim 192": {"head_dim": 192, "head_dim_v": 192},
    "pages of 528": {"page_size": 528},
    "pages of one": {"page_size": 1},
    "one KV head, pages of one": {"page_size": 1, "num_kv_heads": 1, "num_qo_heads": 4},
    "group of 12": {"num_qo_heads": 24},
    "group of 5, 8 query tokens": {"num_qo_heads": 10, "query_len": 8},
}


@pytest.fixture(autouse=True)
def _shim():
    import interpreter_shim

    interpreter_shim.install()


def config(**changes: object) -> Config:
    return Config.of("triton_nvfp4", {**PLAIN, **SPLITS["none"], **changes})


def run(problem, chosen, inputs, *, lse_base="2") -> PagedDecodeOutputs:
    lse = torch.full(inputs.q.shape[:2], math.nan)
    outputs = replace(ref.make_outputs(problem, inputs), lse=lse, lse_base=lse_base)
    found = template("paged_decode", "triton_nvfp4")
    assert found.supports_tensors(problem, inputs) is None
    found.build(problem, chosen, inputs).launch(inputs, outputs)
    return outputs


@pytest.mark.parametrize("v_operand", ["shared", "registers"])
@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
@pytest.mark.parametrize("name", OPTIONS)
def test_option_matches_reference(name: str, is_dense: bool, v_operand: str) -> None:
    problem = replace(BASE, **OPTIONS[name])
    inputs = ref.paged_inputs(
        problem, LENGTHS, device="cpu", seed=1, num_unused_pages=2, poison=True, is_dense=is_dense
    )
    # The interpreter is slow: each option meets every split rule once, over tables and operands.
    rule = list(SPLITS)[2 * is_dense + (v_operand == "registers")]
    chosen = config(**SPLITS[rule], v_operand=v_operand, prefetch_pages=not is_dense)
    outputs = run(problem, chosen, inputs, lse_base="e" if is_dense else "2")
    assert ref.compare(problem, inputs, outputs).reason is None


@pytest.mark.parametrize("v_operand", ["shared", "registers"])
def test_the_comparison_sees_what_could_go_wrong(v_operand: str) -> None:
    inputs = ref.paged_inputs(BASE, LENGTHS, device="cpu", seed=1)
    outputs = run(BASE, config(v_operand=v_operand), inputs)
    assert ref.compare(BASE, inputs, outputs).reason is None
    shifted = inputs.v_block_scales.view(torch.uint8).roll(1, -1).view(torch.float8_e4m3fn)
    swapped = (inputs.k_cache >> 4) | (inputs.k_cache << 4)
    for wrong in (replace(inputs, v_block_scales=shifted), replace(inputs, k_cache=swapped)):
        assert ref.compare(BASE, wrong, outputs).reason is not None


@pytest.mark.parametrize("v_operand", ["shared", "registers"])
def test_every_code_and_scale_is_read_for_its_value(v_operand: str) -> None:
    # One token: the output is V, whatever the logits. Rows hold all codes under several scales.
    problem = replace(BASE, batch=1, num_qo_heads=2, page_size=1)
    inputs = ref.paged_inputs(problem, [1], device="cpu", seed=1)
    codes = torch.arange(64).remainder(16).view(1, 1, 1, 64).expand(1, 1, 2, 64)
    packed = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    inputs.v_cache.copy_(packed)
    scales = torch.tensor([0x01, 0x07, 0x38, 0x5A], dtype=torch.uint8)  # two are subnormal
    inputs.v_block_scales.view(torch.uint8).copy_(scales.expand(1, 1, 2, 4))
    inputs = replace(inputs, v_scale=2.0**-3)
    outputs = run(problem, config(v_operand=v_operand), inputs)
    expected, _ = ref.reference(inputs, 0)
    assert torch.equal(outputs.out[0], expected[0].to(outputs.out.dtype))
    assert outputs.out.unique().numel() > 20


def test_scales_on_the_device_equal_numbers() -> None:
    inputs = ref.paged_inputs(BASE, LENGTHS, device="cpu", seed=2)
    scales = torch.tensor([0.75, 1.25])
    on_device = replace(inputs, k_scale=scales[:1], v_scale=scales[1:])
    expected, got = (run(BASE, config(), i) for i in (inputs, on_device))
    torch.testing.assert_close(got.out, expected.out, rtol=2e-2, atol=1e-3)
    assert ref.compare(BASE, inputs, got).reason is None


def test_pools_of_unequal_strides_and_at_odd_words() -> None:
    inputs = ref.paged_inputs(BASE, LENGTHS, device="cpu", seed=3)
    expected = run(BASE, config(), inputs)
    wide = torch.zeros((*inputs.v_cache.shape[:3], 44), dtype=torch.uint8)
    wide[..., 4:36] = inputs.v_cache
    scales = inputs.k_block_scales.transpose(1, 2).contiguous().transpose(1, 2)
    moved = replace(inputs, v_cache=wide[..., 4:36], k_block_scales=scales)
    assert moved.v_cache.stride() != moved.k_cache.stride()
    assert ref.outputs_equal(run(BASE, config(), moved), expected)


def test_tensors_that_words_do_not_fit_are_refused() -> None:
    inputs = ref.paged_inputs(BASE, LENGTHS, device="cpu", seed=3)
    found = template("paged_decode", "triton_nvfp4")
    wide = torch.zeros((*inputs.v_cache.shape[:3], 34), dtype=torch.uint8)
    reason = found.supports_tensors(BASE, replace(inputs, v_cache=wide[..., 2:]))
    assert reason is not None
    assert "multiples of 4 bytes" in reason
    odd = torch.zeros((*inputs.k_block_scales.shape[:3], 5), dtype=torch.uint8)
    moved = replace(inputs, k_block_scales=odd[..., 1:].view(torch.float8_e4m3fn))
    reason = found.supports_tensors(BASE, moved)
    assert reason is not None
    assert "strides must be multiples of the 4 scales of a row" in reason


def test_inputs_are_not_modified_and_a_launcher_serves_again() -> None:
    inputs = ref.paged_inputs(BASE, LENGTHS, device="cpu", seed=7)
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.k_block_scales.view(torch.uint8))
    before = [t.clone() for t in tensors]
    chosen = config(**SPLITS["size"])
    launcher = template("paged_decode", "triton_nvfp4").build(BASE, chosen, inputs)
    results = []
    for _ in range(2):
        outputs = ref.make_outputs(BASE, inputs)
        launcher.launch(inputs, outputs)
        results.append(outputs)
    assert ref.outputs_equal(*results)
    assert all(torch.equal(x, y) for x, y in zip(before, tensors, strict=True))
