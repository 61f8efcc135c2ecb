"""The TileLang template on a GPU: values of every form, bits over 20 runs, in place, graph replay.

Most of the time is the compiler's, so all kernels are compiled on every core first.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from devices import H200
from tilescout.kernels.gdn_decode import GdnDecodeOutputs, GdnDecodeProblem
from tilescout.kernels.gdn_decode import reference as ref
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.gdn_decode import SPACES
from tilescout.tuner.compile_pool import CompilePool

pytestmark = pytest.mark.gpu

NUM_DRAWN = 3
PROBLEMS = {
    "qwen3-next-VK": GdnDecodeProblem(33, 1, 16, 32, 128, 128, "bfloat16", state_layout="VK"),
    "qwen3-next-KV": GdnDecodeProblem(33, 1, 16, 32, 128, 128, "bfloat16"),
    "steps-bf16-state": GdnDecodeProblem(
        19, 4, 4, 8, 128, 128, "bfloat16", state_dtype="bfloat16", state_layout="VK"
    ),
    "K-96-V-192-given": GdnDecodeProblem(
        17, 2, 1, 3, 96, 192, "float16", gate="given", use_qk_l2norm=False
    ),
    "K-256-V-64-fp32": GdnDecodeProblem(40, 1, 2, 2, 256, 64, "float32", state_layout="VK"),
}


def configs_of(problem):
    space, rng = SPACES["tilelang"](problem, H200), random.Random(0)
    drawn = (space.sample(rng) for _ in range(NUM_DRAWN))
    return [*dict.fromkeys([space.default, *space.valid_seeds(), *drawn])]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if not torch.cuda.is_available():
        return
    module = module_of("gdn_decode")
    jobs = [(problem, config) for problem in PROBLEMS.values() for config in configs_of(problem)]
    with CompilePool() as pool:
        for job in [pool.submit("gdn_decode", module, "tilelang", *job, 90) for job in jobs]:
            job.result()


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_form_matches_the_reference_and_repeats(problem, h200) -> None:
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    for config in configs_of(problem):
        launcher = template("gdn_decode", "tilelang").build(problem, config, inputs)
        first = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, first)
        assert ref.compare(problem, inputs, first).reason is None, config
        for _ in range(20):
            again = ref.make_outputs(problem, inputs)
            launcher.launch(inputs, again)
            assert ref.outputs_equal(first, again), config


def streams(problem):
    return [config for config in configs_of(problem) if config["load"] != "direct"]


@pytest.mark.parametrize("name", ["qwen3-next-VK", "qwen3-next-KV"])
def test_states_updated_in_place_are_those_of_a_copy(name, h200) -> None:
    problem = PROBLEMS[name]
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=2)
    for config in streams(problem):
        launcher = template("gdn_decode", "tilelang").build(problem, config, inputs)
        apart = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, apart)
        shared = inputs.state.clone()
        in_place = GdnDecodeOutputs(torch.empty_like(apart.out), shared)
        launcher.launch(replace(inputs, state=shared), in_place)
        assert torch.equal(in_place.out, apart.out), config
        live = inputs.slots[inputs.slots >= 0].long()
        assert torch.equal(shared[live], apart.state[live]), config
        others = torch.ones(len(shared), dtype=torch.bool, device="cuda")
        others[live] = False
        assert torch.equal(shared[others], inputs.state[others]), config


def test_packed_unaligned_and_missing_inputs() -> None:
    problem = GdnDecodeProblem(4, 3, 2, 4, 128, 64, "bfloat16", state_layout="VK")
    inputs = ref.make_inputs(problem, device="cuda", seed=3)
    wide = torch.randn(1, 12, 2, 131, device="cuda").bfloat16()
    packed = replace(
        inputs,
        q=wide[..., 1:129],
        k=inputs.k.reshape(1, 12, 2, 128),
        v=inputs.v.reshape(1, 12, 4, 64),
        gate=inputs.gate.reshape(1, 12, 4),
        beta=inputs.beta.reshape(1, 12, 4),
        slots=None,
        cu_seqlens=torch.tensor([0, 5, 5, 6, 12], device="cuda"),
    )
    fresh = replace(packed, state=None)
    config = SPACES["tilelang"](problem, replace(H200, num_sms=1)).seeds[4]
    assert (config["load"], config["store"]) == ("tma", "tma")
    for given in (packed, fresh):
        launcher = template("gdn_decode", "tilelang").build(problem, config, given)
        state = torch.full_like(inputs.state, float("nan"))
        outputs = GdnDecodeOutputs(torch.full_like(packed.v, float("nan")), state)
        launcher.launch(given, outputs)
        assert ref.compare(problem, given, outputs).reason is None


def test_a_captured_graph_takes_other_values(h200) -> None:
    problem = PROBLEMS["qwen3-next-VK"]
    inputs = ref.make_inputs(problem, device="cuda", seed=4)
    config = streams(problem)[0]
    launcher = template("gdn_decode", "tilelang").build(problem, config, inputs)
    outputs = ref.make_outputs(problem, inputs)
    launcher.launch(inputs, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(inputs, outputs)
    for seed in (5, 6):
        other = ref.make_inputs(problem, device="cuda", seed=seed)
        for name in ("q", "k", "v", "gate", "beta", "state", "slots"):
            getattr(inputs, name).copy_(getattr(other, name))
        outputs.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert ref.compare(problem, inputs, outputs).reason is None, seed


@pytest.mark.slow
def test_a_pool_past_two_to_the_31_elements(h200) -> None:
    problem = GdnDecodeProblem(2, 1, 16, 32, 128, 128, "bfloat16", state_layout="VK")
    inputs = ref.make_inputs(problem, device="cuda", seed=7)
    num_slots = 2**31 // inputs.state[0].numel() + 8
    pool = torch.empty((num_slots, *inputs.state.shape[1:]), device="cuda")
    pool[-2:] = inputs.state
    far = replace(inputs, state=pool, slots=inputs.slots + (num_slots - 2))
    for config in SPACES["tilelang"](problem, replace(H200, num_sms=1)).valid_seeds():
        launcher = template("gdn_decode", "tilelang").build(problem, config, inputs)
        near_out = GdnDecodeOutputs(torch.empty_like(inputs.v), torch.empty_like(inputs.state))
        launcher.launch(inputs, near_out)
        far_out = GdnDecodeOutputs(torch.empty_like(inputs.v), pool.clone())
        launcher.launch(far, far_out)
        assert torch.equal(near_out.out, far_out.out), config
        assert torch.equal(near_out.state, far_out.state[-2:]), config
