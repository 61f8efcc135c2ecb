"""Which template a call of FP4 attention gets where the winner cannot serve its tensors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from devices import H200
from fp4_calls import problem_of
from tilescout.errors import UnsupportedError
from tilescout.kernels.fp4_attention import Fp4AttentionFwdOutputs
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.ops import fp4_launch

PROBLEM = problem_of(query_len=8, kv_len=16, out_dtype="bfloat16")


@pytest.fixture(autouse=True)
def _templates_in_order(monkeypatch) -> None:
    """A snapshot whose winners are TileLang's, then Triton's, then none."""

    def lookup(problem, device, *, without):
        for name in ("tilelang_emulated", "triton_emulated"):
            if name not in without:
                return SimpleNamespace(template=name)
        raise UnsupportedError("no template is left")

    monkeypatch.setattr(fp4_launch, "current_snapshot", lambda: SimpleNamespace(lookup=lookup))
    monkeypatch.setattr(fp4_launch, "device_spec", lambda device, function: H200)


def looked_up(inputs, width=64):
    shape = (1, 2, 8, width)
    outputs = Fp4AttentionFwdOutputs(torch.empty(shape, dtype=torch.bfloat16)[..., :64], None)
    return fp4_launch._lookups("fp4_attention", PROBLEM, inputs, outputs)[-1]


def test_the_winner_serves_where_it_can() -> None:
    inputs = ref.make_inputs(PROBLEM, device="cpu", seed=1)
    assert looked_up(inputs).template == "tilelang_emulated"


def test_the_next_template_serves_rows_that_are_not_aligned() -> None:
    inputs = ref.make_inputs(PROBLEM, device="cpu", seed=1)
    assert looked_up(inputs, width=68).template == "triton_emulated"


def test_every_reason_is_given_where_none_serves() -> None:
    inputs = ref.make_inputs(PROBLEM, device="cpu", seed=1)
    turned = replace(inputs, k=replace(inputs.k, codes=inputs.k.codes.mT.contiguous().mT))
    with pytest.raises(UnsupportedError, match=r"tilelang_emulated.*triton_emulated.*contiguous"):
        looked_up(turned)
