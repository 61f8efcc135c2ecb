"""The Triton kernels in the interpreter against the fp32 recurrence, and what must hold of both."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_decode import GdnDecodeOutputs, GdnDecodeProblem
from tilescout.kernels.gdn_decode import reference as ref
from tilescout.kernels.registry import template

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]

PLAIN = Config.of("triton", {"block_v": 32, "num_warps": 1, "state_eviction": "evict_normal"})
STREAM = Config.of(
    "triton_stream",
    {
        "block_v": 32,
        "block_tiles": 1,
        "num_warps": 1,
        "state_load": "cg",
        "state_store": "cs",
        "maxnreg": 255,
        "launch_pdl": True,
    },
)
RUN = STREAM.replace(block_v=16, block_tiles=4)
CONFIGS = {
    "plain": PLAIN,
    "one tile": STREAM,
    "run, tiles in turn": Config.of("triton_stream", {**RUN.as_dict(), "loads_ahead": False}),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request) -> Config:
    return request.param


@pytest.fixture(autouse=True)
def _shim():
    import interpreter_shim

    interpreter_shim.install()


def problem_of(**changes) -> GdnDecodeProblem:
    fields = {
        "batch": 3,
        "num_steps": 1,
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim_k": 64,
        "head_dim_v": 64,
        "dtype": "float32",
    }
    return GdnDecodeProblem(**{**fields, **changes})


def run(problem, inputs, config, outputs=None) -> GdnDecodeOutputs:
    outputs = outputs or ref.make_outputs(problem, inputs)
    template("gdn_decode", config.template).build(problem, config, inputs).launch(inputs, outputs)
    return outputs


CASES = {
    "one step, fp32": {},
    "bf16, three steps": {"dtype": "bfloat16", "num_steps": 3},
    "fp16, given gate, no norm": {"dtype": "float16", "gate": "given", "use_qk_l2norm": False},
    "state VK": {"state_layout": "VK", "num_steps": 2},
    "bf16 state": {"state_dtype": "bfloat16", "dtype": "bfloat16"},
    "bf16 state VK, given": {"state_dtype": "bfloat16", "state_layout": "VK", "gate": "given"},
    "K 96 padded, V 192": {"head_dim_k": 96, "head_dim_v": 192, "batch": 2},
    "K 192, V 96, VK": {"head_dim_k": 192, "head_dim_v": 96, "state_layout": "VK", "batch": 2},
    "K 256, V 64": {"head_dim_k": 256, "num_heads": 1, "num_v_heads": 1, "batch": 2},
    "three value heads a head": {"num_heads": 1, "num_v_heads": 3},
    "one sequence": {"batch": 1},
}


FORMS = {
    "plain, 8": PLAIN.replace(block_v=8),
    "plain, 128": PLAIN.replace(block_v=128),
    "one tile, 8": STREAM.replace(block_v=8),
    "run, tiles ahead": Config.of("triton_stream", {**RUN.as_dict(), "loads_ahead": True}),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_reference(case: dict, form: Config) -> None:
    problem = problem_of(**case)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=1)
    outputs = run(problem, inputs, form)
    assert ref.compare(problem, inputs, outputs).reason is None


@pytest.mark.parametrize("damage", ["output", "state", "skipped", "nan"])
def test_comparison_can_fail(damage: str, config) -> None:
    problem = problem_of()
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=2)
    outputs = run(problem, inputs, config)
    assert ref.compare(problem, inputs, outputs).reason is None
    if damage == "output":
        outputs.out[2] *= 1.00001
    elif damage == "state":
        outputs.state[int(inputs.slots[0]), 3, 0] += 1e-3
    elif damage == "skipped":
        outputs.out[1, 0, 0, 0] = 1e-9
    else:
        outputs.out[0, 0, 0, 0] = float("nan")
    assert ref.compare(problem, inputs, outputs).reason is not None


def test_a_skipped_sequence_leaves_every_state_alone(config) -> None:
    problem = problem_of()
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=3)
    outputs = run(problem, inputs, config)
    live = set(inputs.slots.tolist()) - {-1}
    for slot in range(inputs.state.shape[0]):
        assert bool(outputs.state[slot].isnan().all()) == (slot not in live)
    assert not outputs.out[1].any()


def test_in_place_equals_out_of_place(config) -> None:
    problem = problem_of(num_steps=2)
    inputs = ref.make_inputs(problem, device="cpu", seed=4)
    apart = run(problem, inputs, config)
    state = inputs.state.clone()
    together = run(
        problem,
        replace(inputs, state=state),
        config,
        outputs=GdnDecodeOutputs(torch.full_like(inputs.v, float("nan")), state),
    )
    assert ref.outputs_equal(apart, together)


def test_two_calls_of_one_step_equal_one_call_of_two(config) -> None:
    both = problem_of(num_steps=2, gate="given")
    one = replace(both, num_steps=1)
    inputs = ref.make_inputs(both, device="cpu", seed=5)
    whole = run(both, inputs, config)
    state, parts = inputs.state, []
    for step in range(2):
        tokens = {
            name: getattr(inputs, name)[:, step : step + 1].contiguous()
            for name in ("q", "k", "v", "gate", "beta")
        }
        part = run(one, replace(inputs, state=state, **tokens), config)
        parts.append(part.out)
        state = part.state
    assert torch.equal(torch.cat(parts, dim=1), whole.out)
    assert torch.equal(state, whole.state)


def test_layouts_are_transposes_and_value_heads_repeat_query_heads(config) -> None:
    kv = problem_of(head_dim_v=128)
    vk = replace(kv, state_layout="VK")
    inputs = ref.make_inputs(kv, device="cpu", seed=6)
    first = run(kv, inputs, config)
    second = run(vk, replace(inputs, state=inputs.state.transpose(-1, -2).contiguous()), config)
    torch.testing.assert_close(first.out, second.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.state, second.state.transpose(-1, -2), rtol=1e-5, atol=1e-6)
    expanded = {name: getattr(inputs, name).repeat_interleave(2, dim=2) for name in ("q", "k")}
    third = run(replace(kv, num_heads=4), replace(inputs, **expanded), config)
    assert ref.outputs_equal(first, third)


def test_extreme_gates(config) -> None:
    problem = problem_of(gate="given", batch=2)
    inputs = ref.make_inputs(problem, device="cpu", seed=7)
    inputs.gate[0] = -1e4  # forgets everything
    inputs.gate[1] = 0.0
    inputs.beta[1] = 0.0  # keeps everything
    outputs = run(problem, inputs, config)
    forgotten = run(problem, replace(inputs, state=torch.zeros_like(inputs.state)), config)
    slots = inputs.slots.tolist()
    assert torch.equal(outputs.state[slots[0]], forgotten.state[slots[0]])
    assert torch.equal(outputs.state[slots[1]], inputs.state[slots[1]])


def test_softplus_is_linear_where_exp_would_overflow(config) -> None:
    problem = problem_of(batch=1)
    inputs = ref.make_inputs(problem, device="cpu", seed=8)
    inputs.gate.fill_(100.0)
    outputs = run(problem, inputs, config)
    assert ref.compare(problem, inputs, outputs).reason is None


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_sequences_equal_runs_of_their_own(index_dtype: torch.dtype, config) -> None:
    lengths = [2, 0, 3, 1]
    problem = problem_of(batch=4, num_steps=3, gate="given")
    inputs = ref.make_inputs(problem, device="cpu", seed=9)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=index_dtype)
    packed = {
        name: torch.cat([getattr(inputs, name)[i, :n] for i, n in enumerate(lengths)])[None]
        for name in ("q", "k", "v", "gate", "beta")
    }
    slots = inputs.slots.to(index_dtype)
    outputs = run(problem, replace(inputs, cu_seqlens=bounds, slots=slots, **packed), config)
    for i, n in enumerate(lengths):
        if n == 0:
            assert torch.equal(outputs.state[int(slots[i])], inputs.state[int(slots[i])])
            continue
        alone = {
            name: getattr(inputs, name)[i : i + 1, :n].contiguous()
            for name in ("q", "k", "v", "gate", "beta")
        }
        single = run(
            replace(problem, batch=1, num_steps=n),
            replace(inputs, slots=slots[i : i + 1], **alone),
            config,
        )
        first, end = bounds[i : i + 2].tolist()
        assert torch.equal(outputs.out[0, first:end], single.out[0])
        assert torch.equal(outputs.state[int(slots[i])], single.state[int(slots[i])])
