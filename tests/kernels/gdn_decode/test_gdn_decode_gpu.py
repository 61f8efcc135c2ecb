"""The compiled kernel on a GPU: values, bits over 20 runs, graph replay in place."""

from __future__ import annotations

import random

import pytest
import torch
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.kernels.gdn_decode import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.gdn_decode import triton_space

pytestmark = pytest.mark.gpu

PROBLEMS = [
    pytest.param(GdnDecodeProblem(5, 1, 16, 32, 128, 128, "bfloat16"), id="qwen3-next"),
    pytest.param(
        GdnDecodeProblem(3, 4, 4, 8, 128, 128, "bfloat16", state_layout="VK"), id="steps-VK"
    ),
    pytest.param(
        GdnDecodeProblem(2, 2, 1, 3, 96, 192, "float16", gate="given", use_qk_l2norm=False),
        id="K-96-V-192-given",
    ),
    pytest.param(
        GdnDecodeProblem(4, 1, 2, 2, 256, 64, "float32", "bfloat16", "VK"), id="bf16-state"
    ),
]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sampled_configs_match_the_reference_and_repeat(problem, h200) -> None:
    space = triton_space(problem, h200)
    rng = random.Random(0)
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    for config in {*space.valid_seeds(), *(space.sample(rng) for _ in range(3))}:
        launcher = template("gdn_decode", "triton").build(problem, config, inputs)
        first = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, first)
        assert ref.compare(problem, inputs, first).reason is None, config
        for _ in range(20):
            again = ref.make_outputs(problem, inputs)
            launcher.launch(inputs, again)
            assert ref.outputs_equal(first, again), config


def test_a_captured_graph_takes_steps_in_place() -> None:
    from tilescout import ops

    problem = GdnDecodeProblem(4, 1, 4, 8, 128, 128, "bfloat16")
    inputs = ref.make_inputs(problem, device="cuda", seed=2)
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.gate, "beta": inputs.beta}
    options = {"A_log": inputs.a_log, "dt_bias": inputs.dt_bias, "slots": inputs.slots}
    eager, captured = inputs.state.clone(), inputs.state.clone()
    out = torch.empty_like(inputs.v)
    ops.gdn.gdn_decode(**given, state=captured.clone(), out=out, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gdn.gdn_decode(**given, state=captured, out=out, **options)
    for _ in range(3):
        expected = ops.gdn.gdn_decode(**given, state=eager, **options)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert torch.equal(captured, eager)
