"""The space of NVFP4 caches: defaults fit, seeds cover what decides speed, refusals say why."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tilescout.errors import UsageError
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import supported_templates, template
from tilescout.search_spaces.paged_decode_nvfp4 import nvfp4_space
from tilescout.tuner.catalog import gpu

PROBLEM = PagedDecodeProblem(64, 8192, 32, 8, 128, 16, "bfloat16", kv_dtype="nvfp4")


@pytest.mark.parametrize("sku", ["h200", "b200", "rtx5090"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4, 7, 16, 64])
@pytest.mark.parametrize("kv_len", [1, 100, 32768])
def test_default_and_seeds_are_valid(kv_len: int, group: int, head_dim: int, sku: str) -> None:
    changes = {"num_qo_heads": 8 * group, "head_dim": head_dim, "head_dim_v": head_dim}
    space = nvfp4_space(replace(PROBLEM, kv_len=kv_len, **changes), gpu(sku))
    seeds = space.valid_seeds()
    assert seeds[0] == space.default
    assert all(space.check(seed) is None for seed in seeds)


def test_seeds_have_every_value_that_decides_the_number_of_instructions() -> None:
    for sku, dequant in (("h200", {"shift", "carry"}), ("b200", {"shift", "carry", "hardware"})):
        seeds = nvfp4_space(PROBLEM, gpu(sku)).valid_seeds()
        assert {seed["dequant"] for seed in seeds} == dequant
        assert {seed["v_operand"] for seed in seeds} == {"shared", "registers"}


def test_sampled_configs_are_valid_and_their_splits_have_work() -> None:
    space = nvfp4_space(replace(PROBLEM, kv_len=1024), gpu("h200"))
    rng = random.Random(0)
    for config in (space.sample(rng) for _ in range(200)):
        assert space.check(config) is None
        if config["split_rule"] == "count":
            assert config["num_splits"] * config["block_n"] <= 1024


def test_refusals_name_the_reason() -> None:
    space = nvfp4_space(PROBLEM, gpu("h200"))
    many = space.default.replace(v_operand="registers")
    assert "4 warps for 32 words of a row" in space.check(many)
    assert "shared memory" in space.check(space.default.replace(block_n=256, num_stages=6))
    assert "registers a thread" in space.check(space.default.replace(block_n=256, num_warps=1))
    assert "is not one of shift, carry" in space.check(space.default.replace(dequant="hardware"))


def test_only_one_template_serves_the_dtype_and_the_others_name_it() -> None:
    device = gpu("h200")
    assert [t.name for t in supported_templates(PROBLEM, device)] == ["triton_nvfp4"]
    wide = replace(PROBLEM, kv_dtype="bfloat16")
    assert "triton_nvfp4" not in [t.name for t in supported_templates(wide, device)]
    reason = template("paged_decode", "triton").supports(PROBLEM, device)
    assert reason is not None
    assert "triton_nvfp4 serves such caches" in reason
    rope = template("paged_decode", "triton_nvfp4").supports(
        replace(PROBLEM, has_rope=True), device
    )
    assert rope is not None
    assert "rotate K before it is quantised" in rope


def test_a_problem_counts_codes_and_scales_as_bytes() -> None:
    # 64 bytes of codes and 8 of scales for each of K and V; q and the output are small.
    rows = 2 * 64 * 32 * 128 * 2
    assert PROBLEM.bytes_moved == 64 * 8192 * 8 * 2 * 72 + rows
    assert PagedDecodeProblem.from_dict(PROBLEM.as_dict()) == PROBLEM
    assert "kv_dtype=nvfp4" in str(PROBLEM)
    assert PROBLEM.key() != replace(PROBLEM, kv_dtype="float8_e4m3fn").key()


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 72, "head_dim_v": 72},
        {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1},
    ],
)
def test_rows_that_are_no_whole_blocks_and_latent_rows_are_refused(changes: dict) -> None:
    with pytest.raises(UsageError, match=r"kv_dtype='nvfp4' of a paged_decode problem must be"):
        replace(PROBLEM, **changes)
