"""The torch quantisers: bounds, blocks that are odd, and agreement with torchao bit for bit."""

from __future__ import annotations

import importlib
import logging
import warnings

import pytest
import torch
from tilescout.errors import UnknownNameError, UsageError
from tilescout.kernels.quantization.block_tensor import amax_tensor_scale
from tilescout.kernels.quantization.codec import unpack
from tilescout.kernels.quantization.formats import FORMATS, MXFP4, NVFP4, format_named
from tilescout.kernels.quantization.reference import dequantize, quantize

NAN, INF = float("nan"), float("inf")


def torchao(module: str):
    """A module of torchao; its import warns of libraries that need a GPU."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"torchao.prototype.mx_formats.{module}")
    finally:
        logging.disable(logging.NOTSET)


def rows(dtype=torch.float32) -> torch.Tensor:
    """Rows over 24 binades, with a zero row, a zero block, an outlier and powers of two."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, (64, 1), generator=generator).float())
    x[0] = 0.0
    x[1, :32] = 0.0
    x[2, 7] = 1e4
    x[3] = torch.exp2(torch.randint(-6, 6, (256,), generator=generator).float())
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.37, 2.0**-4])
def test_nvfp4_equals_torchao(dtype: torch.dtype, scale: float | None) -> None:
    tensor_scale = None if scale is None else torch.tensor([scale])
    x = rows(dtype)
    scales, codes = torchao("nvfp4_tensor").nvfp4_quantize(x, per_tensor_scale=tensor_scale)
    got = quantize(x, NVFP4, tensor_scale=tensor_scale, convention="normal")
    assert torch.equal(got.scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(got.codes, codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("convention", MXFP4.conventions)
def test_mxfp4_equals_torchao(dtype: torch.dtype, convention: str) -> None:
    mx, x = torchao("mx_tensor"), rows(dtype)
    mode = mx.ScaleCalculationMode[convention.upper()]
    scales, codes = mx.to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
    got = quantize(x, MXFP4, convention=convention)
    assert torch.equal(got.scales, scales.view(torch.uint8))
    assert torch.equal(got.codes, codes.view(torch.uint8))


@pytest.mark.parametrize("k", [16, 32, 48, 64, 4096])
@pytest.mark.parametrize(("block_format", "bound"), [(NVFP4, 0.10), (MXFP4, 0.13)])
def test_error_on_normal_values(k: int, block_format, bound: float) -> None:
    if k % block_format.block_size:
        with pytest.raises(UsageError, match=f"{k} elements .* multiple of"):
            quantize(torch.ones(2, k), block_format)
        return
    x = torch.randn(64, k, generator=torch.Generator().manual_seed(k))
    error = (dequantize(quantize(x, block_format)) - x).norm() / x.norm()
    assert 0.3 * bound < error < bound


def test_tensor_scale_makes_the_error_independent_of_size() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    for factor in (2.0**-60, 1e-8, 1.0, 1e30):
        scaled = x * factor
        quantized = quantize(scaled, NVFP4, tensor_scale=amax_tensor_scale(scaled))
        error = (dequantize(quantized) / factor - x).norm() / x.norm()
        assert error < 0.10
    lost = dequantize(quantize(x * 1e-8, NVFP4))
    assert not lost.any()  # what one level of scales cannot hold


@pytest.mark.parametrize("block_format", FORMATS.values(), ids=FORMATS)
def test_blocks_that_are_not_finite_stay_visible_and_leave_others_alone(block_format) -> None:
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(2))
    clean = dequantize(quantize(x, block_format))
    x[0, 3], x[0, 70] = NAN, -INF
    values = dequantize(quantize(x, block_format))
    block = block_format.block_size
    bad = {0, 70 // block}
    for index in range(128 // block):
        part = values[0, index * block : (index + 1) * block]
        if index in bad:
            assert part.isnan().all()
        else:
            assert torch.equal(part, clean[0, index * block : (index + 1) * block])


def test_zeros_denormals_and_an_empty_tensor() -> None:
    zero = torch.zeros(2, 64)
    for block_format in FORMATS.values():
        assert not dequantize(quantize(zero, block_format)).any()
        assert not unpack(quantize(zero, block_format).codes).any()
    tiny = torch.full((1, 64), 2.0**-130)
    assert not dequantize(quantize(tiny, NVFP4)).any()
    # 2^-130 is 1/8 of the least scale's unit: below half the least code.
    assert not dequantize(quantize(tiny, MXFP4)).any()
    assert torch.isfinite(dequantize(quantize(tiny, NVFP4, tensor_scale=amax_tensor_scale(tiny))))[
        0, 0
    ]
    assert amax_tensor_scale(torch.zeros(0, 16)).item() == 1.0


@pytest.mark.parametrize("layout", ["plain", "swizzled"])
@pytest.mark.parametrize("block_format", FORMATS.values(), ids=FORMATS)
def test_strides_of_the_values_do_not_reach_the_codes(block_format, layout: str) -> None:
    x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(3)).mT
    assert not x.is_contiguous()
    got = quantize(x, block_format, scale_layout=layout)
    assert got.codes.is_contiguous()
    assert got.scales.is_contiguous()
    expected = quantize(x.contiguous(), block_format, scale_layout=layout)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scales.view(torch.uint8), expected.scales.view(torch.uint8))


def test_floor_clips_and_rceil_does_not() -> None:
    x = torch.full((1, 32), 7.9)
    assert dequantize(quantize(x, MXFP4, convention="floor")).max() == 6.0
    assert dequantize(quantize(x, MXFP4, convention="rceil")).max() == 8.0


def test_unknown_names_list_what_exists() -> None:
    with pytest.raises(UnknownNameError, match=r"'round'.*known are ceil, even, floor, rceil"):
        quantize(torch.ones(1, 32), MXFP4, convention="round")
    with pytest.raises(UnknownNameError, match=r"'fp5'.*mxfp4, nvfp4"):
        format_named("fp5")
