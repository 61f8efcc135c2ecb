"""The MLA kernel in the interpreter against the fp32 reference, over every pair of choices."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace

import mla_grid as grid
import pytest
import torch
from tilescout.errors import UsageError
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.covering import covering_sample, pairs_of

interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
    # The interpreter takes log2(0) = -inf of rows without tokens through numpy.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

LENGTHS = {"ragged": [77, 0], "fewer than query tokens": [1, 2, 33], "tiles": [64, 96]}
SPACE = grid.case_space(
    lengths=tuple(LENGTHS), heads=(12, 5), query_lens=(1, 2, 3), pages=(64, 1, 7, 16)
)
CASES = covering_sample(SPACE, 1, seed=0).configs


def case_of(**changes: object) -> dict:
    """The plainest case but for these choices."""
    return {**SPACE.default.as_dict(), **changes}


def run(case, lengths, *, inputs=None, launches=1):
    """Inputs and the outputs of each launch; scratch memory starts as NaN."""
    import interpreter_shim

    interpreter_shim.install()
    problem = grid.problem_of(case, lengths)
    inputs = inputs or grid.inputs_of(case, lengths, device="cpu")
    launcher = template("paged_decode", "triton_mla").build(problem, grid.config_of(case), inputs)
    launcher.partial_out.fill_(math.nan)
    launcher.partial_lse.fill_(math.nan)
    outputs = [grid.outputs_of(case, inputs) for _ in range(launches)]
    for each in outputs:
        launcher.launch(inputs, each)
    return problem, inputs, outputs


def test_every_pair_of_choices_is_in_a_case() -> None:
    covered = set().union(*map(pairs_of, CASES))
    by_name = {p.name: p for p in SPACE.parameters}
    missing = set()
    for a, b in itertools.combinations(sorted(by_name), 2):
        every = {((a, x), (b, y)) for x in by_name[a].values for y in by_name[b].values}
        missing |= every - covered
    assert missing == {
        *((("merge", merge), ("split_rule", "none")) for merge in by_name["merge"].values),
        (("block_m", 8), ("swap_ab", False)),
        *((("page_size", page), ("page_tiles", True)) for page in (1, 7)),
        *((("page_tiles", True), ("window_left", window)) for window in (0, 9, 40)),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.config_id)
class TestCovering:
    pytestmark = interpreted

    def test_matches_reference(self, case: Config) -> None:
        values = case.as_dict()
        problem, inputs, outputs = run(values, LENGTHS[values["lengths"]], launches=2)
        assert ref.compare(problem, inputs, outputs[0]).reason is None, case
        assert ref.outputs_equal(*outputs), case


class TestEdges:
    pytestmark = interpreted

    @pytest.mark.parametrize("damage", ["zeros", "one row", "positional part", "lse"])
    def test_comparison_can_fail(self, damage: str) -> None:
        problem, inputs, (outputs,) = run(case_of(), [77, 40])
        assert ref.compare(problem, inputs, outputs).reason is None
        if damage == "zeros":
            outputs.out.zero_()
        elif damage == "one row":
            outputs.out[1, 5] = outputs.out[1, 4]
        elif damage == "lse":
            outputs.lse[0] += 0.02
        else:
            inputs.q[..., problem.head_dim_v :] = 0
        assert ref.compare(problem, inputs, outputs).reason is not None

    @pytest.mark.parametrize("split_rule", grid.SPLITS)
    def test_requests_without_tokens_give_zero_and_minus_infinity(self, split_rule: str) -> None:
        merge = {} if split_rule == "none" else {"merge": "last_block"}
        case = case_of(split_rule=split_rule, **merge)
        _, _, (outputs,) = run(case, [0, 90, 0])
        for request in (0, 2):
            assert torch.equal(outputs.out[request], torch.zeros_like(outputs.out[request]))
            assert torch.isneginf(outputs.lse[request]).all()
        assert torch.isfinite(outputs.lse[1]).all()

    def test_logits_far_below_zero_keep_their_value(self) -> None:
        # All logits are near -16,000: a finite sentinel instead of -inf would swallow them.
        case = case_of(split_rule="count", merge="kernel", query_len=2)
        inputs = grid.inputs_of(case, [70, 3], device="cpu")
        inputs.q.fill_(8.0)
        inputs.k_cache.fill_(-83.0)
        problem, inputs, (outputs,) = run(case, [70, 3], inputs=inputs)
        assert ref.compare(problem, inputs, outputs).reason is None

    def test_request_alone_equals_request_in_a_batch_under_a_fixed_split_size(self) -> None:
        case = case_of(split_rule="size", merge="last_block", heads=5)
        _, inputs, (batched,) = run(case, [77, 30, 100])
        first, end = inputs.kv_indptr[2:4].tolist()
        alone = replace(
            inputs,
            q=inputs.q[2:],
            kv_indptr=torch.tensor([0, end - first], dtype=torch.int32),
            kv_indices=inputs.kv_indices[first:end],
            kv_last_page_len=inputs.kv_last_page_len[2:],
        )
        _, _, (single,) = run(case, [100], inputs=alone)
        assert torch.equal(batched.out[2:], single.out)
        assert torch.equal(batched.lse[2:], single.lse)

    def test_inputs_are_not_modified(self) -> None:
        case = case_of(split_rule="stream", merge="kernel")
        inputs = grid.inputs_of(case, [77, 0, 100], device="cpu")
        tensors = (inputs.q, inputs.k_cache.view(torch.int16), inputs.kv_indices)
        before = [t.clone() for t in tensors]
        run(case, [77, 0, 100], inputs=inputs, launches=3)
        assert all(map(torch.equal, before, tensors))

    def test_a_value_pool_of_its_own_is_refused(self) -> None:
        case = case_of()
        inputs = grid.inputs_of(case, [20], device="cpu")
        with pytest.raises(UsageError, match=r"pass k_cache\[\.\.\., :512\]"):
            run(case, [20], inputs=replace(inputs, v_cache=inputs.v_cache.clone()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim_v": 576}, "head_dim_v=576 equals head_dim: K and V are stored apart"),
        ({"head_dim_v": 384}, "head_dim_v=384 is not one of 64, 128, 256, 512"),
        ({"head_dim": 520}, "head_dim - head_dim_v=8 is not one of 16, 32, 64, 128"),
        ({"has_alibi": True}, "has_alibi=True: latent rows hold rotated positions"),
        ({"query_len": 5000}, "query_len=5000 is above 4096"),
        ({"batch": 65536}, "batch=65536 is above 65535"),
    ],
)
def test_refusals_name_the_reason(changes: dict, reason: str, h200) -> None:
    fields = {"head_dim": 576, "head_dim_v": 512, "batch": 2, **changes}
    problem = PagedDecodeProblem(
        kv_len=100, num_qo_heads=16, num_kv_heads=1, page_size=16, dtype="bfloat16", **fields
    )
    said = template("paged_decode", "triton_mla").supports(problem, h200)
    assert said is not None
    assert reason in said
    older = replace(h200, compute_capability=(8, 0))
    plain = replace(problem, head_dim=576, head_dim_v=512, has_alibi=False, query_len=1, batch=2)
    assert template("paged_decode", "triton_mla").supports(plain, h200) is None
    assert "8.0 is below 9.0" in template("paged_decode", "triton_mla").supports(plain, older)
