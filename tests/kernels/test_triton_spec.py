"""What a specification hands to Triton is what every supported version takes."""

from __future__ import annotations

import pytest
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import template
from tilescout.kernels.triton_spec import eviction_policy
from tilescout.search_spaces.registry import joint_space


@pytest.mark.parametrize(
    "problem",
    [
        PagedDecodeProblem(16, 8192, 32, 8, 128, 16, "bfloat16"),
        GdnDecodeProblem(4, 1, 16, 32, 128, 128, "bfloat16"),
    ],
    ids=lambda p: p.op,
)
def test_eviction_policies_are_those_that_triton_3_6_knows(problem, h200) -> None:
    given = set()
    seeds = joint_space(problem, h200).valid_seeds()
    for config in (seed for seed in seeds if seed.template == "triton"):
        for spec in template(problem.op, "triton").kernel_specs(problem, config):
            given |= {v for k, v in spec.constexprs.items() if k.endswith("_EVICTION")}
    assert given == {"", "evict_first"}


def test_only_the_normal_policy_is_renamed() -> None:
    assert eviction_policy("evict_normal") == ""
    assert eviction_policy("evict_first") == "evict_first"
