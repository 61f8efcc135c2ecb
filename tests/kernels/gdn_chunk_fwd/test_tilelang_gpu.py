"""The TileLang template on a GPU: values over lengths and head dims, bits over 20 runs, replay.

Most of the time is the compiler's: a test compiles one config, so that `pytest -n` spreads them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from devices import H200
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_chunk_fwd import reference as ref
from tilescout.kernels.gdn_chunk_fwd.inputs import pack
from tilescout.kernels.registry import template
from tilescout.search_spaces.gdn_chunk_fwd import SPACES

pytestmark = pytest.mark.gpu

NUM_DRAWN = 3
QWEN = GdnChunkProblem(2, 3000, 2000, 4, 8, 128, 128, "bfloat16")
OTHERS = {
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


def configs_of(problem: GdnChunkProblem) -> list[Config]:
    """Those that are known to be good, then some draws."""
    space, rng = SPACES["tilelang"](problem, H200), random.Random(0)
    drawn = (space.sample(rng) for _ in range(NUM_DRAWN))
    return list(dict.fromkeys([space.default, *space.valid_seeds(), *drawn]))


def name_of(place: int, config: Config) -> str:
    return f"{place} {config['scan_roles']} {config['scan_producer']} {config['form']}"


def forms() -> dict[tuple, Config]:
    """The first good config of each way to share the scan's work, and one of two roles with w."""
    found: dict[tuple, Config] = {}
    for config in configs_of(QWEN)[:-NUM_DRAWN]:
        found.setdefault((config["scan_roles"], config["scan_producer"]), config)
        if config["scan_roles"] == "split" and config["form"] == "wy":
            found.setdefault(("split", "wy"), config)
    return found


FORMS = forms()


def of_qwen() -> Iterator[object]:
    """Every form; slow: the other configs."""
    for place, config in enumerate(configs_of(QWEN)):
        marks = [] if config in FORMS.values() else [pytest.mark.slow]
        yield pytest.param(config, marks=marks, id=name_of(place, config))


def of_others() -> Iterator[object]:
    """Two roles where a problem has them, else the default; slow: the other configs."""
    for name, problem in OTHERS.items():
        configs = configs_of(problem)
        quick = next((c for c in configs if c["scan_roles"] == "split"), configs[0])
        for place, config in enumerate(configs):
            marks = [] if config == quick else [pytest.mark.slow]
            yield pytest.param(problem, config, marks=marks, id=f"{name} {name_of(place, config)}")


def build(problem, config, inputs):
    return template("gdn_chunk_fwd", "tilelang").build(problem, config, inputs)


def run(problem, config, inputs):
    outputs = ref.make_outputs(problem, inputs)
    build(problem, config, inputs).launch(inputs, outputs)
    return outputs


def check_values_and_bits(problem, config, inputs) -> None:
    launcher = build(problem, config, inputs)
    first = ref.make_outputs(problem, inputs)
    launcher.launch(inputs, first)
    assert ref.compare(problem, inputs, first).reason is None
    for _ in range(20):
        again = ref.make_outputs(problem, inputs)
        launcher.launch(inputs, again)
        assert ref.outputs_equal(first, again)


def of_lengths(lengths: list[int]) -> GdnChunkProblem:
    """Lengths are no part of a kernel."""
    sizes = len(lengths), sum(lengths), max(lengths)
    names = "num_sequences", "num_tokens", "max_seqlen"
    return replace(QWEN, **dict(zip(names, sizes, strict=True)))


def check_lengths(config) -> None:
    for name, lengths in LENGTHS.items():
        problem = of_lengths(lengths)
        inputs = pack(problem, lengths, device="cuda", seed=2, num_spare_tokens=7)
        outputs = run(problem, config, inputs)
        assert ref.compare(problem, inputs, outputs).reason is None, name


def check_strong_gates_and_heads_that_never_forget(config) -> None:
    problem = of_lengths([2048])
    inputs = pack(problem, [2048], device="cuda", seed=3)
    strength = torch.linspace(0, 16, 8, device="cuda")
    inputs.gate.copy_(-strength * torch.nn.functional.softplus(torch.randn_like(inputs.gate) / 2))
    outputs = run(problem, config, inputs)
    assert ref.compare(problem, inputs, outputs).reason is None


def check_a_captured_graph_takes_other_bounds(config) -> None:
    problem = of_lengths([400, 350, 250])
    inputs = pack(problem, [400, 350, 250], device="cuda", seed=5)
    launcher = build(problem, config, inputs)
    outputs = ref.make_outputs(problem, inputs)
    launcher.launch(inputs, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(inputs, outputs)
    for lengths in ([400, 350, 250], [1, 0, 999], [100, 300, 580]):
        bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        inputs.cu_seqlens.copy_(bounds)
        outputs.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        changed = replace(inputs, cu_seqlens=bounds)
        assert ref.compare(problem, changed, outputs).reason is None, lengths


@pytest.mark.parametrize("config", list(of_qwen()))
def test_a_config_serves_every_batch_with_one_binary(config) -> None:
    check_values_and_bits(QWEN, config, ref.make_validation_inputs(QWEN, device="cuda", seed=1))
    check_lengths(config)
    check_strong_gates_and_heads_that_never_forget(config)
    check_a_captured_graph_takes_other_bounds(config)


@pytest.mark.parametrize(("problem", "config"), list(of_others()))
def test_values_of_other_head_dims_and_dtypes(problem, config) -> None:
    inputs = ref.make_validation_inputs(problem, device="cuda", seed=1)
    check_values_and_bits(problem, config, inputs)


def dense_and_packed(problem):
    """Three sequences of equal length, as a batch and one behind the other."""
    packed = pack(problem, [300] * 3, device="cuda", seed=4)
    rows = {n: getattr(packed, n).unflatten(1, (3, 300))[0] for n in ("q", "k", "v")}
    gates = {n: getattr(packed, n).unflatten(1, (3, 300))[0] for n in ("gate", "beta")}
    return replace(packed, cu_seqlens=None, cu_seqlens_cpu=None, **rows, **gates), packed


def test_a_dense_batch() -> None:
    problem = of_lengths([300] * 3)
    dense, _ = dense_and_packed(problem)
    outputs = run(problem, FORMS["split", "own_group"], dense)
    assert ref.compare(problem, dense, outputs).reason is None


@pytest.mark.slow
@pytest.mark.parametrize("config", list(FORMS.values()), ids=map("-".join, FORMS))
def test_a_dense_batch_equals_its_sequences_packed(config) -> None:
    problem = of_lengths([300] * 3)
    found, expected = (run(problem, config, inputs) for inputs in dense_and_packed(problem))
    assert torch.equal(found.out.flatten(0, 1)[None], expected.out)
    assert torch.equal(found.final_state, expected.final_state)
