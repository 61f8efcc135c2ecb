"""The swizzled layout against its formula and back."""

from __future__ import annotations

import pytest
import torch
from tilescout.errors import UsageError
from tilescout.kernels.quantization.formats import FORMATS
from tilescout.kernels.quantization.reference import dequantize, quantize
from tilescout.kernels.quantization.scale_layout import (
    from_swizzled,
    swizzled_elements,
    to_swizzled,
)


@pytest.mark.parametrize("num_rows", [1, 127, 128, 300])
@pytest.mark.parametrize("num_blocks", [1, 4, 10])
def test_every_element_lies_where_the_formula_says(num_rows: int, num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    scales = torch.randint(1, 127, (2, num_rows, num_blocks), generator=generator).to(torch.uint8)
    swizzled = to_swizzled(scales)
    assert swizzled.shape == (2, swizzled_elements(num_rows, num_blocks))
    for r in range(num_rows):
        for c in range(num_blocks):
            tile = (r // 128) * -(-num_blocks // 4) + c // 4
            offset = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert swizzled[1, offset] == scales[1, r, c]
    assert swizzled.count_nonzero() == scales.numel()
    assert torch.equal(from_swizzled(swizzled, num_rows, num_blocks), scales)


@pytest.mark.parametrize("block_format", FORMATS.values(), ids=FORMATS)
def test_a_swizzled_tensor_has_the_same_values(block_format) -> None:
    x = torch.randn(3, 130, 96, generator=torch.Generator().manual_seed(0))
    plain, swizzled = (quantize(x, block_format, scale_layout=n) for n in ("plain", "swizzled"))
    assert plain.scales.dtype == swizzled.scales.dtype
    assert plain.scales.shape != swizzled.scales.shape
    assert torch.equal(dequantize(plain), dequantize(swizzled))


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(UsageError, match="512 swizzled scales: 129 rows of 4 blocks take 1024"):
        from_swizzled(torch.zeros(512, dtype=torch.uint8), 129, 4)
