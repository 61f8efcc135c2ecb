"""Four over six: which of two scales a block gets, and that no block is the worse for it."""

from __future__ import annotations

import bisect

import pytest
import torch
from tilescout.errors import UsageError
from tilescout.kernels.quantization.block_tensor import amax_tensor_scale
from tilescout.kernels.quantization.codec import unpack
from tilescout.kernels.quantization.formats import (
    E2M1_MAGNITUDES,
    FOUR_OVER_SIX,
    FOUR_OVER_SIX_LARGEST_SCALE,
)
from tilescout.kernels.quantization.reference import dequantize, quantize

MAE, MSE = FOUR_OVER_SIX
NAN, INF = float("nan"), float("inf")
by_metric = pytest.mark.parametrize("convention", FOUR_OVER_SIX)


def coded(values: torch.Tensor, convention: str, tensor_scale: torch.Tensor | None = None):
    return quantize(values, convention=convention, tensor_scale=tensor_scale)


def errors(values: torch.Tensor, convention: str, metric: str, tensor_scale=None) -> torch.Tensor:
    """fp64 error of every block by the metric."""
    stored = dequantize(coded(values, convention, tensor_scale)).double()
    differences = (stored - values.double()).unflatten(-1, (-1, 16))
    return (differences.abs() if metric == MAE else differences**2).sum(-1)


def normal(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


# The largest value is 6, so the scales are 1 and 1.5; those of 1.5 hold 0.75, 1.5, 2.25, 3, 4.5, 6.
@pytest.mark.parametrize(
    ("values", "mae", "mse"),
    [
        pytest.param([6.0] + 15 * [4.5], 1.5, 1.5, id="only 4 holds 4.5"),
        pytest.param([6.0, 4.0] + 14 * [2.0], 1.0, 1.0, id="only 6 holds 2 and 4"),
        pytest.param([-6.0, 5.0] + 14 * [0.0], 1.5, 1.5, id="5 errs by 0.5 instead of 1"),
        pytest.param([6.0, 3.0, -1.5] + 13 * [0.0], 1.0, 1.0, id="tie without an error"),
        pytest.param([6.0, 5.25] + 14 * [-0.0], 1.0, 1.0, id="tie of 0.75 each"),
        pytest.param([6.0, 5.0] + 3 * [2.0] + 11 * [0.0], 1.0, 1.5, id="the metrics disagree"),
        pytest.param(16 * [6.0], 1.0, 1.0, id="nothing but the largest"),
    ],
)
@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-7, 2.0**40])
def test_the_scale_is_that_of_the_lower_error(values, mae, mse, tensor_scale) -> None:
    block, scale = torch.tensor([values]) * tensor_scale, torch.tensor([tensor_scale])
    for order in (slice(None), torch.arange(15, -1, -1)):
        assert coded(block[:, order], MAE, scale).scales.item() == mae
        assert coded(block[:, order], MSE, scale).scales.item() == mse


@by_metric
def test_a_block_that_takes_4_has_codes_up_to_4(convention: str) -> None:
    block = torch.tensor([[6.0, -4.5, 3.0, 0.75] + 12 * [4.5]])
    got = coded(block, convention)
    assert unpack(got.codes)[0, :5].tolist() == [6, 8 | 5, 4, 1, 5]  # 4, -3, 2, 0.5, 3
    assert torch.equal(dequantize(got), block)


@by_metric
@pytest.mark.parametrize("size", [1.0, 1e-20, 3e20])
def test_no_block_errs_more_and_many_err_less(convention: str, size: float) -> None:
    x = normal(256) * size
    scale = amax_tensor_scale(x, largest_scale=FOUR_OVER_SIX_LARGEST_SCALE)
    before, after = (errors(x, c, convention, scale) for c in ("nearest", convention))
    # The choice is made in fp32: what is no worse there may be by its rounding here.
    assert (after <= before * (1 + 1e-6)).all()
    assert 0.2 < (after < before * (1 - 1e-6)).double().mean() < 0.6
    assert after.mean() < 0.95 * before.mean()


@by_metric
def test_its_tensor_scale_lets_the_largest_block_choose(convention: str) -> None:
    x = normal(4).clamp(-2, 2)
    x[0, :16] = torch.tensor([6.0] + 15 * [4.5]) * 3.0
    usual = coded(x, convention, amax_tensor_scale(x))
    got = coded(x, convention, amax_tensor_scale(x, largest_scale=FOUR_OVER_SIX_LARGEST_SCALE))
    # 672 saturates, which leaves one scale, 448.
    assert usual.scales[0, 0].item() == 448.0
    assert got.scales[0, 0].item() == 384.0
    lost, left = ((dequantize(q)[0, :16] - x[0, :16]).norm() / x.norm() for q in (usual, got))
    assert lost > 0.05
    assert left < 1e-6


def test_the_tensor_scale_is_the_largest_value_over_six_times_the_scale() -> None:
    x = torch.tensor([[1.0, -1536.0, 3.0]], dtype=torch.bfloat16)
    assert amax_tensor_scale(x, largest_scale=256.0).tolist() == [1.0]
    assert amax_tensor_scale(x, largest_scale=448.0).tolist() == amax_tensor_scale(x).tolist()
    assert amax_tensor_scale(torch.zeros(0, 16), largest_scale=256.0).item() == 1.0
    for wrong in (0.0, -256.0, 449.0, NAN, INF):
        with pytest.raises(UsageError, match=r"largest_scale=.* above 0 and at most 448"):
            amax_tensor_scale(x, largest_scale=wrong)


@by_metric
def test_zeros_denormals_and_what_saturates_are_as_without_it(convention: str) -> None:
    x = torch.zeros(4, 32)
    x[1] = 1e-40
    x[2] = normal(1)[0, :32] * 1e6
    x[3] = 3e38
    expected, got = quantize(x), coded(x, convention)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert not unpack(got.codes)[:2].any()


@by_metric
def test_the_larger_scale_holds_what_the_smaller_loses(convention: str) -> None:
    block = torch.full((1, 16), 6 * 0.9 * 2.0**-10)
    assert not dequantize(quantize(block)).any()  # the scale is below half the least e4m3
    got = coded(block, convention)
    assert got.scales.item() == 2.0**-9
    assert torch.equal(dequantize(got), torch.full((1, 16), 3 * 2.0**-9))


@by_metric
def test_a_block_that_is_not_finite_is_nan_and_leaves_others_alone(convention: str) -> None:
    x = normal(1)
    clean = coded(x, convention)
    x[0, 3], x[0, 40] = NAN, -INF
    got = coded(x, convention)
    assert got.scales.float().isnan().tolist() == [[True, False, True, False]]
    assert (unpack(got.codes).unflatten(-1, (4, 16))[0, [0, 2]] == 7).all()
    for block in (1, 3):
        assert torch.equal(
            dequantize(got)[0, 16 * block : 16 * block + 16],
            dequantize(clean)[0, 16 * block : 16 * block + 16],
        )


E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [
    (1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)
]


def nearest(value: float, grid: list[float] | tuple[float, ...]) -> float:
    """The grid's member nearest to a magnitude; of two, that with the even index; saturates."""
    above = bisect.bisect_left(grid, value)
    around = range(max(above - 1, 0), min(above + 1, len(grid)))
    return grid[min(around, key=lambda i: (abs(grid[i] - value), i % 2))]


@by_metric
@pytest.mark.parametrize("scale", [1.0, 0.37, 0.004])
def test_the_choice_is_that_of_plain_arithmetic(convention: str, scale: float) -> None:
    tensor_scale = torch.tensor([scale])
    scale = tensor_scale.item()
    x = normal(32, seed=7) * torch.logspace(-2, 1, 32)[:, None]
    scales = coded(x, convention, tensor_scale).scales.float().flatten().tolist()
    blocks = x.unflatten(-1, (-1, 16)).flatten(0, 1).abs().tolist()
    power = 1 if convention == MAE else 2
    near_ties, fours = 0, 0
    for block, stored in zip(blocks, scales, strict=True):
        candidates = [nearest(f * max(block) / 6 / scale, E4M3) for f in (1.0, 1.5)]
        six, four = (
            sum(
                abs(nearest(v / scale / s, E2M1_MAGNITUDES) * s * scale - v) ** power for v in block
            )
            for s in candidates
        )
        if abs(six - four) <= 1e-5 * six:
            near_ties += candidates[0] != candidates[1]  # those that saturate are the same
            assert stored in candidates
            continue
        fours += four < six
        assert stored == candidates[four < six]
    assert near_ties < 4
    assert 0.2 * len(blocks) < fours < 0.6 * len(blocks)
