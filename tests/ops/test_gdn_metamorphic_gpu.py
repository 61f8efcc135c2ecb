"""What must hold of both public functions of the gated delta net on a GPU without a reference."""

from __future__ import annotations

import pytest
import torch
from tilescout import ops

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOKENS, HEADS, V_HEADS, DIM = 200, 2, 4, 64
FUNCTIONS = {
    "chunked": (ops.gdn.chunk_gated_delta_rule, torch.bfloat16, 1e-2),
    "recurrent": (ops.gdn.fused_recurrent_gated_delta_rule, torch.float32, 5e-5),
}
"""Function, dtype of the tokens, and by what two orders of the same sums may differ.

In fp32 it is 200 decays that are rounded one after the other."""


class Calls:
    """One of the functions, with tokens, states and a comparison for it."""

    def __init__(self, name: str) -> None:
        self.function, self.dtype, self.bound = FUNCTIONS[name]
        generator = torch.Generator(DEVICE).manual_seed(3)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=DEVICE)

        q, k = (
            torch.nn.functional.normalize(normal(1, TOKENS, HEADS, DIM), dim=-1) for _ in range(2)
        )
        self.tokens = {
            "q": q.to(self.dtype),
            "k": k.to(self.dtype),
            "v": normal(1, TOKENS, V_HEADS, DIM).to(self.dtype),
            "g": torch.nn.functional.logsigmoid(normal(1, TOKENS, V_HEADS)) / 4,
            "beta": normal(1, TOKENS, V_HEADS).sigmoid(),
        }
        self.state = normal(1, V_HEADS, DIM, DIM)

    def part(self, first: int, end: int) -> dict[str, torch.Tensor]:
        return {name: x[:, first:end].contiguous() for name, x in self.tokens.items()}

    def run(self, tokens=None, state=None, **options):
        return self.function(
            **(tokens or self.tokens),
            initial_state=self.state if state is None else state,
            output_final_state=True,
            **options,
        )

    def same(self, found, expected) -> None:
        for value, exact in zip(found, expected, strict=True):
            assert bool(torch.isfinite(value).all())
            difference = (value.double() - exact.double()).square().mean().sqrt()
            assert difference <= self.bound * exact.double().square().mean().sqrt()


@pytest.fixture(params=FUNCTIONS)
def calls(request) -> Calls:
    return Calls(request.param)


@pytest.mark.parametrize("cut", [1, 64, 77, 199])
def test_two_parts_that_hand_the_state_on(calls, cut) -> None:
    out, final = calls.run()
    first, between = calls.run(calls.part(0, cut))
    second, last = calls.run(calls.part(cut, TOKENS), between)
    calls.same((torch.cat([first, second], dim=1), last), (out, final))


def test_layouts_of_the_state_are_transposes(calls) -> None:
    out, final = calls.run()
    turned = calls.run(state=calls.state.transpose(-1, -2).contiguous(), state_v_first=True)
    calls.same((turned[0], turned[1].transpose(-1, -2)), (out, final))


def test_packed_sequences_are_runs_of_their_own(calls) -> None:
    bounds = [0, 30, 30, 31, 159, 200]
    state = (
        calls.state.expand(5, -1, -1, -1) * torch.arange(1, 6, device=DEVICE)[:, None, None, None]
    )
    out, final = calls.run(state=state, cu_seqlens=torch.tensor(bounds, device=DEVICE))
    assert torch.equal(final[1], state[1]), "of no token: the state it had"
    for i in (0, 2, 3, 4):
        alone = calls.run(calls.part(bounds[i], bounds[i + 1]), state[i : i + 1])
        calls.same((out[:, bounds[i] : bounds[i + 1]], final[i : i + 1]), alone)


def test_value_heads_repeat_heads_of_q_and_k(calls) -> None:
    expanded = {n: calls.tokens[n].repeat_interleave(V_HEADS // HEADS, dim=2) for n in ("q", "k")}
    calls.same(calls.run({**calls.tokens, **expanded}), calls.run())


def test_without_strength_the_state_decays_and_nothing_else(calls) -> None:
    weak = {**calls.tokens, "beta": torch.zeros_like(calls.tokens["beta"])}
    weak["g"] = weak["g"] / 50
    _, final = calls.run(weak)
    decay = weak["g"].double().sum(1).exp()[..., None, None]
    calls.same((final,), (decay * calls.state,))


def test_a_reset_forgets_all_that_was_before(calls) -> None:
    at = 100
    tokens = {**calls.tokens, "g": calls.tokens["g"].clone()}
    tokens["g"][:, at] = -1e4
    out, final = calls.run(tokens)
    alone = calls.run(
        {name: x[:, at:].contiguous() for name, x in tokens.items()}, torch.zeros_like(calls.state)
    )
    calls.same((out[:, at:], final), alone)


def test_both_functions_agree() -> None:
    calls = Calls("chunked")
    exact = ops.gdn.fused_recurrent_gated_delta_rule(
        **calls.tokens, initial_state=calls.state, output_final_state=True
    )
    calls.same(calls.run(), exact)
