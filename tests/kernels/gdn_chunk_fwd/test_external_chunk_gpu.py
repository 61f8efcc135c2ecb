"""FLA, FlashQLA and FlashInfer themselves, where installed: values, bits, graphs, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tilescout import ops, use_external
from tilescout.kernels import external
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_chunk_fwd.inputs import make_inputs, make_outputs, make_validation_inputs
from tilescout.kernels.gdn_chunk_fwd.reference import chunked_reference, compare, outputs_equal
from tilescout.kernels.registry import template
from tilescout.tuner.environment import current_device

# Libraries tune and compile for minutes where their caches are empty.
# Their imports warn of this and that.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

# One pair of head counts: FLA tunes itself anew for each.
PROBLEM = GdnChunkProblem(3, 1100, 700, 2, 4, 128, 128, "bfloat16")
LIBRARIES = {
    "fla": external.FLA,
    "flash_qla": external.FLASH_QLA,
    "flashinfer": external.FLASHINFER,
}


def needs(name: str) -> None:
    reason = LIBRARIES[name].missing
    if reason is not None:
        pytest.skip(reason)
    external.set_external_policy("always")
    refusal = template("gdn_chunk_fwd", name).supports(PROBLEM, current_device())
    if refusal is not None:
        pytest.skip(refusal)


def launcher_of(name, problem, inputs):
    return template("gdn_chunk_fwd", name).build(problem, Config.of(name, {}), inputs)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_ragged_sequences_match_the_reference_and_repeat(name, layout) -> None:
    needs(name)
    problem = replace(PROBLEM, state_layout=layout)
    inputs = make_validation_inputs(problem, device="cuda", seed=1)
    launcher = launcher_of(name, problem, inputs)
    first, second = (make_outputs(problem, inputs) for _ in range(2))
    launcher.launch(inputs, first)
    comparison = compare(problem, inputs, first)
    assert comparison.is_ok, comparison.reason
    launcher.launch(inputs, second)
    assert outputs_equal(first, second)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_captured_graph_gives_what_a_call_gives(name) -> None:
    needs(name)
    inputs = make_inputs(PROBLEM, device="cuda", seed=2)
    launcher = launcher_of(name, PROBLEM, inputs)
    eager, captured = (make_outputs(PROBLEM, inputs) for _ in range(2))
    launcher.launch(inputs, eager)
    launcher.launch(inputs, captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(inputs, captured)
    captured.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert outputs_equal(eager, captured)
    assert compare(PROBLEM, inputs, captured).is_ok


@pytest.mark.parametrize("name", ["flash_qla", "fla"])
def test_gradients_match_those_of_the_reference(name, monkeypatch) -> None:
    needs(name)
    if name == "fla":  # FlashQLA comes first where both are installed
        monkeypatch.setattr(external.FLASH_QLA.__class__, "missing", _only_fla)
    problem = replace(PROBLEM, num_sequences=1, num_tokens=300, max_seqlen=300)
    inputs = make_inputs(problem, device="cuda", seed=3)
    names = ("q", "k", "v", "gate", "beta", "initial_state")
    leaves = {n: getattr(inputs, n).clone().requires_grad_() for n in names}
    exact = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    out, final = chunked_reference(problem, replace(inputs, **exact), 0)
    weights = torch.randn_like(out).to(inputs.v.dtype)
    (out.mul(weights.double()).sum() + final.sum()).backward()
    use_external("always")
    mine = {n: leaves[n] for n in ("q", "k", "v", "beta", "initial_state")}
    out, final = ops.gdn.chunk_gated_delta_rule(
        **mine,
        g=leaves["gate"],
        scale=inputs.scale,
        cu_seqlens=inputs.cu_seqlens,
        cu_seqlens_cpu=inputs.cu_seqlens_cpu,
        output_final_state=True,
    )
    (out.float().mul(weights.float().transpose(0, 1)[None]).sum() + final.sum()).backward()
    for n in names:
        expected, found = exact[n].grad.double(), leaves[n].grad.double()
        error = (found - expected).norm() / expected.norm()
        assert error < 0.03, f"gradient of {n}: relative error {error:.3g}"


_missing = external.Library.missing


@property
def _only_fla(self: external.Library) -> str | None:
    return _missing.fget(self) if self.distribution == "fla-core" else "left out by this test"
