"""The compiled Triton kernels on a GPU: values, bits over 20 runs, early launches, graph replay."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from devices import H200
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_decode import GdnDecodeOutputs, GdnDecodeProblem
from tilescout.kernels.gdn_decode import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.gdn_decode import SPACES

pytestmark = pytest.mark.gpu

NUM_DRAWN = 6
PROBLEMS = {
    "qwen3-next-VK": GdnDecodeProblem(5, 1, 16, 32, 128, 128, "bfloat16", state_layout="VK"),
    "qwen3-next-KV": GdnDecodeProblem(5, 1, 16, 32, 128, 128, "bfloat16"),
    "steps-VK": GdnDecodeProblem(3, 4, 4, 8, 128, 128, "bfloat16", state_layout="VK"),
    "K-96-V-192-given": GdnDecodeProblem(
        2, 2, 1, 3, 96, 192, "float16", gate="given", use_qk_l2norm=False
    ),
    "bf16-state": GdnDecodeProblem(4, 1, 2, 2, 256, 64, "float32", "bfloat16", "VK"),
}
NUM_SHARES = 3
"""Tests that the configs of one problem and template are dealt out to."""


def configs_of(problem, name) -> list[Config]:
    space, rng = SPACES[name](problem, H200), random.Random(0)
    drawn = (space.sample(rng) for _ in range(NUM_DRAWN))
    return list(dict.fromkeys([*space.valid_seeds(), *drawn]))


@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.parametrize("name", ["triton", "triton_stream"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_seeds_and_draws_match_the_reference_and_repeat(problem, name, share) -> None:
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    for config in configs_of(problem, name)[share::NUM_SHARES]:
        launcher = template("gdn_decode", name).build(problem, config, inputs)
        first = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, first)
        assert ref.compare(problem, inputs, first).reason is None, config
        for _ in range(20):
            again = ref.make_outputs(problem, inputs)
            launcher.launch(inputs, again)
            assert ref.outputs_equal(first, again), config


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_early_launches_in_a_row_see_each_others_states(is_graph) -> None:
    """Twelve steps in place, each launched while the one before may still run."""
    problem = replace(PROBLEMS["qwen3-next-VK"], batch=64)
    inputs = ref.make_inputs(problem, device="cuda", seed=5)
    configs = [c for c in configs_of(problem, "triton_stream") if c["launch_pdl"]][:4]
    plain = SPACES["triton"](problem, H200).default
    expected = inputs.state.clone()
    results: list[GdnDecodeOutputs] = []
    for config in [plain, *configs]:
        state = expected if config == plain else inputs.state.clone()
        given = replace(inputs, state=state)
        outputs = GdnDecodeOutputs(torch.empty_like(inputs.v), state)
        launcher = template("gdn_decode", config.template).build(problem, config, given)
        launcher.launch(given, outputs)
        if is_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(11):
                    launcher.launch(given, outputs)
            graph.replay()
        else:
            for _ in range(11):
                launcher.launch(given, outputs)
        torch.cuda.synchronize()
        results.append(outputs)
    exact = results[0]
    for found in results[1:]:
        torch.testing.assert_close(found.state, exact.state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.out, exact.out, rtol=2e-2, atol=1e-3)


def test_metamorphic_of_every_seed() -> None:
    """A step taken twice is two steps; layouts are transposes; no strength is decay alone."""
    both = replace(PROBLEMS["steps-VK"], num_steps=2, gate="given", dtype="float32")
    one = replace(both, num_steps=1)
    inputs = ref.make_inputs(both, device="cuda", seed=6)
    names = ("q", "k", "v", "gate", "beta")
    kv = replace(both, state_layout="KV")
    turned = replace(inputs, state=inputs.state.transpose(-1, -2).contiguous())
    for name in ("triton", "triton_stream"):
        config = SPACES[name](both, H200).default

        def run(problem, given, config=config, name=name):
            outputs = ref.make_outputs(problem, given)
            template("gdn_decode", name).build(problem, config, given).launch(given, outputs)
            return outputs

        whole = run(both, inputs)
        state, parts = inputs.state, []
        for step in range(2):
            tokens = {n: getattr(inputs, n)[:, step : step + 1].contiguous() for n in names}
            parts.append(run(one, replace(inputs, state=state, **tokens)))
            state = parts[-1].state
        exact = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(torch.cat([p.out for p in parts], 1), whole.out, **exact)
        torch.testing.assert_close(state, whole.state, **exact)
        other = run(kv, turned)
        torch.testing.assert_close(other.out, whole.out, **exact)
        torch.testing.assert_close(other.state.transpose(-1, -2), whole.state, **exact)
        weak = replace(inputs, beta=torch.zeros_like(inputs.beta))
        decay = inputs.gate.sum(1).exp()[..., None, None]
        rows = inputs.slots.long()
        torch.testing.assert_close(run(both, weak).state[rows], decay * inputs.state[rows], **exact)
        reset = replace(inputs, gate=torch.full_like(inputs.gate, -1e4))
        fresh = replace(reset, state=torch.zeros_like(inputs.state))
        assert torch.equal(run(both, reset).state[rows], run(both, fresh).state[rows])


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
