"""The TileLang template on a GPU: values, equal bits, strides, graph replay, offsets past 32 bits.

Most of the time is the compiler's, so all kernels are compiled on every core first, but by the
tests themselves where pytest-xdist has several at once.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from devices import H200
from fp4_calls import MODES, problem_of, relative_error, run
from tilescout.kernels.base import Config
from tilescout.kernels.fp4_attention import Fp4AttentionFwdOutputs
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.fp4_attention_fwd import SPACES
from tilescout.tuner.compile_pool import CompilePool

pytestmark = pytest.mark.gpu

NAME = "tilelang_emulated"
WIDE = {"query_len": 300, "kv_len": 1031, "head_dim": 128, "num_qo_heads": 4}
TILES = {
    "ws 128x128": (128, 128, 2, "tma_ws"),
    "ws 192x64": (192, 64, 3, "tma_ws"),
    "tma 64x64": (64, 64, 2, "tma"),
    "tma 128x64": (128, 64, 3, "tma"),
}
CASES = {
    **{f"{mode}, ws 128x128": (mode, WIDE, "ws 128x128") for mode in MODES},
    **{f"{mode}, tma 64x64": (mode, WIDE, "tma 64x64") for mode in ("fp8_p", "direct ceil")},
    "nvfp4, ws 192x64": ("nvfp4", {**WIDE, "head_dim": 64}, "ws 192x64"),
    "direct ceil, tma 128x64": ("direct ceil", WIDE, "tma 128x64"),
    "one key": ("nvfp4", {"query_len": 1, "kv_len": 1, "head_dim": 128}, "ws 128x128"),
    "causal, two entries": (
        "fp8_p",
        {**WIDE, "query_len": 500, "kv_len": 700, "is_causal": True, "batch": 2},
        "ws 128x128",
    ),
    "causal, rows that see no key": (
        "nvfp4",
        {"query_len": 300, "kv_len": 130, "is_causal": True},
        "tma 64x64",
    ),
    "means of blocks": ("fp8_p", {**WIDE, "q_mean": "block"}, "ws 128x128"),
    "bf16": ("direct ceil", {**WIDE, "out_dtype": "bfloat16"}, "ws 128x128"),
}


def case_of(case):
    """Problem and config."""
    mode, changes, tile = CASES[case]
    values = dict(zip(("block_m", "block_n", "num_stages", "load"), TILES[tile], strict=True))
    problem, config = problem_of(**MODES[mode], **changes), Config.of(NAME, values)
    assert SPACES[NAME](problem, H200).check(config) is None
    return problem, config


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # each would start a process a core, to wait for what another compiles
    with CompilePool() as pool:
        module = module_of("fp4_attention_fwd")
        jobs = [
            pool.submit("fp4_attention_fwd", module, NAME, *case_of(case), 90) for case in CASES
        ]
        for job in jobs:
            job.result()


@pytest.mark.parametrize("case", CASES)
def test_values_match_the_reference_and_repeat(case) -> None:
    problem, config = case_of(case)
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    first = run(problem, inputs, config)
    assert ref.compare(problem, inputs, first).reason is None
    for _ in range(3):
        assert ref.outputs_equal(first, run(problem, inputs, config))


def test_both_templates_agree_closer_than_the_modes_do() -> None:
    problem, config = case_of("direct ceil, ws 128x128")
    inputs = ref.make_inputs(problem, device="cuda", seed=2)
    ours, theirs = run(problem, inputs, config), run(problem, inputs)
    assert relative_error(ours.out, theirs.out) <= 1e-3
    assert relative_error(ours.lse, theirs.lse) <= 1e-5


def test_a_captured_graph_replays_into_strided_memory() -> None:
    problem, config = case_of("bf16")
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=3)
    launcher = template(problem.op, NAME).build(problem, config, inputs)
    eager = ref.make_outputs(problem, inputs)
    launcher.launch(inputs, eager)
    heads, rows, head_dim = eager.out.shape[1:]
    strided = eager.out.new_full((1, rows, heads, head_dim), torch.nan).transpose(1, 2)
    captured = Fp4AttentionFwdOutputs(strided, torch.full_like(eager.lse, torch.nan))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(inputs, captured)
    graph.replay()
    torch.cuda.synchronize()
    assert ref.outputs_equal(eager, captured)


def test_more_elements_than_32_bits_count() -> None:
    problem, config = case_of("direct ceil, ws 128x128")
    heads, changes = 260, {"query_len": 64, "kv_len": 65536 + 128}
    problem = replace(problem, num_qo_heads=heads, num_kv_heads=heads, **changes)
    small = replace(problem, num_qo_heads=1, num_kv_heads=1)
    part = ref.make_inputs(small, device="cuda", seed=4)

    def repeated(tensor):
        scales = tensor.scales.view(torch.uint8).expand(-1, heads, -1, -1).contiguous()
        codes = tensor.codes.expand(-1, heads, -1, -1).contiguous()
        return replace(tensor, codes=codes, scales=scales.view(tensor.scales.dtype))

    inputs = replace(part, q=repeated(part.q), k=repeated(part.k), v=repeated(part.v))
    assert inputs.k.codes.numel() * 2 > 2**31
    outputs = run(problem, inputs, config)
    assert torch.equal(outputs.out[:, :1].expand_as(outputs.out), outputs.out)
    assert ref.compare(small, part, Fp4AttentionFwdOutputs(outputs.out[:, :1], None)).reason is None
