"""The fused quantiser in the interpreter, bit for bit; compiled, with what it costs; on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from tilescout.kernels.quantization.block_tensor import amax_tensor_scale
from tilescout.kernels.quantization.formats import (
    FORMATS,
    FOUR_OVER_SIX,
    FOUR_OVER_SIX_LARGEST_SCALE,
    MXFP4,
    NVFP4,
    SCALE_LAYOUTS,
)
from tilescout.kernels.quantization.reference import quantize
from tilescout.kernels.quantization.triton_append import append_spec
from tilescout.kernels.quantization.triton_quantizer import (
    quantize_along_dim,
    quantize_along_keys,
    quantize_spec,
)
from tilescout.tuner.prediction.binary import read_facts

interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
    # The interpreter takes errors of infinity and squares of the largest through numpy.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
CONVENTIONS = [(f, c) for f in FORMATS.values() for c in f.conventions]
CONVENTION_IDS = [f"{f.name}-{c}" for f, c in CONVENTIONS]


@pytest.fixture(autouse=True)
def _shim():
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter_shim

        interpreter_shim.install()


def operand(dtype=torch.float32, *, tokens=70, head_dim=64, seed=0) -> torch.Tensor:
    """Values over 24 binades: ties, zeros, denormals, the largest, NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, tokens, head_dim, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, (1, 2, tokens, 1), generator=generator).float())
    x[0, 0, 0] = 0.0
    x[0, 0, 1, :16] = 0.0
    x[0, 0, 2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(head_dim // 8)
    x[0, 1, 3, 5] = float("nan")
    x[0, 1, 4, 5] = float("-inf")
    x[0, 1, 5] = 1e-40
    x[0, 1, 6] = 3e38
    return x.to(dtype)


def check(got, expected) -> None:
    assert torch.equal(got.codes, expected.codes)
    assert got.scales.dtype == expected.scales.dtype
    assert torch.equal(got.scales.view(torch.uint8), expected.scales.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize(("block_format", "convention"), CONVENTIONS, ids=CONVENTION_IDS)
def test_rows_equal_the_reference(device, layout, block_format, convention) -> None:
    options = {"convention": convention, "scale_layout": layout}
    x = operand(torch.bfloat16).to(device)
    before = x.clone()
    check(quantize_along_dim(x, block_format, **options), quantize(x, block_format, **options))
    assert torch.equal(x.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_tensor_scale_and_strides(device, dtype) -> None:
    x = operand(dtype, tokens=9, head_dim=128).nan_to_num(0.0, 100.0, -100.0).to(device)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    scale = amax_tensor_scale(x)
    got = quantize_along_dim(x, NVFP4, tensor_scale=scale)
    check(got, quantize(x.contiguous(), NVFP4, tensor_scale=scale))
    assert got.tensor_scale is scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
@pytest.mark.parametrize("block_format", FORMATS.values(), ids=FORMATS)
def test_keys_are_transposed_and_padded_with_zeros(device, tokens, block_format) -> None:
    x = operand(tokens=max(7, tokens)).nan_to_num(0.0, 9.0, -9.0)[:, :, :tokens].to(device)
    padded = torch.nn.functional.pad(x.transpose(-1, -2), (0, 256 - tokens))
    check(quantize_along_keys(x, block_format, padded_keys=256), quantize(padded, block_format))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_per_mean", [70, 32])
def test_means_are_subtracted_first(device, rows_per_mean: int) -> None:
    x = operand(torch.bfloat16).nan_to_num(0.0, 9.0, -9.0).to(device)
    num_means = -(-70 // rows_per_mean)
    mean = torch.randn(1, 2, num_means, 64, generator=torch.Generator().manual_seed(1)).to(device)
    got = quantize_along_dim(x, NVFP4, mean=mean, rows_per_mean=rows_per_mean)
    spread = mean.repeat_interleave(rows_per_mean, dim=2)[:, :, :70]
    check(got, quantize(x.float() - spread, NVFP4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("convention", FOUR_OVER_SIX)
def test_errors_of_two_scales_are_compared_as_in_the_reference(device, convention) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1, 2, 64, 64, generator=generator).to(device)
    scale = amax_tensor_scale(x, largest_scale=FOUR_OVER_SIX_LARGEST_SCALE)
    mean = torch.randn(1, 2, 1, 64, generator=generator).to(device) / 4
    options = {"tensor_scale": scale, "convention": convention}
    got = quantize_along_dim(x, mean=mean, rows_per_mean=64, **options)
    check(got, quantize(x - mean, **options))
    got = quantize_along_keys(x, padded_keys=64, **options)
    check(got, quantize(x.mT, **options))
    nearest = quantize(x.mT, tensor_scale=scale)
    took_4 = got.scales.float() > nearest.scales.float()
    assert 0.2 < took_4.float().mean() < 0.6


COMPILED = [(f, f.default_convention) for f in FORMATS.values()]
COMPILED += [(NVFP4, convention) for convention in FOUR_OVER_SIX]


@pytest.mark.parametrize("arch", [90, 100, 103, 120])
@pytest.mark.parametrize(
    ("block_format", "convention"), COMPILED, ids=[f"{f.name}-{c}" for f, c in COMPILED]
)
@pytest.mark.parametrize("along_keys", [False, True], ids=["rows", "keys"])
def test_it_compiles_without_spills(arch, block_format, convention, along_keys) -> None:
    spec = quantize_spec(
        torch.bfloat16,
        block_format,
        convention=convention,
        scale_layout="swizzled",
        along_keys=along_keys,
        has_mean=not along_keys,
        is_aligned=True,
        arch=arch,
    )
    assert not any("SIZE" in name or name == "S" for name in spec.constexprs)
    binary = spec.compile(arch)
    facts = read_facts(binary)
    assert facts.spill_bytes == 0
    # Along keys, both codings of a block take nearly what a thread may have.
    assert facts.registers <= (255 if convention in FOUR_OVER_SIX else 168)
    assert spec.constexprs["HARDWARE"] == (arch >= 100)


@pytest.mark.parametrize("arch", [90, 100, 103, 120])
@pytest.mark.parametrize("convention", FOUR_OVER_SIX)
def test_the_append_compiles_without_spills(arch, convention) -> None:
    spec = append_spec(
        torch.bfloat16,
        torch.int64,
        128,
        convention=convention,
        scales_on_device=True,
        is_aligned=True,
        arch=arch,
    )
    assert read_facts(spec.compile(arch)).spill_bytes == 0


def test_the_hardware_form_is_shorter() -> None:
    def instructions(arch: int) -> int:
        spec = quantize_spec(
            torch.bfloat16,
            MXFP4,
            convention="rceil",
            scale_layout="plain",
            along_keys=False,
            has_mean=False,
            is_aligned=True,
            arch=arch,
        )
        return read_facts(spec.compile(arch)).num_instructions

    assert instructions(100) < 0.8 * instructions(90)
