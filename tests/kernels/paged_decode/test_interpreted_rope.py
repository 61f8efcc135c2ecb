"""RoPE at far positions in the interpreter, against fp64: its angles, and attention with them."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.paged_decode import triton_kernel as device_code
from tilescout.kernels.paged_decode.inputs import Rope
from tilescout.kernels.registry import template

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
]

POSITIONS = (0, 1, 4095, 131_071, 1_000_003, 2**20 - 1)
ROUNDING = 2e-6
"""Of sine and cosine, in fp32."""
PER_POSITION = math.pi * 2.0**-32
"""Half a unit of the frequency, 2^-32 of a turn, in radians."""
ROPES = {
    "Llama 2": Rope(),
    "Llama 3": Rope(theta=500_000.0),
    "positions divided": Rope(theta=10_000.0, scale=8.0),
    "more than half a turn a position": Rope(theta=1e6, scale=0.25),
}


@triton.jit
def rotate_rows(x, positions, out, theta, scale, DIM: tl.constexpr, PADDED: tl.constexpr):
    rows = tl.arange(0, 8)
    offs_d = tl.arange(0, PADDED)
    is_dim = (offs_d < DIM)[None, :] & (rows < 8)[:, None]
    starts = x + rows * DIM
    tile = tl.load(starts[:, None] + offs_d[None, :], is_dim, other=0.0)
    position = tl.load(positions + rows)
    turned = device_code._rotated(tile, starts, rows < 8, position, offs_d, (theta, scale), DIM)
    tl.store(out + rows[:, None] * DIM + offs_d[None, :], turned, is_dim)


def angles(position: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    pair = torch.arange(head_dim // 2, dtype=torch.float64)
    return position.double()[:, None] / rope.scale * rope.theta ** (-2.0 * pair / head_dim)


def rotated(x: torch.Tensor, position: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x ``[tokens, heads, dim]`` in fp64."""
    angle = angles(position, rope, x.shape[2])[:, None]
    low, high = x.double().chunk(2, dim=2)
    turned = (low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin())
    return torch.cat(turned, dim=2)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_angles_are_within_half_a_unit_a_position(rope: Rope, head_dim: int) -> None:
    positions = torch.tensor([*POSITIONS, 17, 65_536], dtype=torch.int32)
    half = head_dim // 2
    x = torch.cat([torch.ones(8, half), torch.zeros(8, half)], dim=1)
    found = torch.full_like(x, math.nan)
    padded = triton.next_power_of_2(head_dim)
    rotate_rows[(1,)](x, positions, found, rope.theta, rope.scale, head_dim, padded)
    cosine, sine = found.double().chunk(2, dim=1)
    exact = angles(positions, rope, head_dim)
    error = torch.remainder(torch.atan2(sine, cosine) - exact + math.pi, 2 * math.pi) - math.pi
    bound = positions.double() * PER_POSITION + ROUNDING
    assert (error.abs() <= bound[:, None]).all(), error.abs().amax(1)
    assert (cosine.square() + sine.square() - 1.0).abs().max() < ROUNDING


WINDOW = 24
PAGE_SIZE = 1024
CONFIG = Config.of(
    "triton",
    {
        **{"block_n": 32, "block_m": 4, "num_warps": 4, "num_stages": 2, "prefetch_pages": False},
        **{"swap_ab": False, "kv_eviction": "evict_normal", "launch_pdl": False},
        "split_rule": "none",
    },
)


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("tokens", [4096, 131_072, 1_000_000])
def test_attention_far_from_the_first_token(tokens: int, swap_ab: bool) -> None:
    problem = PagedDecodeProblem(
        *(1, tokens, 8, 2, 64, PAGE_SIZE, "float16"), window_left=WINDOW, has_rope=True
    )
    made = ref.paged_inputs(problem, [2 * PAGE_SIZE], device="cpu", seed=1, is_dense=True)
    # One page stands for all that lie before the window, which are not read.
    before, last = made.kv_indices[0].tolist()
    table = torch.full((1, -(-tokens // PAGE_SIZE)), before, dtype=torch.int32)
    table[0, -1] = last
    made.k_cache[before] = math.nan
    inputs = replace(
        made, kv_indices=table, seq_lens=torch.tensor([tokens], dtype=torch.int32), q=2 * made.q
    )
    outputs = PagedDecodeOutputs(torch.full_like(inputs.q, math.nan), torch.full((1, 8), math.nan))
    chosen = CONFIG.replace(swap_ab=swap_ab)
    template("paged_decode", "triton").build(problem, chosen, inputs).launch(inputs, outputs)

    position = torch.arange(tokens - WINDOW - 1, tokens)
    rows = position % PAGE_SIZE
    k, v = (pool[last, rows].repeat_interleave(4, 1) for pool in (inputs.k_cache, inputs.v_cache))
    q = rotated(inputs.q, position[-1:], inputs.rope)
    logits = torch.einsum("qhd,khd->qhk", q, rotated(k, position, inputs.rope)) * inputs.sm_scale
    lse = logits.logsumexp(2) / math.log(2)
    out = torch.einsum("qhk,khd->qhd", logits.softmax(2), v.double())
    # As near as at a position whose angles are small: what is left is q and K rounded to fp16.
    assert (outputs.lse - lse).abs().max() < 2e-3
    assert (outputs.out - out).abs().max() < 2e-3
