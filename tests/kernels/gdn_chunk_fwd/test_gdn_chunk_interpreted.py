"""The Triton kernels in the interpreter against the references, and what holds of all configs."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from tilescout.errors import UsageError
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_chunk_fwd import reference as ref
from tilescout.kernels.gdn_chunk_fwd.inputs import pack
from tilescout.kernels.registry import template
from tilescout.search_spaces.covering import covering_sample
from tilescout.search_spaces.gdn_chunk_fwd import triton_space

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]

ALGORITHMS = {
    "separate": {"algorithm": "separate", "form": "wy", "scores": "computed", "segment": 0},
    "fused": {"algorithm": "fused", "form": "inverse", "scores": "stored", "segment": 0},
    "separate cut": {"algorithm": "separate", "form": "inverse", "scores": "stored", "segment": 4},
    "fused cut": {"algorithm": "fused", "form": "wy", "scores": "computed", "segment": 4},
}


@pytest.fixture(autouse=True)
def _shim():
    import interpreter_shim

    interpreter_shim.install()


def problem_of(**changes) -> GdnChunkProblem:
    fields = {
        "num_sequences": 2,
        "num_tokens": 150,
        "max_seqlen": 100,
        "num_heads": 1,
        "num_v_heads": 2,
        "head_dim_k": 64,
        "head_dim_v": 64,
        "dtype": "float32",
    }
    return GdnChunkProblem(**{**fields, **changes})


TILES = {
    **{"chunk": 16, "precision": "ieee", "gate_block_h": 2, "gate_num_warps": 1},
    **{"norm_block_r": 16, "norm_num_warps": 4, "intra_block_k": 64, "intra_num_warps": 4},
    **{"intra_num_stages": 1, "intra_tile": "chunk", "inverse": "doubling"},
    "inverse_gate": "free",
    **{"inverse_precision": "ieee", "transition_block_v": 32, "transition_num_warps": 4},
    **{"transition_num_stages": 1, "stitch_block_v": 64, "stitch_num_warps": 4},
    **{"stitch_num_stages": 1, "stitch_precision": "ieee", "scan_block_v": 64},
    **{"scan_num_warps": 4, "scan_num_stages": 1, "output_block_k": 64, "output_block_v": 64},
    **{"output_num_warps": 4, "output_num_stages": 1},
    **{
        "transition_forget_bits": 0,
        "scan_order": "given",
        "intra_maxnreg": 255,
        "scan_maxnreg": 255,
        "transition_maxnreg": 255,
    },
}


def config_of(problem, device, **changes) -> Config:
    """A config of the algorithm, which is "separate" where nothing else is said."""
    space = triton_space(problem, device)
    values = {**TILES, **ALGORITHMS["separate"], **changes}
    active = {p.name for p in space.active_parameters(values)}
    return space.config({name: value for name, value in values.items() if name in active})


def ragged(problem, seed: int):
    """Small inputs to verify: empty, single, short of a chunk, one above, NaN behind the last."""
    inputs = pack(problem, [17, 0, 1, 70, 0, 31], device="cpu", seed=seed, num_spare_tokens=20)
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta):
        tensor[:, -20:] = float("nan")
    if problem.gate == "given":
        inputs.gate[0, 3:-20:37, 0] = -1e4
    return inputs


def run(problem, config, inputs, outputs=None):
    outputs = outputs or ref.make_outputs(problem, inputs)
    template("gdn_chunk_fwd", "triton").build(problem, config, inputs).launch(inputs, outputs)
    return outputs


CASES = {
    "fp32": {},
    "bf16": {"dtype": "bfloat16"},
    "fp16, states VK, bf16 gates": {
        "dtype": "float16",
        "state_layout": "VK",
        "gate_dtype": "bfloat16",
        "beta_dtype": "bfloat16",
    },
    "raw gate, norm, no states": {
        "gate": "fused",
        "use_qk_l2norm": True,
        "has_initial_state": False,
        "has_final_state": False,
    },
    "K 96 padded, V 128": {"head_dim_k": 96, "head_dim_v": 128},
    "K 128, V 96 in blocks of 64, VK": {
        "head_dim_k": 128,
        "head_dim_v": 96,
        "state_layout": "VK",
    },
    "three value heads a head, bf16": {"num_v_heads": 3, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_reference(case: dict, algorithm: dict, h200) -> None:
    problem = problem_of(**case)
    inputs = ragged(problem, 1)
    config = config_of(problem, h200, **algorithm)
    assert ref.compare(problem, inputs, run(problem, config, inputs)).reason is None


BLOCKS = {
    "inverse, scores": {"form": "inverse", "scores": "stored", "inverse_precision": "fp16"},
    "inverse": {"form": "inverse", "chunk": 16, "inverse_precision": "tf32"},
    "w and u, scores": {"chunk": 32, "scores": "stored", "inverse_precision": "fp16"},
    "w and u": {"inverse_precision": "fp16"},
}


@pytest.mark.parametrize("algorithm", BLOCKS.values(), ids=BLOCKS)
def test_an_inverse_in_blocks_matches_the_reference(algorithm: dict, h200) -> None:
    shape = {"num_heads": 2, "num_v_heads": 6, "head_dim_k": 96}
    problem = problem_of(**shape, dtype="bfloat16")
    inputs = ragged(problem, 17)
    tiles = {"intra_tile": "blocks", "intra_num_warps": 1, "intra_block_k": 64}
    config = config_of(problem, h200, **{**tiles, "chunk": 64, **algorithm})
    assert ref.compare(problem, inputs, run(problem, config, inputs)).reason is None


def test_a_covering_sample_matches_the_reference(h200) -> None:
    problem = problem_of(num_sequences=1, num_tokens=70, max_seqlen=70, num_v_heads=1)
    space = triton_space(problem, h200)
    inputs = pack(problem, [70, 0, 1], device="cpu", seed=2, num_spare_tokens=3)
    inputs.gate[0, 20] = -1e4
    # Tiles only change how work is divided; the algorithm and the inverse change what is computed.
    what = ("algorithm", "chunk", "form", "scores", "segment", "inverse", "inverse_gate")
    seen = set()
    for config in covering_sample(space, 40, seed=0).configs:
        chosen = tuple(config[name] for name in what)
        if chosen in seen or len(seen) >= 24:
            continue
        seen.add(chosen)
        reason = ref.compare(problem, inputs, run(problem, config, inputs)).reason
        assert reason is None, f"{config}: {reason}"
    assert {c[0] for c in seen} == {"separate", "fused"}
    assert {c[1] for c in seen} == {16, 32, 64, 128}
    assert {c[4] for c in seen} >= {0, 4}


@pytest.mark.parametrize("damage", ["output", "state", "behind", "nan", "small"])
def test_comparison_can_fail(damage: str, h200) -> None:
    problem = problem_of()
    inputs = ragged(problem, 2)
    outputs = run(problem, config_of(problem, h200), inputs)
    assert ref.compare(problem, inputs, outputs).reason is None
    if damage == "output":
        outputs.out[0, 70:85] *= 1.0001
    elif damage == "state":
        outputs.final_state[-1, 1, 0] += 1e-2
    elif damage == "behind":
        outputs.out[0, -1, 0, 0] = 1e-9
    elif damage == "small":
        # The second sequence is empty: its state is the initial one.
        outputs.final_state[1] *= 1.0001
    else:
        outputs.out[0, 0, 0, 0] = float("nan")
    assert ref.compare(problem, inputs, outputs).reason is not None


def test_the_kept_reference_notices_changed_inputs() -> None:
    problem = problem_of()
    inputs = ref.make_inputs(problem, device="cpu", seed=3)
    out, state = zip(*(ref.chunked_reference(problem, inputs, i) for i in range(2)), strict=True)
    packed = torch.cat(out, dim=1).transpose(0, 1)[None].float()
    outputs = ref.GdnChunkOutputs(packed, torch.stack(state).float())
    assert ref.compare(problem, inputs, outputs).reason is None
    inputs.v.mul_(2.0)
    assert ref.compare(problem, inputs, outputs).reason is not None


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_references_agree(chunk: int) -> None:
    problem = problem_of(gate="fused", use_qk_l2norm=True, state_layout="VK", head_dim_v=48)
    inputs = ragged(problem, 4)
    for sequence in range(inputs.num_sequences):
        by_token = ref.recurrent_reference(problem, inputs, sequence)
        by_chunk = ref.chunked_reference(problem, inputs, sequence, chunk)
        for first, second in zip(by_token, by_chunk, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["separate", "fused cut"])
def test_packed_sequences_equal_runs_of_their_own(algorithm: str, h200) -> None:
    lengths = [40, 0, 70, 1]
    problem = problem_of(num_sequences=4, num_tokens=111, max_seqlen=70)
    config = config_of(problem, h200, **ALGORITHMS[algorithm])
    inputs = pack(problem, lengths, device="cpu", seed=5)
    outputs = run(problem, config, inputs)
    bounds = inputs.cu_seqlens.tolist()
    for i, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(outputs.final_state[i], inputs.initial_state[i])
            continue
        rows = slice(bounds[i], bounds[i + 1])
        tokens = {
            name: getattr(inputs, name)[:, rows].contiguous()
            for name in ("q", "k", "v", "gate", "beta")
        }
        # Alone, and as a dense batch of one.
        alone = replace(
            inputs, **tokens, cu_seqlens=None, initial_state=inputs.initial_state[i : i + 1]
        )
        single = run(problem, config, alone)
        assert torch.equal(outputs.out[0, rows], single.out[0])
        assert torch.equal(outputs.final_state[i], single.final_state[0])


def test_the_order_in_which_sequences_start_changes_no_bit(h200) -> None:
    problem = problem_of(num_sequences=4)
    first, second = (
        run(problem, config_of(problem, h200, scan_order=order), ragged(problem, 14))
        for order in ("given", "longest")
    )
    assert ref.outputs_equal(first, second)
    # Beyond 64 sequences the order is given.
    many = pack(problem, [1] * 63 + [0, 5, 2], device="cpu", seed=15)
    config = config_of(problem, h200, scan_order="longest")
    assert ref.compare(problem, many, run(problem, config, many)).reason is None


def test_what_is_forgotten_is_below_the_declared_bits(h200) -> None:
    problem = problem_of(num_sequences=1, num_tokens=200, max_seqlen=200)
    inputs = ref.make_inputs(problem, device="cpu", seed=16)
    inputs.gate[..., 0] = -0.4  # 37 bits a segment of 64 tokens
    inputs.gate[..., 1] = 0.0
    inputs.initial_state[:, 0] *= 2.0**36
    exact, forgetful = (
        run(problem, config_of(problem, h200, **ALGORITHMS["fused cut"], **changes), inputs)
        for changes in ({}, {"transition_forget_bits": 32})
    )
    assert torch.equal(exact.out[:, :, 1], forgetful.out[:, :, 1])
    assert torch.equal(exact.out[:, :64], forgetful.out[:, :64])
    difference = (exact.out - forgetful.out).abs().max()
    assert 0 < difference < 2.0**-32 * inputs.initial_state[:, 0].norm()


def test_a_dense_batch_equals_equal_packed_sequences(h200) -> None:
    problem = problem_of(num_sequences=3, num_tokens=108, max_seqlen=36)
    config = config_of(problem, h200)
    packed = pack(problem, [36, 36, 36], device="cpu", seed=6)
    first = run(problem, config, packed)
    tokens = {
        name: getattr(packed, name).unflatten(1, (3, 36)).flatten(0, 1)
        for name in ("q", "k", "v", "gate", "beta")
    }
    second = run(problem, config, replace(packed, **tokens, cu_seqlens=None))
    assert torch.equal(first.out.flatten(0, 1), second.out.flatten(0, 1))
    assert torch.equal(first.final_state, second.final_state)


def test_layouts_are_transposes_and_value_heads_repeat_query_heads(h200) -> None:
    problem = problem_of(head_dim_v=128)
    config = config_of(problem, h200)
    inputs = ref.make_inputs(problem, device="cpu", seed=7)
    first = run(problem, config, inputs)
    turned = replace(inputs, initial_state=inputs.initial_state.transpose(-1, -2).contiguous())
    second = run(replace(problem, state_layout="VK"), config, turned)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.final_state, second.final_state.transpose(-1, -2))
    expanded = {name: getattr(inputs, name).repeat_interleave(2, dim=2) for name in ("q", "k")}
    third = run(replace(problem, num_heads=2), config, replace(inputs, **expanded))
    assert ref.outputs_equal(first, third)


def test_extreme_gates(h200) -> None:
    problem = problem_of(num_sequences=1, num_tokens=100, max_seqlen=100)
    inputs = ref.make_inputs(problem, device="cpu", seed=8)
    inputs.gate.fill_(-3.0)
    inputs.gate[0, 40] = -1e4  # forgets everything
    inputs.gate[0, 50] = float("-inf")
    for algorithm in ALGORITHMS.values():
        config = config_of(problem, h200, **algorithm)
        outputs = run(problem, config, inputs)
        other = replace(inputs, v=inputs.v.clone(), initial_state=inputs.initial_state * 7)
        other.v[0, :40] = 100.0
        again = run(problem, config, other)
        assert torch.equal(outputs.out[0, 40:], again.out[0, 40:])
        assert torch.equal(outputs.final_state, again.final_state)
        assert bool(outputs.out.isfinite().all())
    still = replace(inputs, gate=torch.zeros_like(inputs.gate), beta=torch.zeros_like(inputs.beta))
    for algorithm in ALGORITHMS.values():
        outputs = run(problem, config_of(problem, h200, **algorithm), still)
        assert torch.equal(outputs.final_state, inputs.initial_state)  # keeps everything


def test_equal_keys_do_not_spoil_the_inverse(h200) -> None:
    # Powers of such a matrix grow like binomials: a plain series would lose every digit.
    problem = problem_of(num_sequences=1, num_tokens=64, max_seqlen=64)
    inputs = ref.make_inputs(problem, device="cpu", seed=9)
    inputs.k.copy_(inputs.k[:, :1].expand_as(inputs.k).clone())
    inputs.gate.zero_()
    inputs.beta.fill_(1.0)
    for inverse in ("substitution", "doubling"):
        config = config_of(problem, h200, chunk=64, inverse=inverse)
        assert ref.compare(problem, inputs, run(problem, config, inputs)).reason is None
    for dtype, precision in (("bfloat16", "fp16"), ("float16", "as_input")):
        narrow = replace(problem, dtype=dtype)
        names = ("q", "k", "v")
        kept = {name: getattr(inputs, name).to(getattr(torch, dtype)) for name in names}
        tiles = {"intra_tile": "blocks", "intra_num_warps": 1, "inverse_precision": precision}
        config = config_of(narrow, h200, chunk=64, **tiles)
        rounded = replace(inputs, **kept)
        assert ref.compare(narrow, rounded, run(narrow, config, rounded)).reason is None


def test_parts_in_turn_are_the_whole_and_may_be_repeated(h200) -> None:
    problem = problem_of(use_qk_l2norm=True)
    inputs = ragged(problem, 10)
    chosen = template("gdn_chunk_fwd", "triton")
    config = config_of(problem, h200, **ALGORITHMS["separate cut"])
    whole = run(problem, config, inputs)
    launcher = chosen.build(problem, config, inputs)
    outputs = ref.make_outputs(problem, inputs)
    names = [part.name for part in chosen.parts(problem, config)]
    assert names == ["gate", "norm", "intra", "transition", "stitch", "scan", "output"]
    for name in names:
        for _ in range(2):
            launcher.launch_part(name, inputs, outputs)
    assert ref.outputs_equal(whole, outputs)


def test_a_launcher_serves_smaller_calls_and_refuses_larger_ones(h200) -> None:
    problem = problem_of(num_sequences=3, num_tokens=160, max_seqlen=100)
    config = config_of(problem, h200, **ALGORITHMS["fused cut"])
    launcher = template("gdn_chunk_fwd", "triton").build(
        problem, config, ref.make_inputs(problem, device="cpu", seed=11)
    )
    rng = random.Random(0)
    for _ in range(2):
        smaller = pack(problem, [rng.randrange(50), rng.randrange(90)], device="cpu", seed=12)
        outputs = ref.make_outputs(problem, smaller)
        launcher.launch(smaller, outputs)
        assert ref.compare(problem, smaller, outputs).reason is None
    larger = pack(problem, [161], device="cpu", seed=13)
    with pytest.raises(UsageError, match=r"num_tokens=161.* up to 160 and 3"):
        launcher.launch(larger, ref.make_outputs(problem, larger))
