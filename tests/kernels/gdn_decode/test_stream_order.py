"""Loads of the streaming kernel are issued early: a latency is paid once, not once a load.

The compiler may move a load to where its value is used, and did so before there were barriers
in the kernel (q and v behind the state, Triton 3.9.0). Only SASS shows it.
"""

from __future__ import annotations

import re

import pytest
from moving_pointers import disassembled
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.kernels.registry import template

PROBLEM = GdnDecodeProblem(64, 1, 16, 32, 128, 128, "bfloat16", state_layout="VK")
NUM_TOKEN_LOADS = 8
"""Slot, q, k, v, a, b, A_log, dt_bias."""
VALUES = {
    **{"block_v": 4, "block_tiles": 1, "num_warps": 1, "maxnreg": 255, "launch_pdl": True},
    **{"state_load": "evict_first", "state_store": "evict_normal"},
}
AHEAD = {**VALUES, "block_tiles": 4, "loads_ahead": True}


def accesses(sass: str) -> list[tuple[str, int]]:
    """Loads and stores of global memory in order: which, and the bits a thread moves."""
    found = re.findall(r"\b(LDG|STG)\.(\S*)", sass)
    return [(kind, 128 if "128" in rest else 64 if "64" in rest else 32) for kind, rest in found]


def order_of(values) -> list[tuple[str, int]]:
    spec = template("gdn_decode", "triton_stream").kernel_specs(
        PROBLEM, Config.of("triton_stream", values)
    )[0]
    return accesses(disassembled(spec.compile(90).cubin))


def tiles_before(found, place: int) -> float:
    """Tiles of four columns whose loads, 128 bits each, come before a place."""
    return found[:place].count(("LDG", 128)) / 4


def first_store(found) -> int:
    return [kind for kind, _ in found].index("STG")


def test_what_a_token_brings_is_loaded_before_the_tile() -> None:
    found = order_of(VALUES)
    first_tile = found.index(("LDG", 128))
    assert first_tile == NUM_TOKEN_LOADS
    assert tiles_before(found, first_store(found)) == 1
    assert found.count(("STG", 128)) == 4


def test_the_next_tile_is_loaded_before_the_current_one_is_stored() -> None:
    found = order_of(AHEAD)
    assert tiles_before(found, first_store(found)) == 2
    in_turn = order_of({**AHEAD, "loads_ahead": False})
    assert tiles_before(in_turn, first_store(in_turn)) == 1
    assert tiles_before(found, len(found)) == tiles_before(in_turn, len(in_turn)) == 4


@pytest.mark.parametrize(("launch_pdl", "expected"), [(True, ["PREEXIT", "ACQBULK"]), (False, [])])
def test_an_early_launch_waits_before_it_reads(launch_pdl, expected) -> None:
    config = Config.of("triton_stream", {**VALUES, "launch_pdl": launch_pdl})
    spec = template("gdn_decode", "triton_stream").kernel_specs(PROBLEM, config)[0]
    assert spec.launch_pdl == launch_pdl
    sass = disassembled(spec.compile(90).cubin)
    before = sass[: sass.index("LDG")]
    assert re.findall(r"PREEXIT|ACQBULK", before) == expected
    assert re.findall(r"PREEXIT|ACQBULK", sass) == expected
