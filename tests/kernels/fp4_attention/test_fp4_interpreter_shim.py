"""The trap of Triton's interpreter that the FP4 shim cures, shown without and with it."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from tilescout.kernels.quantization.formats import MXFP4, NVFP4
from tilescout.kernels.quantization.reference import dequantize, quantize

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]


@triton.jit
def scaled_kernel(a, sa, b, sb, c, G: tl.constexpr):
    rows = tl.arange(0, 32)
    half = tl.arange(0, 32)
    blocks = tl.arange(0, 64 // G)
    a_tile = tl.load(a + rows[:, None] * 32 + half[None, :])
    b_tile = tl.load(b + rows[None, :] * 32 + half[:, None])
    a_scale = tl.load(sa + rows[:, None] * (64 // G) + blocks[None, :])
    b_scale = tl.load(sb + rows[:, None] * (64 // G) + blocks[None, :])
    product = tl.dot_scaled(a_tile, a_scale, "e2m1", b_tile, b_scale, "e2m1")
    tl.store(c + rows[:, None] * 32 + rows[None, :], product)


@triton.jit
def fp8_kernel(a, c):
    offs = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tile = tl.load(a + offs)
    tl.store(c + offs, tl.dot(tile, tile))


@pytest.fixture
def shim():
    import fp4_interpreter_shim

    fp4_interpreter_shim.uninstall()
    yield fp4_interpreter_shim
    fp4_interpreter_shim.install()


def product(block_format) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (quantize(torch.randn(32, 64, generator=generator), block_format) for _ in range(2))
    c = torch.zeros(32, 32)
    scaled_kernel[(1,)](a.codes, a.scales, b.codes, b.scales, c, G=block_format.block_size)
    return c, dequantize(a) @ dequantize(b).T


def test_e4m3_scales_are_read_as_what_they_are(shim) -> None:
    got, expected = product(NVFP4)
    assert not torch.allclose(got, expected), "Triton mended dot_scaled: drop it from the shim"
    shim.install()
    got, expected = product(NVFP4)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_e8m0_scales_stay_right(shim) -> None:
    shim.install()
    got, expected = product(MXFP4)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_fp8_products_are_exact_sums_in_fp32(shim) -> None:
    shim.install()
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(32, 32, generator=generator).mul(100).to(torch.float8_e4m3fn)
    c = torch.zeros(32, 32)
    fp8_kernel[(1,)](a, c)
    torch.testing.assert_close(c, a.float() @ a.float(), rtol=1e-6, atol=1e-2)
