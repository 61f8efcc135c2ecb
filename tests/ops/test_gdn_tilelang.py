"""A TileLang winner that refuses the tensors of a call: another template of ours serves it."""

from __future__ import annotations

import os

import pytest
import torch
from gdn_calls import close, interpreted, recurrence, tensors
from tilescout import ops
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.kernels.registry import template
from tilescout.search_spaces.registry import space_of
from tilescout.tuner import dispatch
from tilescout.tuner.catalog import gpu, gpu_names
from winner_databases import MadeUpWinner, write_winners

pytestmark = interpreted
CHUNK = GdnChunkProblem(2, 40, 20, 2, 4, 64, 64, "bfloat16")
DECODE = GdnDecodeProblem(2, 3, 2, 4, 64, 64, "bfloat16", gate="given", use_qk_l2norm=False)
ZEROS = torch.zeros(2, 4, 64, 64)


@pytest.fixture(autouse=True)
def _winners(monkeypatch, tmp_path):
    """TileLang is the winner of both operations."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter_shim

        interpreter_shim.install()
    sku = gpu(gpu_names()[0])
    winners = [
        MadeUpWinner(problem, sku, space_of(problem, "tilelang", sku).default)
        for problem in (CHUNK, DECODE)
    ]
    path = tmp_path / "tilelang.db"
    write_winners(path, winners)
    monkeypatch.setenv("TILESCOUT_DB", str(path))
    dispatch.refresh()
    for problem in (CHUNK, DECODE):
        assert dispatch.current_snapshot().lookup(problem, sku).template == "tilelang"
    yield
    dispatch.refresh()


@pytest.fixture
def refusals(monkeypatch):
    """What the TileLang templates said of the tensors they were asked for."""
    said = []
    for problem in (CHUNK, DECODE):
        kind = type(template(problem.op, "tilelang"))
        found = kind.supports_tensors

        def ask(self, *tensors, found=found):
            said.append(found(self, *tensors))
            return said[-1]

        monkeypatch.setattr(kind, "supports_tensors", ask)
    return said


@pytest.mark.parametrize(
    ("function", "steps"),
    [
        (ops.gdn.chunk_gated_delta_rule, 20),
        (ops.gdn.fused_recurrent_gated_delta_rule, 3),
    ],
)
def test_tensors_that_tilelang_refuses_are_served(function, steps, refusals) -> None:
    given = {name: x.bfloat16() for name, x in tensors(steps=steps).items()}
    out, final = function(**given, output_final_state=True)
    assert refusals
    assert all("TileLang has no interpreter" in reason for reason in refusals)
    exact = {name: x.float() for name, x in given.items()}
    expected, state = recurrence(**exact, state=ZEROS, scale=64**-0.5)
    close(out.float(), expected, 2e-2)
    close(final, state, 2e-2)
