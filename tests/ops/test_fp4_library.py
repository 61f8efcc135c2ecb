"""``torch.compile(fullgraph=True)`` traces through the FP4 functions; their operators check out."""

from __future__ import annotations

import os

import pytest
import torch
from fp4_calls import cosine, exact_attention
from tilescout.errors import UsageError
from tilescout.ops.fp4_attention import (
    fp4_attention,
    nvfp4_attention_sm120_fwd,
    nvfp4_attention_sm120_quantize_qkv,
)
from torch._subclasses.fake_tensor import FakeTensorMode

interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
    ),
]
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture(autouse=True)
def _shim():
    torch._dynamo.reset()
    if os.environ.get("TRITON_INTERPRET") == "1":
        import fp4_interpreter_shim

        fp4_interpreter_shim.install()


def tensors(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {"q": (2, 70), "k": (1, 133), "v": (1, 133)}
    return {
        name: torch.randn(1, *size, 64, generator=generator).to(device, torch.float16)
        for name, size in made.items()
    }


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("device", DEVICES)
class TestTraces:
    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    def test_attention_with_its_logarithm(self, device, layout: str) -> None:
        given = tensors(device)

        def block(q, k, v):
            if layout == "NHD":
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out, lse = fp4_attention(q, k, v, layout=layout, return_lse=True)
            return (out.transpose(1, 2) if layout == "NHD" else out) * 1.0, lse

        out, lse = compiled(block)(**given)
        exact, exact_lse = exact_attention(**given, is_causal=False)
        assert cosine(out, exact) >= 0.96
        assert (lse - exact_lse).abs().mean() <= 0.05

    def test_the_pair_in_one_graph(self, device) -> None:
        given = tensors(device)

        def block(q, k, v, out):
            operands = nvfp4_attention_sm120_quantize_qkv(q, k, v)
            into, lse = nvfp4_attention_sm120_fwd(*operands, out=out, sm_scale=0.125)
            return into * 1.0, lse, nvfp4_attention_sm120_fwd(*operands, sm_scale=0.125)[0]

        into = torch.zeros_like(given["q"], dtype=torch.bfloat16)
        out, lse, new = compiled(block)(**given, out=into)
        assert torch.equal(out, into)
        assert torch.equal(new, into)
        assert lse.shape == into.shape[:3]
        exact, _ = exact_attention(**given, is_causal=False)
        assert cosine(into, exact) >= 0.96

    def test_opcheck_finds_nothing(self, device) -> None:
        given = tuple(tensors(device).values())
        for layout in ("HND", "NHD"):
            arguments = given
            if layout == "NHD":
                arguments = tuple(x.transpose(1, 2).contiguous() for x in given)
            torch.library.opcheck(
                torch.ops.tilescout.fp4_attention.default,
                arguments,
                {"smooth": ["q", "k"], "layout": layout, "return_lse": True},
                test_utils=CHECKS,
            )
        # The check of schemas multiplies what it is given, which torch cannot do in e4m3.
        for per_block_mean in (True, False):
            torch.library.opcheck(
                torch.ops.tilescout.nvfp4_attention_sm120_quantize_qkv.default,
                (*given, per_block_mean),
                test_utils="test_faketensor",
            )
        operands = nvfp4_attention_sm120_quantize_qkv(*given)
        torch.library.opcheck(
            torch.ops.tilescout.nvfp4_attention_sm120_fwd.default,
            operands,
            {"out_dtype": torch.float16},
            test_utils="test_faketensor",
        )


def test_fake_tensors_give_the_shapes_without_a_launch() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 70, 4, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 133, 2, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = fp4_attention(q, k, k, layout="NHD", return_lse=True)
        assert (out.shape, out.dtype, lse.shape) == (q.shape, q.dtype, (2, 4, 70))
        assert fp4_attention(q, k, k, layout="NHD").shape == q.shape


def test_what_requires_grad_is_refused_in_a_trace_too() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 64, 64, requires_grad=True)
        with pytest.raises(UsageError, match="requires grad"):
            fp4_attention(q, q.detach(), q.detach())
