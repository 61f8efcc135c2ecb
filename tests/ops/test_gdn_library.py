"""``torch.compile(fullgraph=True)`` traces through the gated delta net; its operators check out."""

from __future__ import annotations

import os

import pytest
import torch
from gdn_calls import DEVICES, close, recurrence, tensors
from tilescout import ops
from tilescout.errors import UsageError
from torch._subclasses.fake_tensor import FakeTensorMode

BACKENDS = ["eager", "aot_eager"]
FUNCTIONS = [ops.gdn.fused_recurrent_gated_delta_rule, ops.gdn.chunk_gated_delta_rule]


@pytest.fixture(autouse=True)
def _shim():
    torch._dynamo.reset()
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter_shim

        interpreter_shim.install()


def compiled(function, backend: str):
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("device", DEVICES)
class TestTraces:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_recurrence_with_its_final_state(self, device, backend: str) -> None:
        given = tensors(device)
        state = torch.randn(2, 4, 64, 64, device=device)

        def block(state, **given):
            out, final = ops.gdn.fused_recurrent_gated_delta_rule(
                **given, initial_state=state, output_final_state=True
            )
            return out * 1.0, final

        out, final = compiled(block, backend)(state, **given)
        expected, expected_state = recurrence(**given, state=state, scale=64**-0.5)
        close(out, expected)
        close(final, expected_state)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_step_updates_the_pool_that_the_graph_was_given(self, device, backend: str) -> None:
        given = tensors(device, steps=1)
        state = torch.randn(2, 4, 64, 64, device=device)
        before = state.clone()

        def block(state, q, k, v, g, beta):
            out = ops.gdn.gdn_decode(q, k, v, g, beta, state, use_qk_l2norm=False)
            return out * 1.0, state.sum()

        out, total = compiled(block, backend)(state, **given)
        expected, expected_state = recurrence(**given, state=before, scale=64**-0.5)
        close(out, expected)
        close(state, expected_state)
        torch.testing.assert_close(total, state.sum())

    def test_opcheck_finds_nothing(self, device) -> None:
        given = tensors(device, steps=1)
        state = torch.randn(2, 4, 64, 64, device=device)
        names = ("q", "k", "v", "g", "beta")
        torch.library.opcheck(
            torch.ops.tilescout.gdn_decode.default,
            (*(given[name] for name in names), state),
            test_utils=("test_schema", "test_faketensor"),
        )
        torch.library.opcheck(
            torch.ops.tilescout.fused_recurrent_gated_delta_rule.default,
            tuple(given[name] for name in names[:3]),
            {"g": given["g"], "beta": given["beta"], "output_final_state": True},
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_fake_tensors_give_the_shapes(function) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
        v = torch.empty(1, 8, 4, 128, dtype=torch.bfloat16, device="cuda")
        gates = torch.empty(1, 8, 4, device="cuda")
        bounds = torch.empty(4, dtype=torch.int32, device="cuda")
        options = {"cu_seqlens": bounds, "output_final_state": True, "state_v_first": True}
        out, final = function(q, q, v, g=gates, beta=gates, **options)
        assert (out.shape, out.dtype) == (v.shape, torch.bfloat16)
        assert (final.shape, final.dtype) == ((3, 4, 128, 64), torch.float32)
        assert function(q, q, v, g=gates, beta=gates)[1] is None


def test_what_requires_grad_is_refused_in_a_trace_too() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 64, requires_grad=True)
        v, gates = torch.empty(1, 8, 2, 64), torch.empty(1, 8, 2)
        with pytest.raises(UsageError, match="requires grad"):
            ops.gdn.fused_recurrent_gated_delta_rule(q, q.detach(), v, g=gates, beta=gates)
