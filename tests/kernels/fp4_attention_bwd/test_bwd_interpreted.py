"""The template in the interpreter against the reference of its own numerics."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from fp4_bwd_calls import PASSES, config_of, problem_of, run
from fp4_calls import relative_error
from tensor_core_sums import cut_short
from tilescout.kernels.fp4_attention_bwd import reference as ref
from tilescout.kernels.registry import template

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]

BOUND = 1e-4
"""Products are exact and codes the reference's own, but for a last bit of a score that moves a code
and for e4m3's subnormals, which begin where the rows of a tile say."""

SHAPES = {
    "one key": {"query_len": 1, "kv_len": 1},
    "one query, tail of one key, full": {"query_len": 1, "kv_len": 513, "is_causal": False},
    "whole tiles, D 128": {"query_len": 128, "kv_len": 128, "head_dim": 128},
    "both tails, 4 heads a KV head": {"num_qo_heads": 4},
    "both tails, full": {"is_causal": False},
    "two batch entries, 2 KV heads": {"batch": 2, "num_qo_heads": 4, "num_kv_heads": 2},
    "one head a KV head": {"num_kv_heads": 2, "query_len": 133},
    "rows that see no key": {"query_len": 130, "kv_len": 70},
    "tile of keys that no row sees whole": {"query_len": 40, "kv_len": 200},
}


@pytest.fixture(autouse=True)
def _shim():
    import fp4_interpreter_shim

    fp4_interpreter_shim.install()


def check(problem, outputs, inputs) -> None:
    comparison = ref.compare(problem, inputs, outputs)
    assert comparison.reason is None
    assert comparison.relative_rms_error <= BOUND


@pytest.mark.parametrize("algorithm", PASSES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape: dict, algorithm: str) -> None:
    problem = problem_of(**shape)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=1)
    check(problem, run(problem, inputs, config_of(algorithm)), inputs)


@pytest.mark.parametrize("algorithm", PASSES)
def test_native_scores_are_the_emulated_ones(algorithm: str) -> None:
    # Codes are not padded as values are: what lies behind them is NaN here.
    problem = problem_of()
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=2)
    native = run(replace(problem, products="native"), inputs, config_of(algorithm))
    check(problem, native, inputs)


def test_gradients_depend_on_no_tile_and_no_algorithm() -> None:
    problem = problem_of(query_len=130, kv_len=200)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=3)
    tiles = ((64, 64), (32, 128), (128, 64), (64, 32))
    first, *rest = (
        run(problem, inputs, config_of(algorithm, *tile, prepare_block_m=block))
        for tile, block in zip(tiles, (16, 32, 64, 128), strict=True)
        for algorithm in PASSES
    )
    for other in rest:
        for name in ("dq", "dk", "dv"):
            assert relative_error(getattr(other, name), getattr(first, name)) <= BOUND


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-12, 1e12])
def test_the_size_of_the_gradient_does_not_matter(scale: float) -> None:
    # Powers of two scale dO and each row of dS: what comes out is the same digits.
    problem = problem_of()
    inputs = ref.make_inputs(problem, device="cpu", seed=4)
    power = 2.0 ** torch.tensor(scale).log2().round()
    first = run(problem, inputs)
    other = run(problem, replace(inputs, grad_out=inputs.grad_out * power))
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(other, name), getattr(first, name) * power)


def test_a_row_with_a_huge_gradient_spoils_no_other() -> None:
    problem = problem_of(query_len=100, kv_len=133)
    inputs = ref.make_inputs(problem, device="cpu", seed=11)
    plain = run(problem, inputs)
    inputs.grad_out[:, :, 50] *= 1000.0
    huge = run(problem, inputs)
    rows = [i for i in range(problem.query_len) if i != 50]
    assert relative_error(huge.dq[:, :, rows], plain.dq[:, :, rows]) <= BOUND
    assert relative_error(huge.dq[:, :, 50], 1000.0 * plain.dq[:, :, 50]) <= 0.1
    assert ref.compare(problem, inputs, huge).reason is None


def test_no_gradient_gives_exact_zeros() -> None:
    problem = problem_of()
    inputs = ref.make_inputs(problem, device="cpu", seed=5)
    outputs = run(problem, replace(inputs, grad_out=torch.zeros_like(inputs.grad_out)))
    assert not any(x.any() for x in (outputs.dq, outputs.dk, outputs.dv))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    problem = problem_of(is_causal=False)
    inputs = ref.make_inputs(problem, device="cpu", seed=6)
    inputs.grad_out[0, 1, 7, 3] = bad
    outputs = run(problem, inputs)
    assert outputs.dq[0, 1, 7].isnan().all()
    assert outputs.dk.isnan().any()
    assert outputs.dv[..., 3].isnan().all()
    assert torch.isfinite(outputs.dq[0, 0]).all()


def test_any_strides() -> None:
    problem = problem_of(query_len=40, kv_len=70)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=7)
    whole = run(problem, inputs)

    def strided(x):
        batch, heads, tokens, dim = x.shape
        room = x.new_full((batch, tokens, heads, dim + 3), float("nan"))
        view = room[..., :dim].transpose(1, 2)
        view.copy_(x)
        return view

    given = replace(inputs, out=strided(inputs.out), grad_out=strided(inputs.grad_out))
    outputs = ref.make_outputs(problem, inputs)
    names = ("dq", "dk", "dv")
    outputs = replace(outputs, **{name: strided(getattr(outputs, name)) for name in names})
    template(problem.op, "triton").build(problem, config_of(), given).launch(given, outputs)
    assert ref.outputs_equal(whole, outputs)


def test_parts_in_turn_are_the_whole_and_may_be_repeated() -> None:
    problem = problem_of()
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=8)
    chosen = template(problem.op, "triton")
    for algorithm, passes in PASSES.items():
        config = config_of(algorithm)
        whole, outputs = run(problem, inputs, config), ref.make_outputs(problem, inputs)
        launcher = chosen.build(problem, config, inputs)
        names = [part.name for part in chosen.parts(problem, config)]
        assert names == ["prepare", *passes]
        for name in names:
            for _ in range(2):
                launcher.launch_part(name, inputs, outputs)
        assert ref.outputs_equal(whole, outputs)


def test_inputs_are_not_modified() -> None:
    problem = problem_of()
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=9)
    tensors = {
        "q": inputs.q.codes,
        "k": inputs.k.codes,
        "v": inputs.v.view(torch.uint8),
        "out": inputs.out,
        "grad_out": inputs.grad_out,
        "lse": inputs.lse,
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    run(problem, inputs)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_cut_short_as_on_hopper_keep_the_bounds(head_dim: int) -> None:
    tokens = head_dim
    problem = problem_of(query_len=tokens, kv_len=tokens, head_dim=head_dim, num_qo_heads=1)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=1)
    exact = run(problem, inputs)
    with cut_short():
        short = run(problem, inputs)
    assert ref.compare(problem, inputs, short).reason is None
    errors = [relative_error(getattr(short, x), getattr(exact, x)) for x in ("dq", "dk", "dv")]
    # dS is a difference of sums that were cut, which P is not.
    assert 1e-4 < errors[2] < min(errors[:2])


@pytest.mark.parametrize("damage", ["dq", "dk", "dv", "nan"])
def test_comparison_can_fail(damage: str) -> None:
    problem = problem_of()
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=10)
    outputs = run(problem, inputs)
    assert ref.compare(problem, inputs, outputs).reason is None
    if damage == "nan":
        outputs.dk[0, 0, 5, 0] = float("nan")
    else:
        getattr(outputs, damage)[0, 0, ::7] *= 1.02 if damage == "dv" else 1.05
    assert ref.compare(problem, inputs, outputs).reason is not None
