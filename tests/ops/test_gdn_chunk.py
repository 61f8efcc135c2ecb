"""chunk_gated_delta_rule: FLA's signature against the recurrence, packing, refusals, launchers."""

from __future__ import annotations

import os

import pytest
import torch
from gdn_calls import DEVICES, close, recurrence, tensors
from tilescout import ops
from tilescout.errors import UnsupportedError, UsageError
from tilescout.ops import gdn_chunk

chunk = ops.gdn.chunk_gated_delta_rule


@pytest.fixture(autouse=True)
def _shim():
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter_shim

        interpreter_shim.install()


@pytest.mark.parametrize("device", DEVICES)
class TestChunked:
    def test_dense_batch_with_states(self, device) -> None:
        given = tensors(device, batch=2, steps=37)
        state = torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(1)).to(device)
        before = {name: tensor.clone() for name, tensor in {**given, "state": state}.items()}
        out, final = chunk(**given, initial_state=state, output_final_state=True)
        expected, expected_state = recurrence(**given, state=state, scale=64**-0.5)
        close(out, expected, 2e-4)
        close(final, expected_state, 2e-4)
        assert final.dtype == torch.float32
        assert all(torch.equal(before[name], x) for name, x in {**given, "state": state}.items())

    def test_gate_sigmoid_norm_and_layout_in_the_kernel(self, device) -> None:
        given = tensors(device, batch=1, steps=20, v=128)
        generator = torch.Generator().manual_seed(2)
        a_log, dt_bias = (torch.rand(4, generator=generator).to(device) for _ in range(2))
        raw = {name: given[name].clone() for name in ("g", "beta")}
        given["q"], given["k"] = given["q"] * 3, given["k"] * 5
        state = torch.randn(1, 4, 128, 64, generator=generator).to(device)
        out, final = chunk(
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
        close(out, expected, 3e-4)
        close(final, expected_state.transpose(-1, -2), 3e-4)

    @pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
    def test_packed_sequences_and_rows_behind_them(self, device, index_dtype) -> None:
        given = tensors(device, batch=1, steps=50)
        bounds = torch.tensor([0, 33, 33, 34, 45], dtype=index_dtype, device=device)
        out, final = chunk(
            **given,
            cu_seqlens=bounds,
            cu_seqlens_cpu=bounds.cpu(),
            output_final_state=True,
        )
        zeros = torch.zeros(1, 4, 64, 64, device=device)
        for i, (first, end) in enumerate([(0, 33), (33, 33), (33, 34), (34, 45)]):
            part = {name: tensor[:, first:end] for name, tensor in given.items()}
            expected, state = recurrence(**part, state=zeros, scale=64**-0.5)
            close(out[:, first:end], expected, 2e-4)
            close(final[i], state[0], 2e-4)
        assert not out[:, 45:].any()

    def test_no_final_state_is_wanted(self, device) -> None:
        given = tensors(device, batch=1, steps=5)
        out, final = chunk(**given)
        assert final is None
        zeros = torch.zeros(1, 4, 64, 64, device=device)
        close(out, recurrence(**given, state=zeros, scale=64**-0.5)[0], 2e-4)

    def test_no_tokens_give_the_initial_state(self, device) -> None:
        given = tensors(device, steps=0)
        state = torch.randn(2, 4, 64, 64).to(device)
        out, final = chunk(**given, initial_state=state, output_final_state=True)
        assert out.shape == (2, 0, 4, 64)
        assert torch.equal(final, state)
        _, zeros = chunk(**given, output_final_state=True)
        assert zeros.shape == state.shape
        assert not zeros.any()

    def test_no_sequences_leave_zeros(self, device) -> None:
        given = tensors(device, batch=1, steps=3)
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        out, final = chunk(**given, cu_seqlens=nothing, output_final_state=True)
        assert not out.any()
        assert final.shape == (0, 4, 64, 64)

    def test_more_sequences_than_tokens(self, device) -> None:
        given = tensors(device, batch=1, steps=2, heads=1, v_heads=1)
        for num_empty in (3, 300):
            bounds = torch.tensor([0] * num_empty + [1, 2], device=device)
            out, final = chunk(**given, cu_seqlens=bounds, output_final_state=True)
            zeros = torch.zeros(1, 1, 64, 64, device=device)
            last = {name: tensor[:, 1:] for name, tensor in given.items()}
            expected, state = recurrence(**last, state=zeros, scale=64**-0.5)
            close(out[:, 1:], expected, 2e-4)
            close(final[-1], state[0], 2e-4)
            assert not final[: num_empty - 1].any()

    def test_strided_q_is_read_in_place(self, device) -> None:
        given = tensors(device, batch=1, steps=18, heads=4)
        joined = torch.cat([given["q"], given["k"]], dim=2)
        q, k = joined[:, :, :4], joined[:, :, 4:]
        assert not q.is_contiguous()
        out, _ = chunk(**{**given, "q": q, "k": k})
        assert torch.equal(out, chunk(**given)[0])

    def test_states_at_odd_addresses_are_served(self, device) -> None:
        given = tensors(device, batch=1, steps=3)
        buffer = torch.randn(1 + 4 * 64 * 64, generator=torch.Generator().manual_seed(3))
        state = buffer.to(device)[1:].view(1, 4, 64, 64)
        assert state.data_ptr() % 16
        out, _ = chunk(**given, initial_state=state)
        close(out, recurrence(**given, state=state, scale=64**-0.5)[0], 2e-4)

    def test_calls_of_similar_length_share_a_launcher(self, device) -> None:
        for steps in (200, 190, 201, 256):
            given = tensors(device, batch=1, steps=steps, heads=1, v_heads=1)
            out, _ = chunk(**given)
            zeros = torch.zeros(1, 1, 64, 64, device=device)
            close(out, recurrence(**given, state=zeros, scale=64**-0.5)[0], 2e-4)
            if steps == 200:
                built = len(gdn_chunk._launchers)
        assert len(gdn_chunk._launchers) == built


def refused(match: str, *, error=UsageError, **changes):
    with pytest.raises(error, match=match):
        chunk(**{**tensors(), **changes})


def test_what_is_wrong_is_named() -> None:
    x = tensors()
    for name in ("chunk_indices", "cp_context", "head_first", "chunk_size"):
        refused(f"does not support {name}", error=UnsupportedError, **{name: 64})
    refused(
        "does not support transpose_state_layout",
        error=UnsupportedError,
        transpose_state_layout=True,
    )
    refused("shape of k", k=x["k"][:, :2])
    refused("HV a multiple of H=2", v=x["v"][:, :, :3])
    refused("dtype of v .* that of q", v=x["v"].half())
    refused("dtype of q .* bf16, fp16 or fp32", q=x["q"].double(), k=x["k"].double())
    refused(r"shape of beta .* \[2, 3, 4\]", beta=x["beta"][..., :2])
    refused(r"shape of initial_state .* \[2, 4, 64, 64\]", initial_state=torch.zeros(1, 4, 64, 64))
    refused("needs use_beta_sigmoid_in_kernel", allow_neg_eigval=True)
    refused("needs A_log", use_gate_in_kernel=True)
    refused("need use_gate_in_kernel=True", A_log=torch.zeros(4))
    refused("type of k .*'NoneType': must be torch.Tensor", k=None)
    refused("type of initial_state .*'int'", initial_state=1)
    refused("scale of .* is '1': must be a number", scale="1")
    refused("allow_neg_eigval of .* is 'no': must be True or False", allow_neg_eigval="no")
    refused("1 where cu_seqlens is given", cu_seqlens=torch.tensor([0, 3]))
    refused("needs cu_seqlens", cu_seqlens_cpu=torch.tensor([0, 3]))
    refused("requires grad", q=x["q"].requires_grad_())
    one = tensors(batch=1)
    bounds = torch.tensor([0, 3])
    refused("dtype of cu_seqlens", **one, cu_seqlens=bounds.float())
    refused("shape of cu_seqlens_cpu", **one, cu_seqlens=bounds, cu_seqlens_cpu=bounds[:1])
    refused("T=3 at most", **one, cu_seqlens=bounds, cu_seqlens_cpu=torch.tensor([0, 9]))


def test_a_head_dimension_that_no_template_has_is_refused() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a device or the interpreter")
    refused("head_dim_k=80 is not one of", error=UnsupportedError, **tensors(k=80))


def test_the_cpu_is_refused_without_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on")
    refused("runs on an NVIDIA GPU")
