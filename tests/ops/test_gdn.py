"""The public functions: FLA's signature against the recurrence, states in place, refusals."""

from __future__ import annotations

import os

import pytest
import torch
from gdn_calls import DEVICES, close, recurrence, tensors
from tilescout import ops
from tilescout.errors import UnsupportedError, UsageError


@pytest.fixture(autouse=True)
def _shim():
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter_shim

        interpreter_shim.install()


@pytest.mark.parametrize("device", DEVICES)
class TestFusedRecurrent:
    def test_output_and_final_state(self, device) -> None:
        given = tensors(device)
        state = torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(1)).to(device)
        before = {name: tensor.clone() for name, tensor in {**given, "state": state}.items()}
        out, final = ops.gdn.fused_recurrent_gated_delta_rule(
            **given, initial_state=state, output_final_state=True
        )
        expected, expected_state = recurrence(**given, state=state, scale=64**-0.5)
        close(out, expected)
        close(final, expected_state)
        assert all(torch.equal(before[name], x) for name, x in {**given, "state": state}.items())

    def test_defaults_are_no_state_no_decay_and_full_strength(self, device) -> None:
        given = tensors(device)
        out, final = ops.gdn.fused_recurrent_gated_delta_rule(given["q"], given["k"], given["v"])
        assert final is None
        zeros = torch.zeros(2, 4, 64, 64, device=device)
        neutral = {**given, "g": given["g"] * 0, "beta": given["beta"] * 0 + 1}
        close(out, recurrence(**neutral, state=zeros, scale=64**-0.5)[0])

    def test_gate_sigmoid_norm_and_layout_in_the_kernel(self, device) -> None:
        given = tensors(device, v=128)
        generator = torch.Generator().manual_seed(2)
        a_log, dt_bias = (torch.rand(4, generator=generator).to(device) for _ in range(2))
        raw = {name: given[name].clone() for name in ("g", "beta")}
        given["q"], given["k"] = given["q"] * 3, given["k"] * 5
        state = torch.randn(2, 4, 128, 64, generator=generator).to(device)
        out, final = ops.gdn.fused_recurrent_gated_delta_rule(
            **given,
            scale=0.5,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=a_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True,
            state_v_first=True,
        )
        given["q"], given["k"] = (
            torch.nn.functional.normalize(given[n], dim=-1) for n in ("q", "k")
        )
        given["g"] = -a_log.exp() * torch.nn.functional.softplus(raw["g"] + dt_bias)
        given["beta"] = 2 * raw["beta"].sigmoid()
        expected, expected_state = recurrence(**given, state=state.transpose(-1, -2), scale=0.5)
        close(out, expected, 1e-4)
        close(final, expected_state.transpose(-1, -2), 1e-4)

    def test_packed_sequences(self, device) -> None:
        given = tensors(device, batch=1, steps=5)
        bounds = torch.tensor([0, 2, 2, 5], device=device)
        out, final = ops.gdn.fused_recurrent_gated_delta_rule(
            **given, cu_seqlens=bounds, output_final_state=True
        )
        zeros = torch.zeros(1, 4, 64, 64, device=device)
        for i, (first, end) in enumerate([(0, 2), (2, 2), (2, 5)]):
            part = {name: tensor[:, first:end] for name, tensor in given.items()}
            expected, state = recurrence(**part, state=zeros, scale=64**-0.5)
            close(out[:, first:end], expected)
            close(final[i], state[0])

    def test_no_tokens_give_the_initial_state(self, device) -> None:
        given = tensors(device, steps=0)
        state = torch.randn(2, 4, 64, 64).to(device)
        out, final = ops.gdn.fused_recurrent_gated_delta_rule(
            **given, initial_state=state, output_final_state=True
        )
        assert out.shape == (2, 0, 4, 64)
        assert torch.equal(final, state)


@pytest.mark.parametrize("device", DEVICES)
def test_decode_updates_the_pool_in_place_and_skips_negative_slots(device) -> None:
    given = tensors(device, batch=3, steps=1)
    pool = torch.randn(5, 4, 64, 64, generator=torch.Generator().manual_seed(3)).to(device)
    before = pool.clone()
    slots = torch.tensor([4, -1, 0], device=device)
    out = torch.empty_like(given["v"])
    result = ops.gdn.gdn_decode(**given, state=pool, slots=slots, use_qk_l2norm=False, out=out)
    assert result is out
    live = torch.tensor([0, 2], device=device)
    part = {name: tensor[live] for name, tensor in given.items()}
    expected, states = recurrence(**part, state=before[slots[live]], scale=64**-0.5)
    close(out[live], expected)
    close(pool[slots[live]], states)
    assert not out[1].any()
    assert torch.equal(pool[1:4], before[1:4])


def refused(match: str, *, error=UsageError, function="fused", **changes):
    given = {**tensors(), **changes}
    call = ops.gdn.gdn_decode if function == "decode" else None
    call = call or ops.gdn.fused_recurrent_gated_delta_rule
    with pytest.raises(error, match=match):
        call(**given)


def test_what_is_wrong_is_named() -> None:
    x = tensors()
    refused("does not support gk", error=UnsupportedError, gk=x["g"])
    refused("does not support head_first", error=UnsupportedError, head_first=True)
    refused(r"shape of k .* must be \(2, 3, 2, 64\)|shape of k", k=x["k"][:, :2])
    refused("HV a multiple of H=2", v=x["v"][:, :, :3])
    refused("dtype of v .* that of q", v=x["v"].half())
    refused("dtype of q .* bf16, fp16 or fp32", q=x["q"].double(), k=x["k"].double())
    refused(r"shape of g .* \[2, 3, 4\]", g=x["g"][..., :2])
    refused(r"shape of initial_state .* \[2, 4, 64, 64\]", initial_state=torch.zeros(1, 4, 64, 64))
    refused("needs use_beta_sigmoid_in_kernel", allow_neg_eigval=True)
    refused("needs A_log", use_gate_in_kernel=True)
    refused("1 where cu_seqlens is given", cu_seqlens=torch.tensor([0, 3]))
    refused("requires grad", q=x["q"].requires_grad_())
    refused("stride of q", q=x["q"].detach().transpose(0, 1).contiguous().transpose(0, 1))
    refused("type of q .*'NoneType': must be torch.Tensor", q=None)
    refused("type of v .*'list'", v=[1.0])
    refused("type of g .*'float'", g=1.0)
    refused("type of initial_state .*'int'", initial_state=1)
    refused("type of cu_seqlens .*'list'", cu_seqlens=[0, 3])
    refused("scale of .* is a tensor: must be a number", scale=torch.ones(1))
    refused("scale=inf of .* must be finite", scale=10**400)
    refused("state_v_first of .* is 'yes': must be True or False", state_v_first="yes")
    flag = torch.ones(2, dtype=torch.bool)
    refused("output_final_state of .* is a tensor: must be True or False", output_final_state=flag)
    pool = torch.zeros(2, 4, 64, 64)
    refused("type of state .*'float'", function="decode", state=1.0)
    refused("shape of state", function="decode", state=torch.tensor(1.0), slots=flag)
    refused("use_qk_l2norm of gdn_decode is 1", function="decode", state=pool, use_qk_l2norm=1)
    refused("dt_bias of gdn_decode .* give A_log", function="decode", state=pool, dt_bias=flag)
    refused("state_layout='HV'", function="decode", state=pool, state_layout="HV")
    refused("dtype of state", function="decode", state=pool.half())
    refused("shape of slots", function="decode", state=pool, slots=torch.tensor([0]))
    refused("dtype of slots", function="decode", state=pool, slots=torch.tensor([0.0, 1.0]))


def test_the_cpu_is_refused_without_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on")
    refused("runs on an NVIDIA GPU")
