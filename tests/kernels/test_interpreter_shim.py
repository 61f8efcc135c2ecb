"""Each trap of Triton's interpreter that the shim cures, shown without and with it."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]


@triton.jit
def cast_kernel(x, y, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(y + offs, tl.load(x + offs).to(y.dtype.element_ty))


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + offs, tl.dot(tl.load(a + offs), tl.load(b + offs)))


@pytest.fixture
def shim():
    import interpreter_shim

    interpreter_shim.uninstall()
    yield interpreter_shim
    interpreter_shim.install()


def cast(values: list[float], dtype: torch.dtype) -> list[float]:
    x = torch.tensor(values)
    y = torch.zeros(len(values), dtype=dtype)
    cast_kernel[(1,)](x, y, N=len(values))
    return y.float().tolist()


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        pytest.param(torch.bfloat16, [1.00390625 + 2**-9, -3.0], [1.0078125, -3.0], id="bf16"),
        pytest.param(torch.float8_e4m3fn, [1.97, 500.0], [2.0, 448.0], id="e4m3"),
        pytest.param(torch.float8_e5m2, [1.97, -1e6], [2.0, -57344.0], id="e5m2"),
    ],
)
def test_casts_round_to_nearest_even_and_saturate(shim, dtype, values, expected) -> None:
    assert cast(values, dtype) != expected, "Triton mended this cast: drop it from the shim"
    shim.install()
    assert cast(values, dtype) == expected


def test_dot_reads_bfloat16_as_numbers(shim) -> None:
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = a.float() @ a.float()
    c = torch.zeros(16, 16)
    dot_kernel[(1,)](a, a, c, N=16)
    assert not torch.allclose(c, expected), "Triton mended this dot: drop it from the shim"
    shim.install()
    dot_kernel[(1,)](a, a, c, N=16)
    torch.testing.assert_close(c, expected, rtol=1e-6, atol=1e-6)
