"""The public FP4 functions against exact attention: layouts, purity, the logarithm, refusals."""

from __future__ import annotations

import os

import pytest
import torch
from fp4_calls import cosine, exact_attention
from tilescout import ops
from tilescout.errors import UnsupportedError, UsageError
from tilescout.ops.fp4_attention import (
    fp4_attention,
    nvfp4_attention_sm120_fwd,
    nvfp4_attention_sm120_quantize_qkv,
    sageattn3_blackwell,
)

interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _shim():
    if os.environ.get("TRITON_INTERPRET") == "1":
        import fp4_interpreter_shim

        fp4_interpreter_shim.install()


def tensors(device="cpu", *, heads=2, kv_heads=1, rows=70, keys=133, dim=64, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (heads, rows), "k": (kv_heads, keys), "v": (kv_heads, keys)}
    made = {n: torch.randn(1, *size, dim, generator=generator) for n, size in sizes.items()}
    made["k"] += 2.0  # a mean to be taken off
    return {name: tensor.to(device, dtype) for name, tensor in made.items()}


@pytest.mark.parametrize("device", DEVICES)
class TestOurs:
    @pytest.mark.parametrize("mode", ["auto", "nvfp4", "direct", "fp8_p", "emulate"])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_output_and_logarithm(self, device, mode, is_causal) -> None:
        given = tensors(device)
        before = {name: tensor.clone() for name, tensor in given.items()}
        out, lse = fp4_attention(**given, mode=mode, is_causal=is_causal, return_lse=True)
        exact, exact_lse = exact_attention(**given, is_causal=is_causal)
        assert cosine(out, exact) >= 0.96
        assert 0.9 <= out.double().norm() / exact.norm() <= 1.1
        # The keys' mean counts, though it was taken off; what remains is Q and K in four bits.
        assert (lse - exact_lse).abs().mean() <= 0.05
        assert out.dtype == given["q"].dtype
        for name, tensor in given.items():
            assert torch.equal(tensor, before[name])

    def test_layouts_and_strides_give_equal_bits(self, device) -> None:
        # Without smoothing: torch sums a mean in the order of the strides.
        given = tensors(device, dim=128)
        out = fp4_attention(**given, smooth=())
        swapped = {name: x.transpose(1, 2).contiguous() for name, x in given.items()}
        assert torch.equal(fp4_attention(**swapped, layout="NHD", smooth=()).transpose(1, 2), out)
        columns = {name: x.mT.contiguous().mT for name, x in given.items()}
        assert torch.equal(fp4_attention(**columns, smooth=()), out)

    def test_a_tensor_scale_saves_small_values(self, device) -> None:
        given = tensors(device, dtype=torch.float32)
        exact = exact_attention(**given)[0]
        small = {**given, "v": given["v"] * 1e-5}
        assert cosine(fp4_attention(**small), exact) >= 0.97
        assert not fp4_attention(**small, tensor_scale="unit").any()

    def test_rows_that_see_no_key_are_zero(self, device) -> None:
        given = tensors(device, rows=80, keys=70)
        out, lse = fp4_attention(**given, is_causal=True, return_lse=True)
        assert not out[:, :, :10].any()
        assert (lse[:, :, :10] == -torch.inf).all()
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse[:, :, 10:]).all()

    def test_no_queries(self, device) -> None:
        given = tensors(device)
        out, lse = fp4_attention(**{**given, "q": given["q"][:, :, :0]}, return_lse=True)
        assert out.shape == (1, 2, 0, 64)
        assert lse.shape == (1, 2, 0)


@pytest.mark.parametrize("device", DEVICES)
class TestOthers:
    @pytest.mark.parametrize("per_block_mean", [False, True])
    def test_sage(self, device, per_block_mean) -> None:
        given = tensors(device)
        out = sageattn3_blackwell(**given, is_causal=True, per_block_mean=per_block_mean)
        assert cosine(out, exact_attention(**given, is_causal=True)[0]) >= 0.97

    def test_causal_ones_on_the_diagonal(self, device) -> None:
        # V = I and no logits: row i is 1 / (i + 1) up to key i, and nothing after it.
        zero, eye = torch.zeros(1, 1, 128, 128), torch.eye(128)[None, None]
        q, k, v = (x.to(device, torch.bfloat16) for x in (zero, zero, eye))
        out = sageattn3_blackwell(q, k, v, is_causal=True)[0, 0].float()
        exact = torch.tril(torch.ones(128, 128, device=device))
        exact /= exact.sum(1, keepdim=True)
        assert out.triu(1).abs().max() <= 1e-5
        assert cosine(out, exact) >= 0.98

    def test_equal_logits(self, device) -> None:
        zero, one = torch.zeros(1, 1, 64, 64), torch.ones(1, 1, 64, 64)
        q, k, v = (x.to(device, torch.bfloat16) for x in (zero, zero, one))
        out, lse = fp4_attention(q, k, v, return_lse=True)
        assert (out - 1).abs().max() <= 0.05
        torch.testing.assert_close(lse, torch.full_like(lse, 64.0).log(), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("per_block_mean", [False, True])
    def test_the_pair_equals_the_whole(self, device, per_block_mean) -> None:
        given = tensors(device, rows=140, keys=150)
        quantized = nvfp4_attention_sm120_quantize_qkv(**given, per_block_mean=per_block_mean)
        out, lse = nvfp4_attention_sm120_fwd(
            *quantized, causal=True, per_block_mean=per_block_mean, out_dtype=torch.float16
        )
        whole = sageattn3_blackwell(**given, is_causal=True, per_block_mean=per_block_mean)
        assert torch.equal(out, whole)
        centred = given["k"].float() - given["k"].float().mean(2, keepdim=True)
        q, v = given["q"], given["v"]
        exact_lse = exact_attention(q, centred, v, is_causal=True)[1]
        assert (lse - exact_lse).abs().mean() <= 0.05
        target, logs = torch.empty_like(out), torch.empty_like(lse)
        same = nvfp4_attention_sm120_fwd(
            *quantized, causal=True, per_block_mean=per_block_mean, out=target, lse=logs
        )
        assert same[0] is target
        assert same[1] is logs
        assert torch.equal(target, out)


def refused(match: str, *, error=UsageError, function=fp4_attention, **changes):
    with pytest.raises(error, match=match):
        function(**{**tensors(), **changes})


def test_what_is_wrong_is_named() -> None:
    x = tensors()
    refused("mode='fp4' of fp4_attention: one of auto, nvfp4", mode="fp4")
    refused("layout='BHSD'", layout="BHSD")
    refused("smooth='v' of fp4_attention: one of q, k", smooth=("v",))
    refused("tensor_scale='max'", tensor_scale="max")
    refused("has no native products", mode="emulate", products="native")
    refused("head dimension of q .* 64 or 128: pad q, k and v", **tensors(dim=96))
    refused("heads of k .* a divisor of those of q, 2", **{n: tensors(kv_heads=3)[n] for n in "kv"})
    refused("shape of v", v=x["v"][:, :, :5])
    refused("shape of k .* at least one key", k=x["k"][:, :, :0], v=x["v"][:, :, :0])
    refused("shape of q .* four axes", q=x["q"][0])
    refused("dtype of v .* that of q", v=x["v"].float())
    refused("dtype of q .* bf16, fp16 or fp32", **{n: t.double() for n, t in x.items()})
    refused("type of q .*'NoneType': must be torch.Tensor", q=None)
    refused("type of v .*'int'", v=1, layout="NHD")
    refused("type of smooth .*'int': must be a tuple of any of q, k", smooth=1)
    refused("smooth=None of fp4_attention: one of q, k", smooth=(None,))
    refused("is_causal of fp4_attention is a tensor: must be True or False", is_causal=x["q"])
    refused("return_lse of fp4_attention is None: must be True or False", return_lse=None)
    quantize = nvfp4_attention_sm120_quantize_qkv
    refused("type of k .*'str'", function=quantize, k="k")
    refused("per_block_mean of .* is 1: must be True or False", function=quantize, per_block_mean=1)
    refused("requires grad", q=x["q"].requires_grad_())
    refused(
        "does not support attn_mask, sm_scale",
        error=UnsupportedError,
        function=sageattn3_blackwell,
        attn_mask=x["q"],
        sm_scale=1.0,
    )


@pytest.mark.interpreter
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_what_the_interpreter_gets_wrong_is_refused() -> None:
    refused("products='native' .* reads block scales wrongly", products="native")
    refused("products='fast' of fp4_attention: one of auto, native, emulated", products="fast")
    refused("sm_scale .* above 0", sm_scale=-1.0)
    quantized = nvfp4_attention_sm120_quantize_qkv(**tensors())
    with pytest.raises(UsageError, match=r"shape of v_fp4_t .*\[1, 1, 64, 128\]"):
        nvfp4_attention_sm120_fwd(*quantized[:2], quantized[2][..., :64], *quantized[3:])
    moved = torch.zeros(quantized[3].numel() + 1, dtype=torch.uint8)[1:]
    moved = moved.view(quantized[3].dtype).view(quantized[3].shape)
    with pytest.raises(UnsupportedError, match="scales of q: starts at no multiple of 16 bytes"):
        nvfp4_attention_sm120_fwd(*quantized[:3], moved, *quantized[4:])


def test_they_are_exported() -> None:
    assert ops.fp4_attention is fp4_attention
    assert ops.sageattn3_blackwell is sageattn3_blackwell


def test_the_cpu_is_refused_without_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on")
    refused("runs on an NVIDIA GPU")
