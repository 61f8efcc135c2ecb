"""The space of gated-delta-net decode: sizes, seeds, refusals, and that all of it compiles."""

from __future__ import annotations

import pytest
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.kernels.registry import template
from tilescout.search_spaces.gdn_decode import SPACES, triton_space
from tilescout.search_spaces.gdn_decode_stream import stream_space


@pytest.mark.parametrize(("k", "v"), [(64, 64), (128, 128), (96, 192), (256, 256)])
def test_default_and_seeds_are_valid_and_what_spills_is_refused(k, v, h200) -> None:
    problem = GdnDecodeProblem(4, 1, 4, 8, k, v, "bfloat16")
    space = triton_space(problem, h200)
    assert space.default in set(space)
    assert len(space.valid_seeds()) >= 2
    largest = space.default.replace(block_v=1 << (v - 1).bit_length(), num_warps=1)
    if k * v > 64 * 64:
        assert "registers a thread" in space.check(largest)
    for config in space:
        elements = (1 << (k - 1).bit_length()) * config["block_v"]
        assert elements <= 224 * 32 * config["num_warps"]


@pytest.mark.parametrize(("k", "v"), [(64, 64), (128, 128), (96, 192), (256, 256)])
def test_runs_stay_in_the_state_and_tiles_in_registers(k, v, h200) -> None:
    problem = GdnDecodeProblem(4, 1, 4, 8, k, v, "bfloat16")
    space = stream_space(problem, h200)
    assert space.default in set(space)
    assert len(space.valid_seeds()) >= 8
    columns = 1 << (v - 1).bit_length()
    long_run = {"block_v": columns // 4, "block_tiles": 8, "num_warps": 4, "loads_ahead": False}
    assert f"above the {columns} of head_dim_v={v}" in space.check(
        space.default.replace(**long_run)
    )
    few_registers = space.default.replace(block_v=columns, maxnreg=64)
    assert "registers a thread for the state, above 40" in space.check(few_registers)
    for config in space:
        assert config["block_v"] * config["block_tiles"] <= columns
        tiles = 2 if config.get("loads_ahead") else 1
        held = tiles * (1 << (k - 1).bit_length()) * config["block_v"]
        assert held <= (config["maxnreg"] - 24) * 32 * config["num_warps"]
        assert ("loads_ahead" in config.as_dict()) == (config["block_tiles"] > 1)


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("name", ["triton", "triton_stream"])
def test_the_default_compiles_for_every_architecture(name, arch, layout, h200) -> None:
    problem = GdnDecodeProblem(4, 1, 16, 32, 128, 128, "bfloat16", state_layout=layout)
    config = SPACES[name](problem, h200).default
    (spec,) = template("gdn_decode", name).kernel_specs(problem, config)
    binary = spec.compile(arch)
    assert binary.threads_per_block == 32 * config["num_warps"]
    assert binary.cubin[:4] == b"\x7fELF"


def test_what_the_template_refuses_has_a_reason(h200) -> None:
    chosen = template("gdn_decode", "triton")
    odd = GdnDecodeProblem(1, 1, 1, 1, 80, 64, "bfloat16")
    assert "head_dim_k=80 is not one of 64, 96, 128, 192, 256" in chosen.supports(odd, h200)
    assert chosen.supports(GdnDecodeProblem(1, 1, 1, 1, 64, 64, "bfloat16"), h200) is None
