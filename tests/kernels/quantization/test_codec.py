"""e2m1 against a table found by brute force, and against torchao."""

from __future__ import annotations

import pytest
import torch
from tilescout.errors import UsageError
from tilescout.kernels.quantization.codec import decode, encode, pack, unpack
from tilescout.kernels.quantization.formats import E2M1_MAGNITUDES


def nearest_code(value: float) -> int:
    """By the definition: of the nearest magnitudes the one with the even code."""
    distances = [abs(abs(value) - magnitude) for magnitude in E2M1_MAGNITUDES]
    nearest = [code for code, d in enumerate(distances) if d == min(distances)]
    sign = 8 if torch.tensor(value).signbit() else 0
    return sign | next((code for code in nearest if code % 2 == 0), nearest[0])


def test_every_sixteenth_and_its_neighbours_round_as_defined() -> None:
    exact = torch.arange(-7 * 16, 7 * 16 + 1) / 16.0
    values = torch.cat([torch.nextafter(exact, exact + s) for s in (-1, 0, 1)])
    expected = torch.tensor([nearest_code(v) for v in values.tolist()], dtype=torch.uint8)
    assert torch.equal(encode(values), expected)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        pytest.param(0.25, 0, id="tie to 0"),
        pytest.param(0.75, 2, id="tie to 1"),
        pytest.param(1.25, 2, id="tie down to 1"),
        pytest.param(1.75, 4, id="tie up to 2"),
        pytest.param(2.5, 4, id="tie down to 2"),
        pytest.param(3.5, 6, id="tie up to 4"),
        pytest.param(5.0, 6, id="tie down to 4"),
        pytest.param(-5.0, 14, id="negative tie"),
        pytest.param(7.0, 7, id="saturates"),
        pytest.param(-1e9, 15, id="saturates below"),
        pytest.param(float("inf"), 7, id="infinity"),
        pytest.param(float("nan"), 7, id="NaN is the largest"),
        pytest.param(-0.0, 8, id="minus zero"),
        pytest.param(2.0**-130, 0, id="denormal"),
        pytest.param(-(2.0**-130), 8, id="negative denormal"),
    ],
)
def test_golden(value: float, code: int) -> None:
    assert encode(torch.tensor([value])).item() == code


def test_all_codes_survive_decoding_and_packing() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode(decode(codes)), codes)
    packed = pack(codes)
    assert packed.tolist() == [(2 * i) | ((2 * i + 1) << 4) for i in range(8)]
    assert torch.equal(unpack(packed), codes)


def test_an_odd_row_is_refused() -> None:
    with pytest.raises(UsageError, match="3 codes along the last axis: must be even"):
        pack(torch.zeros(2, 3, dtype=torch.uint8))
