"""Every pair of semantic choices, on the GPU, against fp32: at least 300 cases.

The grid is a covering sample over layout, page table, page size, head_dim, group, query length,
dtypes, window, masks, biases, rotation, LSE, lengths, strides and how the template splits, merges
and tiles. Without a GPU, the cases, their configs and the comparison are checked.
"""

from __future__ import annotations

import itertools
import math

import paged_decode_grid as grid
import pytest
import torch
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.covering import pairs_of

NUM_CASES = 400
MIN_CASES_RUN = 300
CASES = grid.grid_cases(NUM_CASES).configs


def case_id(case: Config) -> str:
    return case.config_id


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_reference(case: Config) -> None:
    values = case.as_dict()
    reason = grid.refusal(values)
    if reason is not None:
        pytest.skip(f"refused: {reason}")
    problem, inputs = grid.problem_of(values), grid.inputs_of(values, device="cuda")
    before = [t.clone() for t in (inputs.q, inputs.kv_indices)]
    launcher = template("paged_decode", "triton").build(problem, grid.config_of(case), inputs)
    first, second = (grid.outputs_of(values, inputs) for _ in range(2))
    launcher.launch(inputs, first)
    launcher.launch(inputs, second)
    comparison = ref.compare(problem, inputs, first)
    assert comparison.reason is None, f"{comparison.reason}: {case}"
    assert ref.outputs_equal(first, second), f"two launches differ: {case}"
    assert all(map(torch.equal, before, (inputs.q, inputs.kv_indices)))


def test_every_pair_of_choices_is_in_a_case() -> None:
    space = grid.grid_space()
    sample = grid.grid_cases(NUM_CASES)
    assert len(set(CASES)) == len(CASES) >= NUM_CASES
    assert all(space.check(case) is None for case in CASES)
    covered = set().union(*map(pairs_of, CASES))
    never = {(("alibi", True), ("soft_cap", True))}
    for parameter in space.parameters:
        if (condition := parameter.active_when) is not None:
            parent = next(p for p in space.parameters if p.name == condition.parent)
            away = set(parent.values) - set(condition.values)
            pairs = itertools.product(parameter.values, away)
            never |= {tuple(sorted([(parameter.name, x), (parent.name, y)])) for x, y in pairs}
    every = {
        ((a.name, x), (b.name, y))
        for a, b in itertools.combinations(sorted(space.parameters, key=lambda p: p.name), 2)
        for x in a.values
        for y in b.values
    }
    assert every - covered == never == set(sample.impossible)


def test_refusals_have_a_reason_and_enough_cases_run() -> None:
    reasons = [grid.refusal(case.as_dict()) for case in CASES]
    refused = [reason for reason in reasons if reason is not None]
    assert len(CASES) - len(refused) >= MIN_CASES_RUN, refused[:3]
    for reason in refused:
        assert any(character.isdigit() for character in reason), reason


def test_every_case_has_a_config_that_splits_and_merges_as_it_says() -> None:
    for case in CASES:
        if grid.refusal(case.as_dict()) is None:
            config = grid.config_of(case)
            assert config["split_rule"] == case["split_rule"]
            assert config.get("merge") == case.get("merge")


def referred(case: Config) -> tuple:
    """Problem, inputs and the right outputs, on the CPU."""
    values = case.as_dict()
    problem, inputs = grid.problem_of(values), grid.inputs_of(values, device="cpu")
    outputs = grid.outputs_of(values, inputs)
    for request in range(grid.BATCH):
        rows = slice(request * problem.query_len, (request + 1) * problem.query_len)
        out, lse = ref.reference(inputs, request)
        outputs.out[rows] = out.to(outputs.out.dtype)
        if outputs.lse is not None:
            outputs.lse[rows] = lse if outputs.lse_base == "2" else lse * math.log(2.0)
    return problem, inputs, outputs


@pytest.mark.parametrize("case", CASES[:24], ids=case_id)
def test_zeros_and_a_small_drift_fail_where_the_reference_passes(case: Config) -> None:
    problem, inputs, outputs = referred(case)
    assert ref.compare(problem, inputs, outputs).reason is None
    outputs.out.mul_(0.97)
    assert "RMS" in str(ref.compare(problem, inputs, outputs).reason)
    outputs.out.zero_()
    assert "RMS" in str(ref.compare(problem, inputs, outputs).reason)
