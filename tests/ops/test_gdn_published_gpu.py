"""The grids that FLA, FlashQLA and FlashInfer publish for their own kernels, at their tolerances.

Through the public functions, so with whatever serves each problem. FLA's metric is the error's RMS
over the reference's, FlashQLA's the same, FlashInfer's an absolute and a relative bound of each
element. Head dims that ours refuse (60, 100) are left out, as are backward passes.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gdn_calls import recurrence
from tilescout import ops

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def made(batch, tokens, heads, v_heads, dim, dtype, *, gate_norm=1.0, share_kept=0.0, is_raw=False):
    """q, k, v, log decay and beta; a share of the decays is 0; raw keys are not of length one."""
    generator = torch.Generator(DEVICE).manual_seed(42)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE)

    q, k = (normal(batch, tokens, heads, dim) for _ in range(2))
    if not is_raw:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    uniform = torch.rand(batch, tokens, v_heads, generator=generator, device=DEVICE)
    g = torch.nn.functional.logsigmoid(uniform) / gate_norm
    g[torch.rand(g.shape, generator=generator, device=DEVICE) < share_kept] = 0.0
    beta = normal(batch, tokens, v_heads).sigmoid()
    q, k, v = (x.to(dtype) for x in (q, k, normal(batch, tokens, v_heads, dim)))
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def states(batch, v_heads, dim):
    return torch.randn(
        (batch, v_heads, dim, dim), generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE
    )


def ratio(value, exact) -> float:
    assert bool(torch.isfinite(value).all())
    exact = exact.double()
    return ((value.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def reference(given, state, scale, *, is_raw=False):
    if is_raw:
        normed = {n: torch.nn.functional.normalize(given[n].float(), dim=-1) for n in ("q", "k")}
        given = {**given, **normed}
    return recurrence(**given, state=state, scale=scale)


def packed_reference(given, state, scale, bounds):
    """Sequence by sequence."""
    parts = []
    for i, (first, end) in enumerate(pairwise(bounds)):
        part = {name: x[:, first:end] for name, x in given.items()}
        parts.append(recurrence(**part, state=state[i : i + 1], scale=scale))
    out, final = zip(*parts, strict=True)
    return torch.cat(out, dim=1), torch.cat(final)


FLA_RECURRENT = [
    (2, 1000, 2, 8, 128, 1.0, 0.1, torch.float32),
    (3, 1024, 2, 2, 128, 0.1, 1.0, torch.float32),
    (4, 1024, 3, 3, 128, 1.0, 10.0, torch.float32),
    (4, 2048, 4, 4, 64, 0.1, 1.0, torch.float32),
    (2, 1024, 4, 4, 128, 1.0, 0.1, torch.float16),
    (2, 1024, 4, 8, 128, 1.0, 10.0, torch.float16),
    (1, 63, 1, 1, 64, 1.0, 1.0, torch.float32),
]


@pytest.mark.parametrize("case", FLA_RECURRENT, ids=lambda c: "x".join(map(str, c)))
def test_fla_recurrent(case) -> None:
    batch, tokens, heads, v_heads, dim, scale, gate_norm, dtype = case
    given = made(batch, tokens, heads, v_heads, dim, dtype, gate_norm=gate_norm)
    state = states(batch, v_heads, dim)
    out, final = ops.gdn.fused_recurrent_gated_delta_rule(
        **given, scale=scale, initial_state=state, output_final_state=True
    )
    expected, expected_state = reference(given, state, scale)
    assert ratio(out, expected) < 0.002
    assert ratio(final, expected_state) < 0.002


# (B, T, H, HV, D, scale, gate_norm, share of decays that are 0, raw keys)
FLA_CHUNK = [
    (2, 1000, 3, 3, 64, 0.1, 1.0, 0.5, False),
    (4, 1024, 4, 4, 128, 0.1, 1.0, 0.0, True),
    (4, 1024, 4, 4, 128, 0.1, 1.0, 1.0, False),
    (2, 1500, 4, 4, 128, 0.1, 10.0, 0.0, False),
    (4, 2048, 8, 8, 64, 0.1, 1.0, 0.0, False),
    (2, 256, 2, 4, 64, 1.0, 1.0, 0.0, False),
    (2, 512, 2, 8, 64, 1.0, 0.1, 0.0, True),
    (2, 1024, 4, 8, 128, 1.0, 0.1, 0.0, False),
    (2, 75, 4, 4, 64, 1.0, 0.01, 0.0, False),
]


@pytest.mark.parametrize("case", FLA_CHUNK, ids=lambda c: "x".join(map(str, c)))
def test_fla_chunked(case) -> None:
    *sizes, scale, gate_norm, share_kept, is_raw = case
    given = made(
        *(*sizes, torch.float16), gate_norm=gate_norm, share_kept=share_kept, is_raw=is_raw
    )
    state = states(sizes[0], sizes[3], sizes[4])
    out, final = ops.gdn.chunk_gated_delta_rule(
        **given,
        scale=scale,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=is_raw,
    )
    expected, expected_state = reference(given, state, scale, is_raw=is_raw)
    assert ratio(out, expected) < 0.005
    assert ratio(final, expected_state) < 0.005


@pytest.mark.parametrize(
    ("heads", "v_heads", "share_kept"), [(4, 4, 0.0), (4, 4, 0.5), (2, 4, 0.0), (2, 8, 0.0)]
)
def test_fla_packed(heads, v_heads, share_kept) -> None:
    bounds = [0, 256, 500, 1000]
    given = made(1, 1000, heads, v_heads, 64, torch.float16, share_kept=share_kept)
    state = states(3, v_heads, 64)
    out, final = ops.gdn.chunk_gated_delta_rule(
        **given,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=torch.tensor(bounds, device=DEVICE),
    )
    expected, expected_state = packed_reference(given, state, 64**-0.5, bounds)
    assert ratio(out, expected) < 0.005
    assert ratio(final, expected_state) < 0.005


# (H, HV, bounds or number of tokens)
FLASH_QLA = {
    "4096 4/4": (4, 4, [0, 4096]),
    "4096 2/8": (2, 8, [0, 4096]),
    "4096 4/16": (4, 16, [0, 4096]),
    "six sequences 16/32": (16, 32, [0, 410, 841, 1135, 2126, 2512, 4096]),
    "rows behind the last 16/64": (16, 64, [0, 211, 985]),
    "short tail": (4, 4, [0, 47, 128]),
    "rows of none": (4, 4, [0, 73, 115, 209]),
    "five of one pack": (4, 4, [0, 517, 883, 1010, 3767, 4096]),
}
BEHIND = {"rows behind the last 16/64": 15, "rows of none": 47}


V_FIRST = ("rows behind the last 16/64", "five of one pack")
FLASH_QLA_CASES = [*((name, False) for name in FLASH_QLA), *((name, True) for name in V_FIRST)]


@pytest.mark.parametrize(("name", "state_v_first"), FLASH_QLA_CASES)
def test_flash_qla(name, state_v_first) -> None:
    heads, v_heads, bounds = FLASH_QLA[name]
    tokens = bounds[-1] + BEHIND.get(name, 0)
    given = made(1, tokens, heads, v_heads, 128, torch.bfloat16)
    # One head never forgets, one forgets at once.
    rate = torch.linspace(0, 16, v_heads, device=DEVICE)
    noise = torch.randn_like(given["g"])
    given["g"] = -rate * torch.nn.functional.softplus(0.5 * noise + 1)
    state = states(len(bounds) - 1, v_heads, 128)
    out, final = ops.gdn.chunk_gated_delta_rule(
        **given,
        initial_state=state.transpose(-1, -2).contiguous() if state_v_first else state,
        output_final_state=True,
        state_v_first=state_v_first,
        cu_seqlens=torch.tensor(bounds, device=DEVICE, dtype=torch.int32),
    )
    expected, expected_state = packed_reference(given, state, 128**-0.5, bounds)
    assert ratio(out[:, : bounds[-1]], expected) <= 0.02
    assert not out[:, bounds[-1] :].any()
    assert ratio(final.transpose(-1, -2) if state_v_first else final, expected_state) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("v_heads", [4, 8, 16])
def test_flash_qla_long(v_heads) -> None:
    given = made(1, 32768, 4, v_heads, 128, torch.bfloat16)
    state = states(1, v_heads, 128)
    out, final = ops.gdn.chunk_gated_delta_rule(
        **given, initial_state=state, output_final_state=True
    )
    expected, expected_state = reference(given, state, 128**-0.5)
    assert ratio(out, expected) <= 0.02
    assert ratio(final, expected_state) <= 0.02


FLASHINFER_LENGTHS = {
    "64": [64],
    "128": [128],
    "256": [256],
    "two": [256, 256],
    "three": [64, 128, 512],
    "unaligned": [64, 111, 192],
    "one short": [255],
    "empty first": [0, 128, 128],
}
FLASHINFER_BOUNDS = {
    torch.float16: ({"atol": 2e-3, "rtol": 1e-3}, {"atol": 1e-3, "rtol": 1e-4}),
    torch.bfloat16: ({"atol": 1e-2, "rtol": 1e-2}, {"atol": 5e-3, "rtol": 1e-3}),
}
"""Of the output and of the final state."""


@pytest.mark.parametrize("dtype", FLASHINFER_BOUNDS, ids=str)
@pytest.mark.parametrize("lengths", FLASHINFER_LENGTHS.values(), ids=FLASHINFER_LENGTHS)
def test_flashinfer_prefill(lengths, dtype) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    given = made(1, int(bounds[-1]), 4, 8, 128, dtype)
    out, final = ops.gdn.chunk_gated_delta_rule(
        **given, output_final_state=True, cu_seqlens=bounds.to(DEVICE)
    )
    zeros = torch.zeros(len(lengths), 8, 128, 128, device=DEVICE)
    expected, expected_state = packed_reference(given, zeros, 128**-0.5, bounds.tolist())
    of_output, of_state = FLASHINFER_BOUNDS[dtype]
    torch.testing.assert_close(out.double(), expected, **of_output)
    torch.testing.assert_close(final.double(), expected_state, **of_state)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", [1, 16, 32, 127, 512])
def test_flashinfer_decode(batch, steps, state_dtype) -> None:
    """FlashInfer's own bounds: output 0.016 and state 5e-3 (fp32), 1e-2 both (bf16 states)."""
    given = made(batch, steps, 16, 32, 128, torch.bfloat16, is_raw=True)
    pool = states(batch + 3, 32, 128).to(state_dtype)
    slots = torch.randperm(batch + 3, generator=torch.Generator().manual_seed(1))[:batch]
    before = pool.clone()
    out = ops.gdn.gdn_decode(
        **given, state=pool, slots=slots.to(DEVICE, torch.int32), state_layout="VK"
    )
    some = torch.arange(0, batch, max(1, batch // 16))
    rows = slots[some].to(DEVICE)
    picked = {name: x[some.to(DEVICE)] for name, x in given.items()}
    expected, expected_state = reference(
        picked, before[rows].transpose(-1, -2), 128**-0.5, is_raw=True
    )
    of_output, of_state = (0.016, 5e-3) if state_dtype == torch.float32 else (1e-2, 1e-2)
    found = out[some.to(DEVICE)].double()
    torch.testing.assert_close(found, expected, atol=of_output, rtol=of_output)
    final = pool[rows].transpose(-1, -2).double()
    torch.testing.assert_close(final, expected_state, atol=of_state, rtol=of_state)
    others = torch.ones(batch + 3, dtype=torch.bool)
    others[slots] = False
    assert torch.equal(pool[others.to(DEVICE)], before[others.to(DEVICE)])


def test_a_recurrent_graph_takes_other_bounds() -> None:
    given = made(1, 24, 4, 8, 128, torch.bfloat16)
    state = states(4, 8, 128)
    bounds = torch.tensor([0, 6, 12, 18, 24], device=DEVICE)

    def call():
        return ops.gdn.fused_recurrent_gated_delta_rule(
            **given, initial_state=state, output_final_state=True, cu_seqlens=bounds
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, final = call()
    for other in ([0, 6, 12, 18, 24], [0, 0, 1, 24, 24], [0, 20, 21, 22, 24]):
        bounds.copy_(torch.tensor(other))
        out.fill_(float("nan"))
        final.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected, expected_state = packed_reference(given, state, 128**-0.5, other)
        assert ratio(out, expected) < 4e-3
        assert ratio(final, expected_state) < 1e-5
