"""The compiled kernels on a GPU: values, equal bits, graph replay, offsets beyond 32 bits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from fp4_calls import MODES, problem_of, relative_error, run
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.environment import current_device

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "one key": {"query_len": 1, "kv_len": 1},
    "tails, 4 heads a KV head": {"query_len": 257, "kv_len": 1031, "num_qo_heads": 4},
    "D 128, two batch entries": {"query_len": 384, "kv_len": 640, "head_dim": 128, "batch": 2},
    "causal, D 128": {"query_len": 500, "kv_len": 700, "head_dim": 128, "is_causal": True},
    "causal, rows that see no key": {"query_len": 300, "kv_len": 130, "is_causal": True},
    "means of blocks": {"query_len": 300, "kv_len": 513, "head_dim": 128, "q_mean": "block"},
}
# The other forms of Direct-P differ in what a P becomes, not in which keys are seen.
CASES = {
    f"{shape}, {mode}": (shape, mode)
    for shape in PROBLEMS
    for mode in MODES
    if mode in ("nvfp4", "fp8_p", "direct ceil")
    or shape in ("tails, 4 heads a KV head", "causal, D 128")
}


def all_products() -> list[str]:
    device = current_device()
    has_fp4 = device is not None and device.compute_capability[0] in (10, 12)
    return ["emulated", "native"] if has_fp4 else ["emulated"]


def triton_space(problem):
    """The space of the Triton template; test_tilelang_gpu.py has the other."""
    name = f"triton_{problem.products}"
    (space,) = joint_space(problem, current_device(), [name]).spaces
    return space


@pytest.mark.parametrize("case", CASES)
def test_configs_match_the_reference_and_repeat(case: str) -> None:
    rng = random.Random(0)
    shape, mode = CASES[case]
    for products in all_products():
        problem = problem_of(**PROBLEMS[shape], **MODES[mode], products=products)
        space = triton_space(problem)
        inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
        for config in (space.default, space.valid_seeds()[-1], space.sample(rng)):
            first = run(problem, inputs, config)
            comparison = ref.compare(problem, inputs, first)
            assert comparison.reason is None, config
            for _ in range(3):
                assert ref.outputs_equal(first, run(problem, inputs, config)), config


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("mode", ["nvfp4", "direct ceil"])
def test_configs_agree_closer_than_the_modes_do(mode: str, half: int) -> None:
    problem = problem_of(**MODES[mode], query_len=256, kv_len=1000, head_dim=128)
    inputs = ref.make_inputs(problem, device="cuda", seed=2)
    space = triton_space(problem)
    first = run(problem, inputs, space.default)
    others = space.valid_seeds()[half::2]
    assert others
    for config in others:
        other = run(problem, inputs, config)
        assert relative_error(other.out, first.out) <= 1e-3, config


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_a_captured_graph_replays(out_dtype: str) -> None:
    problem = problem_of(mode="direct", query_len=200, kv_len=300, out_dtype=out_dtype)
    inputs = ref.make_inputs(problem, device="cuda", seed=3)
    space = triton_space(problem)
    launcher = template(problem.op, space.template).build(problem, space.default, inputs)
    eager, captured = ref.make_outputs(problem, inputs), ref.make_outputs(problem, inputs)
    launcher.launch(inputs, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(inputs, captured)
    graph.replay()
    torch.cuda.synchronize()
    assert ref.outputs_equal(eager, captured)
    assert ref.compare(problem, inputs, captured).reason is None


def test_more_elements_than_32_bits_count() -> None:
    # 2^31 + elements of dequantised K and V behind the last head.
    problem = problem_of(
        **{"num_qo_heads": 130, "num_kv_heads": 130, "query_len": 64, "kv_len": 131072},
        **{"head_dim": 128, "mode": "direct"},
    )
    small = replace(problem, num_qo_heads=1, num_kv_heads=1)
    part = ref.make_inputs(small, device="cuda", seed=4)

    def repeated(tensor):
        scales = tensor.scales.view(torch.uint8).expand(-1, 130, -1, -1).contiguous()
        codes = tensor.codes.expand(-1, 130, -1, -1).contiguous()
        return replace(tensor, codes=codes, scales=scales.view(tensor.scales.dtype))

    inputs = replace(part, q=repeated(part.q), k=repeated(part.k), v=repeated(part.v))
    assert inputs.k.codes.numel() * 2 > 2**31
    outputs = run(problem, inputs, triton_space(problem).default)
    assert torch.equal(outputs.out[:, :1].expand_as(outputs.out), outputs.out)
    assert ref.compare(problem, inputs, outputs).reason is None
