"""FLA and FlashInfer themselves, where installed: values, states in their pool, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tilescout.kernels import external
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_decode import GdnDecodeOutputs, GdnDecodeProblem
from tilescout.kernels.gdn_decode import reference as ref
from tilescout.kernels.registry import template
from tilescout.tuner.environment import current_device

# FlashInfer's kernels compile for tens of seconds.
# Their imports warn of this and that.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

PROBLEM = GdnDecodeProblem(5, 1, 16, 32, 128, 128, "bfloat16", state_layout="VK")
LIBRARIES = {"fla": external.FLA, "flashinfer": external.FLASHINFER}


def launcher_of(name, inputs):
    reason = LIBRARIES[name].missing
    if reason is not None:
        pytest.skip(reason)
    external.set_external_policy("forward")
    refusal = template("gdn_decode", name).supports(PROBLEM, current_device())
    if refusal is not None:
        pytest.skip(refusal)
    return template("gdn_decode", name).build(PROBLEM, Config.of(name, {}), inputs)


@pytest.mark.parametrize("name", LIBRARIES)
def test_slots_and_a_skipped_sequence_match_the_reference_and_repeat(name) -> None:
    inputs = ref.make_validation_inputs(PROBLEM, device="cuda", seed=1)
    launcher = launcher_of(name, inputs)
    first, second = (ref.make_outputs(PROBLEM, inputs) for _ in range(2))
    launcher.launch(inputs, first)
    comparison = ref.compare(PROBLEM, inputs, first)
    assert comparison.is_ok, comparison.reason
    launcher.launch(inputs, second)
    assert ref.outputs_equal(first, second)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_replayed_graph_updates_the_pool(name) -> None:
    inputs = ref.make_validation_inputs(PROBLEM, device="cuda", seed=2)
    launcher = launcher_of(name, inputs)
    pool = inputs.state.clone()
    outputs = GdnDecodeOutputs(torch.empty_like(inputs.v), pool)
    mine = replace(inputs, state=pool)
    launcher.launch(mine, outputs)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(mine, outputs)
    pool.copy_(inputs.state)
    graph.replay()
    torch.cuda.synchronize()
    comparison = ref.compare(PROBLEM, inputs, outputs)
    assert comparison.is_ok, comparison.reason
    untouched = [s for s in range(pool.shape[0]) if s not in inputs.slots.tolist()]
    assert torch.equal(pool[untouched], inputs.state[untouched])
