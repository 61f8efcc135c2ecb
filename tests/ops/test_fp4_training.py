"""The trainable FP4 attention: gradients against exact ones, layouts, traces, refusals."""

from __future__ import annotations

import os

import pytest
import torch
from fp4_calls import cosine, exact_attention
from tilescout import ops
from tilescout.errors import UnsupportedError, UsageError

interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
LEAST_COSINE = {"fp8_p": 0.98, "nvfp4": 0.98, "direct": 0.97}
"""Of the gradients, by the forward's mode."""


@pytest.fixture(autouse=True)
def _shim():
    torch._dynamo.reset()
    if os.environ.get("TRITON_INTERPRET") == "1":
        import fp4_interpreter_shim

        fp4_interpreter_shim.install()


def tensors(device="cpu", *, heads=2, kv_heads=1, rows=128, keys=128, dim=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (heads, rows), "k": (kv_heads, keys), "v": (kv_heads, keys)}
    made = {n: torch.randn(1, *size, dim, generator=generator) for n, size in sizes.items()}
    made["do"] = torch.randn(1, heads, rows, dim, generator=generator)
    return {n: x.to(device, dtype).requires_grad_(n != "do") for n, x in made.items()}


def gradients(function, q, k, v, do) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of q, k and v."""
    out = function(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), do)


def check(got, exact, least: float) -> None:
    for value, expected in zip(got, exact, strict=True):
        assert value.shape == expected.shape
        assert cosine(value, expected) >= least
        assert 0.95 <= value.double().norm() / expected.double().norm() <= 1.05


@pytest.mark.parametrize("device", DEVICES)
class TestGradients:
    @pytest.mark.parametrize("do_scale", [1.0, 1e-4])
    @pytest.mark.parametrize("dim", [64, 128])
    @pytest.mark.parametrize("tokens", [128, 512])
    def test_against_exact_ones(self, device, tokens, dim, do_scale) -> None:
        heads = 1 if device == "cpu" else 4
        given = tensors(device, heads=heads, rows=tokens, keys=tokens, dim=dim)
        given["do"] *= do_scale
        got = gradients(ops.fp4_attention_training, **given)
        exact = gradients(lambda q, k, v: exact_attention(q, k, v, is_causal=True)[0], **given)
        check(got, exact, LEAST_COSINE["fp8_p"])

    @pytest.mark.parametrize("mode", ["nvfp4", "direct"])
    def test_other_forwards(self, device, mode) -> None:
        # At D 128 the softmax's gradient is off without a precise output (0.965).
        given = tensors(device, dim=128)
        got = gradients(
            lambda *x: ops.fp4_attention_training(*x, mode=mode, allow_mxfp4_p=True), **given
        )
        exact = gradients(lambda q, k, v: exact_attention(q, k, v, is_causal=True)[0], **given)
        check(got[1:], exact[1:], LEAST_COSINE[mode])
        check(got[:1], exact[:1], 0.97)

    # torch says so of its own backward where that is the first product of autograd's thread.
    @pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
    def test_a_mean_of_the_keys_costs_nothing(self, device) -> None:
        given = tensors(device)
        with torch.no_grad():
            given["k"] += 4.0
        exact = gradients(lambda q, k, v: exact_attention(q, k, v, is_causal=True)[0], **given)
        smooth = gradients(ops.fp4_attention_training, **given)
        check(smooth, exact, LEAST_COSINE["fp8_p"])
        plain = gradients(lambda *x: ops.fp4_attention_training(*x, smooth=()), **given)
        assert cosine(plain[1], exact[1]) < cosine(smooth[1], exact[1])

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_grouped_heads_tails_and_both_layouts(self, device, is_causal) -> None:
        given = tensors(device, heads=4, kv_heads=2, rows=70, keys=133, dtype=torch.bfloat16)
        before = {name: x.detach().clone() for name, x in given.items()}
        got = gradients(lambda *x: ops.fp4_attention_training(*x, is_causal=is_causal), **given)
        exact = gradients(
            lambda *x: exact_attention(*x, is_causal=is_causal)[0].to(torch.bfloat16), **given
        )
        check(got, exact, 0.97)
        for name, x in given.items():
            assert torch.equal(x, before[name])
        swapped = {
            n: x.detach().transpose(1, 2).contiguous().requires_grad_() for n, x in given.items()
        }
        other = gradients(
            lambda *x: ops.fp4_attention_training(*x, is_causal=is_causal, layout="NHD", smooth=()),
            **swapped,
        )
        plain = gradients(
            lambda *x: ops.fp4_attention_training(*x, is_causal=is_causal, smooth=()), **given
        )
        for value, expected in zip(other, plain, strict=True):
            assert torch.equal(value.transpose(1, 2), expected)

    def test_no_gradient_gives_zeros_and_an_expanded_one_is_read_right(self, device) -> None:
        given = tensors(device, rows=70, keys=133)
        zeros = {**given, "do": torch.zeros_like(given["do"])}
        _, *none = gradients(ops.fp4_attention_training, **zeros)
        assert not any(x.any() for x in none)
        ones = {**given, "do": torch.ones_like(given["do"])}
        expanded = {**given, "do": torch.ones(1, device=device).expand_as(given["do"])}
        first = gradients(ops.fp4_attention_training, **ones)
        second = gradients(ops.fp4_attention_training, **expanded)
        for value, expected in zip(second, first, strict=True):
            assert torch.equal(value, expected)

    def test_rows_that_see_no_key_and_no_rows_at_all(self, device) -> None:
        given = tensors(device, rows=80, keys=70)
        out, dq, dk, dv = gradients(ops.fp4_attention_training, **given)
        assert not out[:, :, :10].any()
        assert not dq[:, :, :10].any()
        assert all(torch.isfinite(x).all() for x in (dq, dk, dv))
        none = tensors(device, rows=0)
        out, dq, dk, dv = gradients(ops.fp4_attention_training, **none)
        assert out.shape == dq.shape == (1, 2, 0, 64)
        assert dk.shape == dv.shape == (1, 1, 128, 64)
        assert not dk.any()
        assert not dv.any()

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_trace_gives_equal_bits(self, device, backend) -> None:
        given = tensors(device, rows=70, keys=133)

        def block(q, k, v):
            return ops.fp4_attention_training(q * 1.0, k, v) * 1.0

        traced = torch.compile(block, backend=backend, fullgraph=True)
        for value, expected in zip(
            gradients(traced, **given), gradients(block, **given), strict=True
        ):
            assert torch.equal(value, expected)

    def test_opcheck_finds_nothing(self, device) -> None:
        given = tensors(device, rows=70, keys=133)
        torch.library.opcheck(
            torch.ops.tilescout.fp4_attention_training.default,
            (given["q"], given["k"], given["v"]),
            {
                "is_causal": True,
                "sm_scale": 0.125,
                "mode": "fp8_p",
                "products": "emulated",
                "smooth_k": True,
            },
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )

    def test_it_differentiates_once(self, device) -> None:
        given = tensors(device, rows=16, keys=16)
        out = ops.fp4_attention_training(given["q"], given["k"], given["v"])
        (dq,) = torch.autograd.grad(out.sum(), given["q"], create_graph=True)
        with pytest.raises(UnsupportedError, match="no second derivative"):
            torch.autograd.grad(dq.sum(), given["q"])


def refused(match: str, *, error=UsageError, **changes):
    given = {**tensors(), **changes}
    given.pop("do")
    with pytest.raises(error, match=match):
        ops.fp4_attention_training(**given)


def test_what_is_wrong_is_named() -> None:
    x = tensors()
    reason = "P in MXFP4, with which training diverges.*2609.04105.* or pass allow_mxfp4_p=True"
    refused(reason, error=UnsupportedError, mode="direct")
    refused("mode='fp4' of fp4_attention_training: one of nvfp4, direct, fp8_p", mode="fp4")
    refused("layout='BHSD'", layout="BHSD")
    refused("products='mixed'", products="mixed")
    refused("smooth='q' of fp4_attention_training: one of k", smooth=("q",))
    refused("head dimension of q .* 64 or 128: pad q, k and v", **tensors(dim=96))
    refused("shape of v", v=x["v"][:, :, :5])
    refused("shape of q .* four axes", q=x["q"][0])
    refused("sm_scale .* above 0", sm_scale=-1.0)
    refused("sm_scale of .* is a tensor: must be a number", sm_scale=torch.ones(2))
    refused("sm_scale of .* is '1': must be a number", sm_scale="1")
    refused("sm_scale=inf of .* must be finite", sm_scale=float("inf"))
    refused("type of q .*'NoneType': must be torch.Tensor", q=None)
    refused("type of smooth .*'NoneType': must be a tuple of any of k", smooth=None)
    refused("is_causal of .* is 'yes': must be True or False", is_causal="yes")
