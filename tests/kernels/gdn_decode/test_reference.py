"""The bounds that configs are held to."""

from __future__ import annotations

import pytest
import torch
from tilescout.kernels.gdn_decode.reference import _difference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_element_of_any_size_may_be_rounded_and_no_more(dtype) -> None:
    torch.manual_seed(0)
    exact = torch.randn(128, 128, dtype=torch.float64)
    # Half a step of the dtype above a power of two: what rounding costs most.
    exact[3, 5] = 16.0 * (1 + torch.finfo(dtype).eps / 2)
    rounded = exact.to(dtype).double()
    assert (rounded - exact).abs().max() / exact.square().mean().sqrt() > 0.007
    assert _difference(rounded, exact, dtype)[2] is None
    off = rounded.clone()
    off[3, 5] -= 0.05 if dtype is torch.bfloat16 else 0.006
    assert "largest error" in str(_difference(off, exact, dtype)[2])
