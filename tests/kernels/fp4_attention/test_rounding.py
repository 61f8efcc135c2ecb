"""Why a kernel on a GPU is not the reference to the last bit, and by how much; needs no GPU.

The bounds of ``reference.compare`` come from here: what shortened sums cost by a model of them, and
what one rounding more or less of a score costs. ``-s`` prints the figures of docs/fp4_attention.md.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from fp4_calls import MODES, config_of, problem_of, run
from fp4_codes import check_codes, differing_codes
from tensor_core_sums import FP8, SIXTEEN_BIT, cut_short, product
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.fp4_attention.numerics import represented_p
from tilescout.kernels.quantization.block_tensor import BlockTensor
from tilescout.kernels.quantization.reference import dequantize

KINDS = {"normal": ref.make_inputs, "validation": ref.make_validation_inputs}
KEYS = 1024
CODE_SHAPES = {
    "tail": {"query_len": 20, "kv_len": 133},
    "whole tiles, D 128": {"query_len": 32, "kv_len": 256, "head_dim": 128},
}
"""The second is a GPU's case with two probes for eight, and without padding, which copies V."""
_LOG2_E = math.log2(math.e)
_EX2_ERROR = 2.0**-22
"""Relative error of ``ex2.approx``, CUDA's Math API."""
_DEVICE_TWIN = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
)


@pytest.fixture
def _shim():
    import fp4_interpreter_shim

    fp4_interpreter_shim.install()


def case_of(mode: str, kind: str, *, rows: int, keys: int = KEYS, head_dim: int = 128):
    """(problem, inputs, q, k, v as fp32 matrices) of one head."""
    changes = {"query_len": rows, "kv_len": keys, "head_dim": head_dim, "num_qo_heads": 1}
    problem = problem_of(**MODES[mode], **changes)
    inputs = KINDS[kind](problem, device="cpu", seed=1)
    v = dequantize(inputs.v) if isinstance(inputs.v, BlockTensor) else inputs.v.float()
    return problem, inputs, dequantize(inputs.q)[0, 0], dequantize(inputs.k)[0, 0], v[0, 0]


def row_errors(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """RMS error of each row over its RMS, or that of all rows where larger, as ``compare`` does."""
    sizes = exact.square().mean(1).sqrt().clamp_min(exact.square().mean().sqrt())
    return (got - exact).square().mean(1).sqrt() / sizes


def test_the_model_cuts_what_is_small_beside_the_largest() -> None:
    for sums in (SIXTEEN_BIT, FP8):
        for bits, stays in ((sums.bits, True), (sums.bits + 1, False)):
            small = 2.0**-bits
            a, b = torch.tensor([[1.0, small, small, 0.5]]), torch.ones(4, 1)
            rest = product(a, b, sums).item() - 1.5
            # Two make a step of the result, of which the sum keeps fewer bits than it adds with.
            kept = 2 * small if stays and 2 * small >= 2.0**-sums.result_bits else 0.0
            assert rest == kept
        # Towards zero, also what was summed before.
        before = torch.full((1, 1), -3 * 2.0 ** -(sums.bits + 1))
        assert product(torch.ones(1, 1), torch.ones(1, 1), sums, before).item() < 1.0
        assert product(torch.ones(1, 40), torch.ones(40, 1), sums).item() == 40.0


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_scores_lose_nothing(kind: str, head_dim: int) -> None:
    _, _, q, k, _ = case_of("nvfp4", kind, rows=64, keys=256, head_dim=head_dim)
    exact = q.double() @ k.double().T
    assert torch.equal(product(q, k.T, SIXTEEN_BIT).double(), exact)
    assert not torch.equal(product(q, k.T, FP8).double(), exact)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_shortened_sums_of_values(mode: str, kind: str) -> None:
    problem, inputs, _, _, v = case_of(mode, kind, rows=64)
    p, total, _ = ref.reference_p(problem, inputs, 0, 0, torch.arange(64))
    exact = p.double() @ v.double().T
    if mode == "fp8_p":
        # Each tile of keys has a sum of its own; wide ones are cut most.
        tiles = zip(p.split(128, 1), v.split(128, 1), strict=True)
        got = sum(product(part, values.T, FP8).double() for part, values in tiles)
        bound = ref.FP8_BOUND / 2
    else:
        got, bound = product(p, v.T, SIXTEEN_BIT).double(), ref.ROW_BOUND / 100
    errors = row_errors(got / total, exact / total)
    print(f"{mode}, {kind}: sums cut short move a row by up to {errors.max().item():.1e}")  # noqa: T201
    assert errors.max() <= bound
    if mode == "fp8_p":
        assert errors.max() > bound / 20  # the model does something


@pytest.mark.parametrize("kind", KINDS)
def test_one_rounding_moves_a_code_in_a_million(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    flips = 0
    for mode in MODES:
        problem, inputs, q, k, v = case_of(mode, kind, rows=512)
        rows = torch.arange(problem.query_len)
        p, total, _ = ref.reference_p(problem, inputs, 0, 0, rows)
        factor = inputs.sm_scale * _LOG2_E
        m = torch.ceil(((q @ k.T) * factor).amax(1, keepdim=True))
        # One rounding for product and difference, a factor that is rounded once more, and exp2.
        scores = (q @ k.T).double() * (factor * (1.0 + 2.0**-24)) - m
        noise = torch.rand(scores.shape, generator=generator, dtype=torch.float64) * 2.0 - 1.0
        other, other_total = represented_p((scores + noise * _EX2_ERROR * _LOG2_E).float(), problem)
        differs = (p - other).abs() > 0.02 * torch.maximum(p, other)
        if mode == "fp8_p":
            differs &= torch.maximum(p, other) >= 2.0**-6  # subnormals have codes of the tile
        errors = row_errors(other @ v.T / other_total, p @ v.T / total)
        touched = differs.any(1)
        worst = errors[touched].max().item() if bool(touched.any()) else 0.0
        print(  # noqa: T201
            f"{mode}, {kind}: {int(differs.sum())} of {differs.numel()} codes of P differ; their "
            f"rows by up to {worst:.1e}, others by {errors[~touched].max().item():.1e}"
        )
        flips += int(touched.sum())
        assert int(touched.sum()) <= ref.DIFFERING_CODES * differs.numel()
        assert errors[~touched].max() <= ref.ROW_BOUND / 4
        assert worst <= ref.MAX_ERROR
    assert flips > 0


@_DEVICE_TWIN
@pytest.mark.interpreter
@pytest.mark.usefixtures("_shim")
@pytest.mark.parametrize("shape", CODE_SHAPES.values(), ids=CODE_SHAPES)
@pytest.mark.parametrize("products", ["emulated", "native"])
@pytest.mark.parametrize("mode", MODES)
def test_codes_are_read_from_outputs(mode: str, products: str, shape: dict) -> None:
    problem = problem_of(**MODES[mode], **shape, products=products)
    inputs = ref.make_inputs(problem, device="cpu", seed=3)
    check_codes(f"{products}, {mode}", problem, inputs, run)


@_DEVICE_TWIN
@pytest.mark.interpreter
@pytest.mark.usefixtures("_shim")
@pytest.mark.parametrize("mode", MODES)
def test_codes_that_differ_are_counted(mode: str, monkeypatch) -> None:
    problem = problem_of(**MODES[mode], query_len=20, kv_len=133, num_qo_heads=1)
    inputs = ref.make_inputs(problem, device="cpu", seed=3)
    true_p = ref.reference_p

    def another(*arguments):
        p, total, lse = true_p(*arguments)
        p = p.clone()
        p[11, p[11].argsort()[-12:-10]] *= 0.5  # two large ones, not the largest
        return p, total, lse

    monkeypatch.setattr(ref, "reference_p", another)
    found = differing_codes(problem, inputs, run)
    # Where one is the largest of its block of 16, all codes of the block are others.
    assert 2 <= found.codes <= (2 * 16 if mode == "nvfp4" else 2)
    assert f"{found.codes} of {found.num_codes} codes differ" in str(found)


@_DEVICE_TWIN
@pytest.mark.interpreter
@pytest.mark.usefixtures("_shim")
@pytest.mark.parametrize("block_n", [64, 128])
def test_the_kernel_with_shortened_sums_keeps_its_bounds(block_n: int) -> None:
    problem = problem_of(mode="fp8_p", query_len=40, kv_len=200, head_dim=64)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=4)
    config = config_of(problem, 64, block_n)
    exact = ref.compare(problem, inputs, run(problem, inputs, config))
    with cut_short():
        short = ref.compare(problem, inputs, run(problem, inputs, config))
    print(f"fp8_p, {block_n} keys a tile: {short.relative_rms_error:.1e} with shortened sums")  # noqa: T201
    assert short.reason is None
    assert exact.relative_rms_error < 1e-4 < short.relative_rms_error < ref.FP8_BOUND / 2


@pytest.mark.parametrize("damage", ["few rows", "rows by much", "one element"])
def test_the_comparison_sees_what_no_code_explains(damage: str) -> None:
    problem = problem_of(query_len=200, kv_len=1024, num_qo_heads=1)
    inputs = ref.make_inputs(problem, device="cpu", seed=6)
    rows = torch.arange(problem.query_len)
    out, lse = ref.reference(problem, inputs, 0, 0, rows)
    outputs = ref.make_outputs(problem, inputs)
    outputs.out[0, 0], outputs.lse[0, 0] = out, lse
    assert ref.compare(problem, inputs, outputs).reason is None
    # 204800 codes: two may differ, six with three standard deviations.
    if damage == "few rows":
        outputs.out[0, 0, 10:16] *= 1.0005
        assert ref.compare(problem, inputs, outputs).reason is None
        outputs.out[0, 0, 16] *= 1.0005
        expected = "7 of 200 rows differ by more than 0.0001 of their RMS, 6 may; the worst is row"
    elif damage == "rows by much":
        outputs.out[0, 0, :6] *= 1.1
        expected = "relative RMS error"
    else:
        outputs.out[0, 0, 3, 5] += 1.2 * out.square().mean().sqrt()
        expected = "row 3 of head 0 of batch entry 0: largest error"
    reason = ref.compare(problem, inputs, outputs).reason
    assert reason is not None
    assert expected in reason
