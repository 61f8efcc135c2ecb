"""The TileLang template on a GPU: values of every form, bits over 20 runs, in place, graph replay.

Most of the time is the compiler's: a test compiles one kernel, so that `pytest -n` spreads them.
"""

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

NUM_DRAWN = 5
QWEN = GdnDecodeProblem(33, 1, 16, 32, 128, 128, "bfloat16", state_layout="VK")
PROBLEMS = {
    "qwen3-next-VK": QWEN,
    "qwen3-next-KV": replace(QWEN, state_layout="KV"),
    "steps-bf16-state": GdnDecodeProblem(
        19, 4, 4, 8, 128, 128, "bfloat16", state_dtype="bfloat16", state_layout="VK"
    ),
    "K-96-V-192-given": GdnDecodeProblem(
        17, 2, 1, 3, 96, 192, "float16", gate="given", use_qk_l2norm=False
    ),
    "K-256-V-64-fp32": GdnDecodeProblem(40, 1, 2, 2, 256, 64, "float32", state_layout="VK"),
}


FEW_SMS = replace(H200, num_sms=4)
"""Runs of tiles are for problems that fill a GPU; these are small."""


def forms_of(problem) -> dict[tuple, Config]:
    """The first config for each way in and out of registers, of those that are known to be good."""
    space = SPACES["tilelang"](problem, FEW_SMS)
    found: dict[tuple, Config] = {}
    for config in space.valid_seeds():
        found.setdefault((config["load"], config.get("store")), config)
    return found


def cases():
    """Every form of every problem; slow: all other seeds and some draws."""
    for name, problem in PROBLEMS.items():
        space, rng = SPACES["tilelang"](problem, FEW_SMS), random.Random(0)
        quick = list(forms_of(problem).values())
        drawn = (space.sample(rng) for _ in range(NUM_DRAWN))
        for config in dict.fromkeys([*quick, *space.valid_seeds(), *drawn]):
            marks = [] if config in quick else [pytest.mark.slow]
            yield pytest.param(problem, config, id=f"{name} {config}", marks=marks)


def stream(problem) -> Config:
    return forms_of(problem)["tma", "tma"]


@pytest.mark.parametrize(("problem", "config"), list(cases()))
def test_values_bits_and_updates_in_place(problem, config) -> None:
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    launcher = template("gdn_decode", "tilelang").build(problem, config, inputs)
    first = ref.make_outputs(problem, inputs)
    launcher.launch(inputs, first)
    torch.cuda.synchronize()
    assert ref.compare(problem, inputs, first).reason is None
    for _ in range(20):
        again = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, again)
        assert ref.outputs_equal(first, again)
    shared = inputs.state.clone()
    in_place = GdnDecodeOutputs(torch.full_like(first.out, float("nan")), shared)
    launcher.launch(replace(inputs, state=shared), in_place)
    assert torch.equal(in_place.out, first.out)
    live = inputs.slots[inputs.slots >= 0].long()
    assert torch.equal(shared[live], first.state[live])
    others = torch.ones(len(shared), dtype=torch.bool, device="cuda")
    others[live] = False
    assert torch.equal(shared[others], inputs.state[others])


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
    config = SPACES["tilelang"](problem, FEW_SMS).seeds[4]
    assert (config["load"], config["store"]) == ("tma", "tma")
    for given in (packed, fresh):
        launcher = template("gdn_decode", "tilelang").build(problem, config, given)
        state = torch.full_like(inputs.state, float("nan"))
        outputs = GdnDecodeOutputs(torch.full_like(packed.v, float("nan")), state)
        launcher.launch(given, outputs)
        assert ref.compare(problem, given, outputs).reason is None


def test_a_captured_graph_takes_other_values() -> None:
    problem = QWEN
    inputs = ref.make_inputs(problem, device="cuda", seed=4)
    config = stream(problem)
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
    for config in SPACES["tilelang"](problem, FEW_SMS).valid_seeds():
        launcher = template("gdn_decode", "tilelang").build(problem, config, inputs)
        near_out = GdnDecodeOutputs(torch.empty_like(inputs.v), torch.empty_like(inputs.state))
        launcher.launch(inputs, near_out)
        far_out = GdnDecodeOutputs(torch.empty_like(inputs.v), pool.clone())
        launcher.launch(far, far_out)
        assert torch.equal(near_out.out, far_out.out), config
        assert torch.equal(near_out.state, far_out.state[-2:]), config
