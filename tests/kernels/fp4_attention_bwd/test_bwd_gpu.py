"""The compiled kernels on a GPU: values, equal bits, graph replay, offsets beyond 32 bits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from fp4_bwd_calls import problem_of, run
from fp4_calls import relative_error
from tilescout.kernels.fp4_attention_bwd import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.environment import current_device

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "one key": {"query_len": 1, "kv_len": 1},
    "tails, 4 heads a KV head": {"query_len": 257, "kv_len": 1031, "num_qo_heads": 4},
    "D 128, bf16": {"query_len": 384, "kv_len": 384, "head_dim": 128, "dtype": "bfloat16"},
    "D 128, full": {"query_len": 300, "kv_len": 513, "head_dim": 128, "is_causal": False},
    "rows that see no key": {"query_len": 300, "kv_len": 130, "head_dim": 128},
}


def all_products() -> list[str]:
    device = current_device()
    has_fp4 = device is not None and device.compute_capability[0] in (10, 12)
    return ["emulated", "native"] if has_fp4 else ["emulated"]


def space_of(problem):
    (space,) = joint_space(problem, current_device()).spaces
    return space


@pytest.mark.parametrize("which", ["default", "seed", "sample"])
@pytest.mark.parametrize("shape", PROBLEMS.values(), ids=PROBLEMS)
def test_configs_match_the_reference_and_repeat(shape: dict, which: str) -> None:
    rng = random.Random(0)
    for products in all_products():
        problem = problem_of(**shape, products=products)
        space = space_of(problem)
        inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
        configs = {"default": space.default, "seed": space.seeds[1], "sample": space.sample(rng)}
        config = configs[which]
        first = run(problem, inputs, config)
        comparison = ref.compare(problem, inputs, first)
        assert comparison.reason is None, config
        for _ in range(3):
            assert ref.outputs_equal(first, run(problem, inputs, config)), config


@pytest.mark.parametrize("half", [0, 1])
def test_configs_agree_closer_than_formats_do(half: int) -> None:
    # dP is summed over the same dimensions in every tile: what differs is the order over tiles.
    problem = problem_of(query_len=512, kv_len=512, head_dim=128)
    inputs = ref.make_inputs(problem, device="cuda", seed=2)
    space = space_of(problem)
    first = run(problem, inputs, space.default)
    others = space.seeds[half::2]
    assert others
    for config in others:
        other = run(problem, inputs, config)
        for name in ("dq", "dk", "dv"):
            assert relative_error(getattr(other, name), getattr(first, name)) <= 3e-3, config


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_captured_graph_replays(dtype: str) -> None:
    problem = problem_of(query_len=200, kv_len=300, dtype=dtype)
    inputs = ref.make_inputs(problem, device="cuda", seed=3)
    space = space_of(problem)
    launcher = template(problem.op, "triton").build(problem, space.default, inputs)
    eager, captured = ref.make_outputs(problem, inputs), ref.make_outputs(problem, inputs)
    launcher.launch(inputs, eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(inputs, captured)
    graph.replay()
    torch.cuda.synchronize()
    assert ref.outputs_equal(eager, captured)
    assert ref.compare(problem, inputs, captured).reason is None


def test_more_elements_than_32_bits_count() -> None:
    # 2^31 + elements of dO and of its scratch behind the last head, all heads alike.
    heads = 520
    problem = problem_of(
        **{"num_qo_heads": heads, "num_kv_heads": heads, "query_len": 32896, "kv_len": 128},
        **{"head_dim": 128, "dtype": "bfloat16", "is_causal": False},
    )
    assert heads * problem.query_len * problem.head_dim > 2**31
    part = ref.make_inputs(replace(problem, num_qo_heads=1, num_kv_heads=1), device="cuda", seed=4)

    def repeated(tensor):
        scales = tensor.scales.view(torch.uint8).expand(-1, heads, -1, -1).contiguous()
        codes = tensor.codes.expand(-1, heads, -1, -1).contiguous()
        return replace(tensor, codes=codes, scales=scales.view(tensor.scales.dtype))

    v = part.v.view(torch.uint8).expand(-1, heads, -1, -1).contiguous()
    inputs = replace(
        part,
        q=repeated(part.q),
        k=repeated(part.k),
        v=v.view(part.v.dtype),
        v_scale=part.v_scale.expand(heads).contiguous(),
        out=part.out.expand(-1, heads, -1, -1).contiguous(),
        grad_out=part.grad_out.expand(-1, heads, -1, -1).contiguous(),
        lse=part.lse.expand(-1, heads, -1).contiguous(),
    )
    outputs = run(problem, inputs, space_of(problem).default)
    for tensor in (outputs.dq, outputs.dk, outputs.dv):
        assert torch.equal(tensor[:, :1].expand_as(tensor), tensor)
    assert ref.compare(problem, inputs, outputs).reason is None
