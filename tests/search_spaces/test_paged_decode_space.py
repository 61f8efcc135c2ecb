"""The space of paged decode over the problems of the workloads: sizes, seeds and refusals."""

from __future__ import annotations

import itertools
import random

import pytest
from tilescout.errors import UsageError
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.search_spaces.paged_decode import triton_space

GROUPS = [1, 3, 4, 7, 8, 16]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kv_len", [1, 100, 1024, 32768])
def test_default_and_seeds_are_valid_and_hold_the_whole_group(group, kv_len, h200) -> None:
    problem = PagedDecodeProblem(4, kv_len, 2 * group, 2, 128, 16, "bfloat16")
    space = triton_space(problem, h200)
    assert len(space.valid_seeds()) >= 3
    for seed in space.valid_seeds():
        assert space.check(seed) is None
        assert group <= seed["block_m"] < 2 * max(group, 1)


def test_enumeration_equals_brute_force(h200) -> None:
    problem = PagedDecodeProblem(1, 700, 8, 2, 256, 16, "bfloat16")
    space = triton_space(problem, h200)
    by_name = {p.name: p for p in space.parameters}
    found = set()
    plain = [p for p in space.parameters if p.active_when is None]
    for values in itertools.product(*(p.values for p in plain)):
        chosen = dict(zip([p.name for p in plain], values, strict=True))
        extra = {
            "none": [{}],
            "count": [
                {"num_splits": n, "merge": m}
                for n in by_name["num_splits"].values
                for m in by_name["merge"].values
            ],
            "size": [
                {"split_tokens": n, "merge": m}
                for n in by_name["split_tokens"].values
                for m in by_name["merge"].values
            ],
            "stream": [
                {"ctas_per_sm": n, "merge": m}
                for n in by_name["ctas_per_sm"].values
                for m in by_name["merge"].values
            ],
        }[chosen["split_rule"]]
        for more in extra:
            config = space.default.of("triton", {**chosen, **more})
            if space.check(config) is None:
                found.add(config)
    assert found == set(space)


def test_refusals_name_the_reason(h200) -> None:
    problem = PagedDecodeProblem(1, 1024, 32, 8, 128, 16, "bfloat16")
    space = triton_space(problem, h200)
    wide = space.default.replace(block_n=256, num_stages=4)
    assert "shared memory" in space.check(wide)
    assert "h200 allows" in space.check(wide)
    tall = space.default.replace(block_n=256, num_warps=1, num_stages=2, num_splits=2)
    assert "registers a thread" in space.check(tall)
    assert "exceed kv_len=1024" in space.check(space.default.replace(num_splits=64))


def test_no_split_of_a_sampled_config_is_without_a_tile(h200) -> None:
    problem = PagedDecodeProblem(1, 1024, 32, 8, 128, 16, "bfloat16")
    rng = random.Random(0)
    space = triton_space(problem, h200)
    for config in (space.sample(rng) for _ in range(300)):
        if config["split_rule"] == "count":
            assert config["num_splits"] * config["block_n"] <= problem.kv_len
        elif config["split_rule"] == "size":
            assert config["split_tokens"] % config["block_n"] == 0


@pytest.mark.parametrize("kv_len", [0, -1, 2**31])
def test_lengths_that_no_page_table_can_hold_are_refused(kv_len: int) -> None:
    with pytest.raises(UsageError, match=rf"kv_len={kv_len} .* from 1 to 2147483647"):
        PagedDecodeProblem(1, kv_len, 8, 2, 64, 16, "bfloat16")


def test_problems_of_one_shape_share_a_space(h200) -> None:
    first = PagedDecodeProblem(1, 1024, 32, 8, 128, 16, "bfloat16")
    second = PagedDecodeProblem(64, 1024, 8, 2, 128, 256, "bfloat16")
    assert triton_space(first, h200) is triton_space(second, h200)
