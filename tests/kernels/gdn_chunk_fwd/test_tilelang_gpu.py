"""The TileLang template on a GPU: values over lengths and head dims, bits over 20 runs, replay.

Most of the time is the compiler's, so the scans are compiled on every core first.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from devices import H200
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_chunk_fwd import reference as ref
from tilescout.kernels.gdn_chunk_fwd.inputs import pack
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.gdn_chunk_fwd import SPACES
from tilescout.tuner.compile_pool import CompilePool

pytestmark = pytest.mark.gpu

NUM_DRAWN = 3
QWEN = GdnChunkProblem(2, 3000, 2000, 4, 8, 128, 128, "bfloat16")
PROBLEMS = {
    "bf16": QWEN,
    "fp16-raw-gate-VK": GdnChunkProblem(
        *(1, 1500, 1500, 2, 4, 64, 128, "float16"),
        state_layout="VK",
        use_qk_l2norm=True,
        gate="fused",
        gate_dtype="float16",
        beta_dtype="float16",
    ),
    "K-96-V-192": GdnChunkProblem(1, 1500, 1500, 2, 2, 96, 192, "bfloat16"),
    "K-256-V-64": GdnChunkProblem(1, 1200, 1200, 1, 3, 256, 64, "bfloat16"),
    "V-96": GdnChunkProblem(1, 700, 700, 2, 2, 64, 96, "bfloat16", has_initial_state=False),
}
LENGTHS = {
    "one short": [15],
    "many short": [15, 85, 200, 900, 800],
    "tail of two tokens": [211, 774, 15],
    "empty": [300, 0],
    "whole chunks": [64, 128, 512],
    "one token each": [1] * 40,
    "2050 sequences": [3] * 2050,
}


def configs_of(problem):
    space, rng = SPACES["tilelang"](problem, H200), random.Random(0)
    drawn = (space.sample(rng) for _ in range(NUM_DRAWN))
    return [*dict.fromkeys([space.default, *space.valid_seeds(), *drawn])]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if not torch.cuda.is_available():
        return
    module = module_of("gdn_chunk_fwd")
    jobs = [(problem, config) for problem in PROBLEMS.values() for config in configs_of(problem)]
    with CompilePool() as pool:
        for job in [pool.submit("gdn_chunk_fwd", module, "tilelang", *job, 90) for job in jobs]:
            job.result()


def run(problem, config, inputs):
    outputs = ref.make_outputs(problem, inputs)
    template("gdn_chunk_fwd", "tilelang").build(problem, config, inputs).launch(inputs, outputs)
    return outputs


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_seeds_and_draws_match_the_reference_and_repeat(problem, h200) -> None:
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    for config in configs_of(problem):
        launcher = template("gdn_chunk_fwd", "tilelang").build(problem, config, inputs)
        first = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, first)
        assert ref.compare(problem, inputs, first).reason is None, config
        for _ in range(20):
            again = ref.make_outputs(problem, inputs)
            launcher.launch(inputs, again)
            assert ref.outputs_equal(first, again), config


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(lengths, h200) -> None:
    # The scans are those of the problem above: lengths are no part of a kernel.
    problem = replace(
        QWEN, num_sequences=len(lengths), num_tokens=sum(lengths), max_seqlen=max(lengths)
    )
    inputs = pack(problem, lengths, device="cuda", seed=2, num_spare_tokens=7)
    for config in configs_of(QWEN)[1::3]:
        outputs = run(problem, config, inputs)
        assert ref.compare(problem, inputs, outputs).reason is None, config


def test_strong_gates_and_heads_that_never_forget(h200) -> None:
    problem = replace(QWEN, num_sequences=1, num_tokens=2048, max_seqlen=2048)
    inputs = ref.make_inputs(problem, device="cuda", seed=3)
    strength = torch.linspace(0, 16, 8, device="cuda")
    inputs.gate.copy_(-strength * torch.nn.functional.softplus(torch.randn_like(inputs.gate) / 2))
    for config in configs_of(QWEN):
        outputs = run(problem, config, inputs)
        assert ref.compare(problem, inputs, outputs).reason is None, config


def test_a_dense_batch_equals_its_sequences_packed(h200) -> None:
    problem = replace(QWEN, num_sequences=3, num_tokens=900, max_seqlen=300)
    packed = pack(problem, [300] * 3, device="cuda", seed=4)
    dense = replace(
        packed,
        cu_seqlens=None,
        **{n: getattr(packed, n).unflatten(1, (3, 300))[0] for n in ("q", "k", "v")},
        **{n: getattr(packed, n).unflatten(1, (3, 300))[0] for n in ("gate", "beta")},
    )
    for config in configs_of(QWEN)[:4]:
        expected, found = run(problem, config, packed), run(problem, config, dense)
        assert torch.equal(found.out.flatten(0, 1)[None], expected.out), config
        assert torch.equal(found.final_state, expected.final_state), config


def test_a_captured_graph_takes_other_bounds(h200) -> None:
    problem = replace(QWEN, num_sequences=3, num_tokens=1000, max_seqlen=400)
    inputs = pack(problem, [400, 350, 250], device="cuda", seed=5)
    config = next(config for config in configs_of(QWEN) if config["segment"])
    launcher = template("gdn_chunk_fwd", "tilelang").build(problem, config, inputs)
    outputs = ref.make_outputs(problem, inputs)
    launcher.launch(inputs, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(inputs, outputs)
    for lengths in ([400, 350, 250], [1, 0, 999], [100, 300, 580]):
        bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        inputs.cu_seqlens.copy_(bounds.to(inputs.cu_seqlens.dtype))
        outputs.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert ref.compare(problem, inputs, outputs).reason is None, lengths
