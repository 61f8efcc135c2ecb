"""Libraries behind the public functions: which calls they serve, and those autograd records."""

from __future__ import annotations

import os

import fake_libraries
import pytest
import torch
from caller_memory import CallersPool
from gdn_calls import close, interpreted, recurrence, tensors
from tilescout import ops, use_external
from tilescout.errors import UnsupportedError, UsageError
from tilescout.kernels import external
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem, external_bounds
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.ops import gdn_external
from tilescout.tuner import dispatch
from tilescout.tuner.catalog import gpu, gpu_names
from winner_databases import MadeUpWinner, write_winners

pytestmark = interpreted
CHUNK = GdnChunkProblem(2, 40, 20, 2, 4, 64, 64, "float32")
DECODE = GdnDecodeProblem(2, 3, 2, 4, 64, 64, "float32", gate="given", use_qk_l2norm=False)
ZEROS = torch.zeros(2, 4, 64, 64)


@pytest.fixture(autouse=True)
def _shim() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter_shim

        interpreter_shim.install()


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What libraries were called for; FLA is the winner of both operations."""
    called = fake_libraries.install(monkeypatch)
    sku = gpu(gpu_names()[0])
    winners = [MadeUpWinner(problem, sku, Config.of("fla", {})) for problem in (CHUNK, DECODE)]
    path = tmp_path / "fla.db"
    write_winners(path, winners)
    monkeypatch.setenv("TILESCOUT_DB", str(path))
    dispatch.refresh()
    yield called
    external.set_external_policy(None)
    dispatch.refresh()


def check(given, out, final) -> None:
    expected, state = recurrence(**given, state=ZEROS, scale=64**-0.5)
    close(out, expected, 2e-4)
    close(final, state, 2e-4)


def test_a_dense_call_is_served_by_the_library_that_won(calls) -> None:
    given = tensors(steps=20)
    check(given, *ops.gdn.chunk_gated_delta_rule(**given, output_final_state=True))
    assert calls == ["fla_chunk_fwd"]
    check(given, *ops.gdn.chunk_gated_delta_rule(**given, output_final_state=True))
    assert len(calls) == 2, "what a library serves is not prepared without it"


def test_bounds_that_later_calls_share_are_in_no_pool_of_the_caller(calls) -> None:
    for kept in (external_bounds.on_device, external_bounds.chunk_numbers):
        kept.cache_clear()
    given = tensors(steps=20)
    with CallersPool() as pool:
        found = [ops.gdn.chunk_gated_delta_rule(**given) for _ in range(2)]
    assert calls == ["fla_chunk_fwd"] * 2
    assert pool.num_allocations
    assert pool.num_untracked((found, given)) == 0
    assert external_bounds.on_device.cache_info().currsize


def test_bounds_that_a_graph_reads_are_kept_for_good(calls, monkeypatch) -> None:
    given = tensors(steps=20)
    ops.gdn.chunk_gated_delta_rule(**given)
    bounds = external_bounds.on_device((0, 20, 40), torch.int64, torch.device("cpu"))
    assert id(bounds) not in gdn_external._read_by_graphs
    monkeypatch.setattr(gdn_external, "_read_by_graphs", {})
    monkeypatch.setattr(gdn_external, "_is_capturing", lambda device: True)
    ops.gdn.chunk_gated_delta_rule(**given)
    assert gdn_external._read_by_graphs[id(bounds)] is bounds
    assert len(calls) == 2


def test_packed_sequences_need_bounds_on_the_host(calls) -> None:
    dense = tensors(steps=20)
    packed = {name: x.flatten(0, 1)[None] for name, x in dense.items()}
    bounds = torch.tensor([0, 20, 40], dtype=torch.int32)

    def call(**more):
        out, final = ops.gdn.chunk_gated_delta_rule(
            **packed, cu_seqlens=bounds, output_final_state=True, **more
        )
        check(dense, out.unflatten(1, (2, 20))[0], final)

    call()
    assert not calls, "reading bounds on the device would wait for it"
    call(cu_seqlens_cpu=bounds)
    assert calls == ["fla_chunk_fwd"]


def test_decode_is_served_by_the_library_that_won(calls) -> None:
    given = tensors()
    check(given, *ops.gdn.fused_recurrent_gated_delta_rule(**given, output_final_state=True))
    assert calls == ["fla_recurrent_fwd"]


def test_what_the_winner_does_not_take_is_ours(calls, monkeypatch) -> None:
    found = external.ExternalTemplate.supports
    monkeypatch.setattr(
        external.ExternalTemplate,
        "supports",
        lambda self, problem, device: (
            "no raw gates" if problem.gate == "fused" else found(self, problem, device)
        ),
    )
    given = tensors(steps=20)
    log = torch.zeros(4)
    out, _ = ops.gdn.chunk_gated_delta_rule(**given, use_gate_in_kernel=True, A_log=log)
    assert not calls
    g = -torch.nn.functional.softplus(given["g"])
    close(out, recurrence(**{**given, "g": g}, state=ZEROS, scale=64**-0.5)[0], 2e-4)


def test_never_means_ours(calls) -> None:
    given = tensors(steps=20)
    use_external("never")
    check(given, *ops.gdn.chunk_gated_delta_rule(**given, output_final_state=True))
    assert not calls
    use_external(None)
    ops.gdn.chunk_gated_delta_rule(**given)
    assert calls == ["fla_chunk_fwd"]


def test_what_autograd_records_needs_leave_and_then_has_gradients(calls) -> None:
    given = tensors(steps=20)
    given["v"].requires_grad_()
    with pytest.raises(UsageError, match=r"requires grad.*use_external\('always'\)"):
        ops.gdn.chunk_gated_delta_rule(**given)
    use_external("always")
    state = torch.randn(2, 4, 64, 64, requires_grad=True)
    out, final = ops.gdn.chunk_gated_delta_rule(
        **given, scale=0.5, initial_state=state, output_final_state=True
    )
    assert calls == ["fla_chunk"], "FlashQLA, which is first, takes no fp32"
    (out.sum() + final.sum()).backward()
    # the stand-in computes out = scale v + ..., final = 2 state + ...
    assert torch.equal(given["v"].grad, torch.full_like(given["v"], 0.5))
    assert torch.equal(state.grad, torch.full_like(state, 2.0))
    with torch.no_grad():
        ops.gdn.chunk_gated_delta_rule(**given)
    assert calls[-1] == "fla_chunk_fwd"


def test_gradients_pass_empty_sequences_and_rows_of_none(calls) -> None:
    use_external("always")
    given = tensors(batch=1, steps=9)
    given["v"].requires_grad_()
    state = torch.randn(3, 4, 64, 64, requires_grad=True)
    bounds = torch.tensor([0, 4, 4, 7])
    out, final = ops.gdn.chunk_gated_delta_rule(
        **given, scale=0.5, cu_seqlens=bounds, initial_state=state, output_final_state=True
    )
    assert not out[:, 7:].any()
    assert torch.equal(final[1], state[1])
    (out.sum() + final.sum()).backward()
    assert given["v"].grad[0, :, 0, 0].tolist() == [0.5] * 7 + [0.0] * 2
    assert state.grad[:, 0, 0, 0].tolist() == [2.0, 1.0, 2.0]


def test_without_a_library_that_has_a_backward_the_reasons_are_told(calls, monkeypatch) -> None:
    use_external("always")
    monkeypatch.setattr(external, "_version", lambda name: None)
    given = tensors(steps=20)
    given["k"].requires_grad_()
    with pytest.raises(UnsupportedError, match=r"flash-qla>=0.1.3.*fla-core>=0.6.0"):
        ops.gdn.chunk_gated_delta_rule(**given)
    with pytest.raises(UsageError, match="there is no backward"):
        ops.gdn.fused_recurrent_gated_delta_rule(**given)
