"""The NVFP4 kernel on a GPU: every operand and conversion, masks, splits, graphs, repeatability."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.paged_decode_nvfp4 import nvfp4_space

pytestmark = pytest.mark.gpu

BASE = PagedDecodeProblem(4, 700, 32, 8, 128, 16, "bfloat16", kv_dtype="nvfp4")
OPERANDS = {
    "one warp": {"v_operand": "registers", "block_n": 32, "num_warps": 1},
    "two warps": {"v_operand": "registers", "block_n": 64, "num_warps": 2, "maxnreg": 128},
    "a warp group": {"v_operand": "shared", "block_n": 128, "num_warps": 4},
    "half a tile a warp": {"v_operand": "shared", "block_n": 64, "num_warps": 2},
}
SPLITS = {
    "none": {"split_rule": "none"},
    "count": {"split_rule": "count", "num_splits": 3, "merge": "kernel"},
    "size": {"split_rule": "size", "split_tokens": 128, "merge": "last_block"},
    "stream": {"split_rule": "stream", "ctas_per_sm": 2, "merge": "last_block"},
}
PROBLEMS = {
    "llama-8b": ("none", {}),
    "fp16, HND": ("count", {"dtype": "float16", "kv_layout": "HND"}),
    "group 16, window, sinks": (
        "size",
        {"num_qo_heads": 128, "window_left": 99, "has_sinks": True, "query_len": 2},
    ),
    "page 1, alibi": ("stream", {"page_size": 1, "has_alibi": True, "num_qo_heads": 8}),
    "head_dim 96, soft cap": ("none", {"head_dim": 96, "head_dim_v": 96, "has_soft_cap": True}),
    "head_dim 256": ("count", {"head_dim": 256, "head_dim_v": 256, "num_qo_heads": 16}),
}


def config_of(problem: PagedDecodeProblem, operand: str, rule: str, **changes: object) -> Config:
    values = {
        "block_m": min(64, 1 << (problem.rows_per_kv_head - 1).bit_length()),
        "num_stages": 3,
        "dequant": "shift",
        "prefetch_pages": True,
        "kv_eviction": "evict_first",
        "launch_pdl": True,
        **OPERANDS[operand],
        **SPLITS[rule],
        **changes,
    }
    return Config.of("triton_nvfp4", values)


def run(problem, config, inputs, *, launcher=None) -> PagedDecodeOutputs:
    lse = torch.full(inputs.q.shape[:2], math.nan, device="cuda")
    outputs = replace(ref.make_outputs(problem, inputs), lse=lse)
    launcher = launcher or template("paged_decode", "triton_nvfp4").build(problem, config, inputs)
    launcher.launch(inputs, outputs)
    torch.cuda.synchronize()
    return outputs


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_matches_the_reference_and_repeats(name: str, operand: str) -> None:
    rule, changes = PROBLEMS[name]
    problem = replace(BASE, **changes)
    if operand == "half a tile a warp" and name != "llama-8b":
        pytest.skip("one problem is enough")
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    dequant = "carry" if rule in ("none", "stream") else "shift"
    config = config_of(problem, operand, rule, dequant=dequant)
    outputs = run(problem, config, inputs)
    assert ref.compare(problem, inputs, outputs).reason is None
    assert ref.outputs_equal(outputs, run(problem, config, inputs))


@pytest.mark.parametrize("operand", ["one warp", "a warp group"])
def test_conversions_give_the_same_bits(operand: str) -> None:
    inputs = ref.make_validation_inputs(BASE, device="cuda", seed=2)
    major, _ = torch.cuda.get_device_capability()
    dequants = ["shift", "carry", "arithmetic", *(["hardware"] if major >= 10 else [])]
    found = [run(BASE, config_of(BASE, operand, "none", dequant=d), inputs) for d in dequants]
    assert ref.compare(BASE, inputs, found[0]).reason is None
    assert all(ref.outputs_equal(found[0], other) for other in found[1:3])
    for other in found[3:]:
        assert ref.compare(BASE, inputs, other).reason is None


@pytest.mark.parametrize("operand", ["one warp", "a warp group"])
def test_every_code_and_scale_is_read_for_its_value(operand: str) -> None:
    # One token: the output is V, whatever the logits. Rows hold all codes under several scales.
    problem = replace(BASE, batch=1, page_size=1)
    inputs = ref.paged_inputs(problem, [1], device="cuda", seed=1)
    codes = torch.arange(128, device="cuda").remainder(16).view(1, 1, 1, 128).expand(1, 1, 8, 128)
    inputs.v_cache.copy_((codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8))
    scales = [0x01, 0x07, 0x38, 0x5A, 0x08, 0x7E, 0x30, 0x00]  # two are subnormal, one is 448
    stored = torch.tensor(scales, dtype=torch.uint8, device="cuda")
    inputs.v_block_scales.view(torch.uint8).copy_(stored.expand(1, 1, 8, 8))
    inputs = replace(inputs, v_scale=2.0**-3)
    outputs = run(problem, config_of(problem, operand, "none"), inputs)
    expected, _ = ref.reference(inputs, 0)
    assert torch.equal(outputs.out[0], expected[0].to(outputs.out.dtype))


@pytest.mark.parametrize("operand", ["one warp", "a warp group"])
def test_a_captured_graph_serves_other_lengths(operand: str) -> None:
    problem = replace(BASE, kv_len=1024)
    full = ref.paged_inputs(problem, [1024] * 4, device="cuda", seed=3)
    config = config_of(problem, operand, "size")
    launcher = template("paged_decode", "triton_nvfp4").build(problem, config, full)
    outputs = ref.make_outputs(problem, full)
    launcher.launch(full, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(full, outputs)
    lengths = [5, 0, 1000, 77]
    pages = [-(-n // 16) for n in lengths]
    full.kv_indptr.copy_(torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()]))
    last = [n - 16 * (p - 1) if p else 0 for n, p in zip(lengths, pages, strict=True)]
    full.kv_last_page_len.copy_(torch.tensor(last))
    outputs.out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert ref.compare(problem, full, outputs).reason is None


def test_the_default_of_the_space_runs(h200) -> None:
    inputs = ref.make_validation_inputs(BASE, device="cuda", seed=4)
    config = nvfp4_space(BASE, h200).default
    assert ref.compare(BASE, inputs, run(BASE, config, inputs)).reason is None
