"""What the tests of gated delta net's public functions share: devices, tensors, the recurrence."""

from __future__ import annotations

import os

import pytest
import torch

interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(device="cpu", *, batch=2, steps=3, heads=2, v_heads=4, k=64, v=64, dtype="float32"):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    dtype = getattr(torch, dtype)
    made = {
        "q": normal(batch, steps, heads, k).to(dtype),
        "k": torch.nn.functional.normalize(normal(batch, steps, heads, k), dim=-1).to(dtype),
        "v": normal(batch, steps, v_heads, v).to(dtype),
        "g": torch.nn.functional.logsigmoid(normal(batch, steps, v_heads)),
        "beta": normal(batch, steps, v_heads).sigmoid(),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def recurrence(q, k, v, g, beta, state, scale):
    """The definition, in float64: decay, correct, read."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = beta[:, t][..., None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], error)
        out[:, t] = scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out, state


def close(value, exact, tolerance=2e-5):
    torch.testing.assert_close(value.double(), exact.double(), rtol=tolerance, atol=tolerance)
