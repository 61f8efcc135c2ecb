"""The compiled kernels on a GPU: values over lengths, bits over 20 runs, graph replay."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_chunk_fwd import reference as ref
from tilescout.kernels.gdn_chunk_fwd.inputs import pack
from tilescout.kernels.registry import template
from tilescout.search_spaces.gdn_chunk_fwd import triton_space
from tilescout.tuner.environment import current_device

pytestmark = pytest.mark.gpu

PROBLEMS = [
    pytest.param(GdnChunkProblem(2, 3000, 2000, 4, 8, 128, 128, "bfloat16"), id="bf16"),
    pytest.param(
        GdnChunkProblem(
            *(1, 1500, 1500, 2, 4, 64, 128, "float16"),
            state_layout="VK",
            use_qk_l2norm=True,
            gate="fused",
            gate_dtype="float16",
            beta_dtype="float16",
        ),
        id="fp16-raw-gate-VK",
    ),
    pytest.param(GdnChunkProblem(1, 700, 700, 2, 2, 64, 64, "float32"), id="fp32"),
    pytest.param(GdnChunkProblem(1, 1500, 1500, 2, 2, 96, 192, "bfloat16"), id="K-96-V-192"),
    pytest.param(GdnChunkProblem(1, 700, 700, 1, 3, 256, 64, "bfloat16"), id="K-256-V-64"),
]

# Lengths of the published tests of FLA, FlashQLA and FlashInfer.
LENGTHS = {
    "one short": [15],
    "unaligned": [256, 244, 500],
    "many short": [15, 85, 200, 900, 800],
    "tail of two tokens": [211, 774, 15],
    "empty": [300, 0],
    "whole chunks": [64, 128, 512],
    "odd": [64, 111, 192],
    "one token each": [1] * 40,
    "2050 sequences": [3] * 2050,
}


def device():
    found = current_device()
    assert found is not None
    return found


def run(problem, config, inputs):
    outputs = ref.make_outputs(problem, inputs)
    template("gdn_chunk_fwd", "triton").build(problem, config, inputs).launch(inputs, outputs)
    return outputs


@pytest.mark.parametrize("problem", PROBLEMS)
def test_seeds_and_draws_match_the_reference_and_repeat(problem) -> None:
    space = triton_space(problem, device())
    rng = random.Random(0)
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    for config in {*space.valid_seeds(), *(space.sample(rng) for _ in range(2))}:
        launcher = template("gdn_chunk_fwd", "triton").build(problem, config, inputs)
        first = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, first)
        assert ref.compare(problem, inputs, first).reason is None, config
        for _ in range(20):
            again = ref.make_outputs(problem, inputs)
            launcher.launch(inputs, again)
            assert ref.outputs_equal(first, again), config


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(lengths) -> None:
    tokens = sum(lengths)
    problem = GdnChunkProblem(len(lengths), tokens, max(lengths), 2, 4, 128, 128, "bfloat16")
    inputs = pack(problem, lengths, device="cuda", seed=2, num_spare_tokens=7)
    for config in triton_space(problem, device()).valid_seeds():
        outputs = run(problem, config, inputs)
        assert ref.compare(problem, inputs, outputs).reason is None, config


def test_strong_gates_and_heads_that_never_forget() -> None:
    problem = GdnChunkProblem(1, 2048, 2048, 4, 8, 128, 128, "bfloat16")
    inputs = ref.make_inputs(problem, device="cuda", seed=3)
    strength = torch.linspace(0, 16, 8, device="cuda")
    inputs.gate.copy_(-strength * torch.nn.functional.softplus(torch.randn_like(inputs.gate) / 2))
    for config in triton_space(problem, device()).valid_seeds():
        outputs = run(problem, config, inputs)
        assert ref.compare(problem, inputs, outputs).reason is None, config


def test_a_captured_graph_takes_other_bounds() -> None:
    from tilescout import ops

    problem = GdnChunkProblem(3, 1000, 400, 2, 4, 128, 128, "bfloat16")
    inputs = pack(problem, [400, 350, 250], device="cuda", seed=4)
    bounds = inputs.cu_seqlens.clone()

    def call(cu_seqlens):
        return ops.gdn.chunk_gated_delta_rule(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.gate,
            inputs.beta,
            initial_state=inputs.initial_state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )

    with torch.no_grad():
        call(bounds)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, final = call(bounds)
        for lengths in ([400, 350, 250], [1, 0, 999], [100, 300, 580]):
            other = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(bounds.dtype)
            bounds.copy_(other)
            graph.replay()
            torch.cuda.synchronize()
            changed = replace(inputs, cu_seqlens=other)
            outputs = ref.GdnChunkOutputs(out, final)
            assert ref.compare(problem, changed, outputs).reason is None, lengths
