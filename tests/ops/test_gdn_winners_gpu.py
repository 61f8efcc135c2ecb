"""Every winner of the gated delta net that is shipped for this GPU: right, and equal 20 times."""

from __future__ import annotations

import pytest
import torch
from tilescout.kernels.registry import operation, template
from tilescout.tuner import dispatch
from tilescout.tuner.environment import current_device
from tilescout.tuner.paths import shipped_database_path
from tilescout.tuner.records import Provenance
from tilescout.tuner.store import Store

SKU = "h200"
NUM_RUNS = 20


def problems_won(op: str) -> list:
    """Problems for which the shipped database has a measured winner, small ones first."""
    with Store.open(shipped_database_path(), read_only=True) as store:
        keys = [w.study.key for w in store.winners(op=op, skus=[SKU])]
    found = {k.problem for k in keys if k.provenance is Provenance.MEASURED}
    return sorted(found, key=lambda problem: (problem.bytes_moved, problem.key()))


WON = [problem for op in ("gdn_decode", "gdn_chunk_fwd") for problem in problems_won(op)]


def test_there_are_winners_of_decode() -> None:
    assert {problem.batch for problem in WON if problem.op == "gdn_decode"} >= {1, 16, 64, 256}


@pytest.mark.gpu
@pytest.mark.parametrize("problem", WON, ids=str)
def test_a_winner_is_right_and_repeats_bit_for_bit(problem) -> None:
    device = current_device()
    found = dispatch.current_snapshot().lookup(problem, device)
    if found.tier != "exact":
        pytest.skip(f"{device.sku} has no winner of its own: tier {found.tier}")
    op = operation(problem.op)
    inputs = op.make_validation_inputs(problem, device="cuda", seed=11)
    launcher = template(problem.op, found.config.template).build(problem, found.config, inputs)
    first = op.make_outputs(problem, inputs)
    launcher.launch(inputs, first)
    torch.cuda.synchronize()
    assert op.compare(problem, inputs, first).reason is None, found.config
    for _ in range(NUM_RUNS):
        again = op.make_outputs(problem, inputs)
        launcher.launch(inputs, again)
        assert op.outputs_equal(first, again), found.config
